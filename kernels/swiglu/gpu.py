"""SwiGLU on a GPU, in Triton: one read, one write, float32 in between."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import begin, ready

_BLOCK = 1024


@triton.jit
def _swiglu(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
) -> None:
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    ready(CHAINED)
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)  # rounded as F.silu rounds
    tl.store(out + row * WIDTH + at, (silu * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, *, chained: bool = False) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * width]`, gate first: `[tokens, width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _swiglu[(rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, WIDTH=width, BLOCK=_BLOCK, CHAINED=chained, launch_pdl=chained, num_warps=4
    )
    return out
