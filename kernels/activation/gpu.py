"""SwiGLU on a GPU, in Triton: one read, one write, float32 in between; it also adds up a split product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8.gpu import empty_rows, in_fp8, warps_of
from kernels.fp8.ref import Fp8Rows
from kernels.launch import begin, ready

_BLOCK = 1024


@triton.jit
def _swiglu(
    gate_up: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    split_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    fp8: tl.constexpr = out.dtype.element_ty == tl.float8e4nv  # a row is then in one program
    rounded: tl.constexpr = gate_up.dtype.element_ty if fp8 else out.dtype.element_ty
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    ready(CHAINED)
    gate_up += row * 2 * WIDTH + at
    gate = tl.load(gate_up, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + WIDTH, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        gate += tl.load(gate_up + split * split_stride, mask=inside, other=0.0)
        up += tl.load(gate_up + split * split_stride + WIDTH, mask=inside, other=0.0)
    if SPLITS > 1:  # what an unsplit product gives
        gate, up = gate.to(rounded).to(tl.float32), up.to(rounded).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(rounded).to(tl.float32)  # rounded as F.silu rounds
    value = silu * up
    if fp8:
        value, row_scale = in_fp8(value)
        tl.store(out_scales + row, row_scale)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, dtype: torch.dtype | None = None, *, chained: bool = False) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * width]`, gate first: `[tokens, width]` in `dtype`. The splits of
    `[splits, tokens, ...]` float32 are added up first, and the sum is rounded to `dtype`."""
    rows, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = gate_up.new_empty(rows, width, dtype=dtype)
    _swiglu[(rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, None, 2 * rows * width, WIDTH=width, BLOCK=_BLOCK,
        SPLITS=gate_up.shape[0] if gate_up.dim() == 3 else 1, CHAINED=chained, launch_pdl=chained,
        num_warps=4,
    )  # fmt: skip
    return out


def swiglu_fp8(gate_up: Tensor, *, chained: bool = False) -> Fp8Rows:
    """`swiglu` of an unsplit product as fp8 rows."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, block = empty_rows(rows, width, gate_up.device), triton.next_power_of_2(width)
    _swiglu[(rows, 1)](
        gate_up, out.numbers, out.scales, 0, WIDTH=width, BLOCK=block, SPLITS=1, CHAINED=chained,
        launch_pdl=chained, num_warps=warps_of(block),
    )  # fmt: skip
    return out
