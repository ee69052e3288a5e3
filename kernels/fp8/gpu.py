"""Fp8 rows on a GPU: a product of the library, and the quantising of rows in Triton.

Norms and SwiGLU write fp8 rows themselves (kernels.norm.gpu, kernels.activation.gpu) through `in_fp8`: a row
is in one program, so its largest magnitude is at hand. `quantise_rows` is for what other kernels make.
Products of few rows are in kernels.gemm.gpu.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import FP8
from kernels.fp8.ref import Fp8Rows
from kernels.launch import begin, ready


@triton.jit
def in_fp8(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A row of float32 numbers, zeros past its end, over its scale; and the scale, as kernels.fp8.ref."""
    largest = tl.max(tl.abs(value), 0)
    scale = tl.where(largest == 0, 1.0, largest / 448.0)
    return tl.clamp(value * (1.0 / scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL), scale


@triton.jit
def _quantise(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ready(CHAINED)
    value, scale = in_fp8(tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32))
    tl.store(numbers + row * WIDTH + at, value.to(numbers.dtype.element_ty), mask=at < WIDTH)
    tl.store(scales + row, scale)


def empty_rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    """Fp8 rows for a kernel to write."""
    return Fp8Rows(
        torch.empty(rows, width, dtype=FP8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def warps_of(block: int) -> int:
    """Warps of a program with a row of `block` numbers, so that a thread holds 16."""
    return min(32, max(1, block // 512))


def quantise_rows(x: Tensor, *, chained: bool = False) -> Fp8Rows:
    """See kernels.fp8.ref; `x` is contiguous."""
    rows, width = x.shape
    found, block = empty_rows(rows, width, x.device), triton.next_power_of_2(width)
    _quantise[(rows,)](
        x, found.numbers, found.scales, WIDTH=width, BLOCK=block, CHAINED=chained, launch_pdl=chained,
        num_warps=warps_of(block),
    )  # fmt: skip
    return found


def scaled_mm(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, `[rows, width]` bfloat16. Both sizes of the weight must be multiples of 16."""
    return torch._scaled_mm(
        x.numbers, weight.numbers.T, scale_a=x.scales[:, None], scale_b=weight.scales[None, :], bias=bias,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
