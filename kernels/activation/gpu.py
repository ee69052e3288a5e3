"""SwiGLU on a GPU, in Triton: one read, one write, float32 in between; it also adds up a split product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import begin, ready

_BLOCK = 1024


@triton.jit
def _swiglu(
    gate_up: tl.tensor,
    out: tl.tensor,
    split_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
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
        gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)  # rounded as F.silu rounds
    tl.store(out + row * WIDTH + at, (silu * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, dtype: torch.dtype | None = None, *, chained: bool = False) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * width]`, gate first: `[tokens, width]` in `dtype`. The splits of
    `[splits, tokens, ...]` float32 are added up first, and the sum is rounded to `dtype`."""
    rows, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = gate_up.new_empty(rows, width, dtype=dtype)
    _swiglu[(rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, 2 * rows * width, WIDTH=width, BLOCK=_BLOCK,
        SPLITS=gate_up.shape[0] if gate_up.dim() == 3 else 1, CHAINED=chained, launch_pdl=chained,
        num_warps=4,
    )  # fmt: skip
    return out
