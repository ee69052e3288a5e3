"""RMS norm on a GPU, in Triton: the residual add, the norm and the sum of a split product in one pass.

One program a row, accumulated in float32. The sum `x + residual` is rounded to its dtype before the norm,
as the torch reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8.gpu import empty_rows, in_fp8, warps_of
from kernels.fp8.ref import Fp8Rows
from kernels.launch import begin, ready


@triton.jit
def _norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    split_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    scales = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    ready(CHAINED)
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(x + split * split_stride + row * WIDTH + at, mask=inside, other=0.0)
    if ADD:
        value = value.to(residual.dtype.element_ty).to(tl.float32)  # what an unsplit product gives
        value += tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = value * scale * scales
    if out.dtype.element_ty == tl.float8e4nv:
        normed, row_scale = in_fp8(normed)
        tl.store(out_scales + row, row_scale)
    tl.store(out + row * WIDTH + at, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, chained: bool = False) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` of the rows of `x` `[rows, width]`, contiguous."""
    out = torch.empty_like(x)
    _launch((x, None, weight, out), eps, chained)
    return out


def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    chained: bool = False,
) -> Tensor:
    """Add `x` to `residual` `[rows, width]` in place; the norm of the sum, in `out` if given. `x` is `[rows,
    width]`, or `[splits, rows, width]` float32, which is added up over the splits."""
    out = torch.empty_like(residual) if out is None else out
    _launch((x, residual, weight, out), eps, chained)
    return out


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, chained: bool = False
) -> Fp8Rows:
    """`rms_norm` as fp8 rows; with a `residual` `add_rms_norm_`."""
    out = empty_rows(x.shape[-2], x.shape[-1], x.device)
    _launch((x, residual, weight, out.numbers), eps, chained, out.scales)
    return out


def _launch(
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor],
    eps: float,
    chained: bool,
    out_scales: Tensor | None = None,
) -> None:
    x, residual, weight, out = tensors
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, residual, weight, out, out_scales, rows * width, eps,
        WIDTH=width, BLOCK=block, SPLITS=x.shape[0] if x.dim() == 3 else 1, ADD=residual is not None,
        CHAINED=chained, launch_pdl=chained, num_warps=min(16, warps_of(block)),
    )  # fmt: skip
