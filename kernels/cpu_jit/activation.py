"""SwiGLU on a CPU: one read, one write, float32 in between. See kernels.activation.ref."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_jit.llvm_intrinsics import bf16_at, exp, f32_at, fast, fetch_add, narrow, widen
from kernels.cpu_jit.thread_team import Call, Kernel

_ROWS = 4  # of a piece of work
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_LEAST = np.float32(-88.0)  # below it the gate is zero: `exp` stops growing at 88, the gate's value would not


@fast
def _rows(gate_up: Any, out: Any, rows: int, width: int, p: Any) -> None:
    while True:
        first = fetch_add(p) * _ROWS
        if first >= rows:
            return
        for row in range(first, min(first + _ROWS, rows)):
            gate, to = 2 * row * width, row * width
            up = gate + width
            for i in range(width):
                value = widen(gate_up[gate + i])
                silu = value / (_ONE + exp(-value)) if value > _LEAST else value * _ZERO
                out[to + i] = narrow(silu * widen(gate_up[up + i]), out[0])


def _bf16(p: Any) -> None:
    _rows(bf16_at(p[1]), bf16_at(p[2]), p[3], p[4], p)


def _f32(p: Any) -> None:
    _rows(f32_at(p[1]), f32_at(p[2]), p[3], p[4], p)


_KERNELS = {torch.bfloat16: Kernel(_bf16), torch.float32: Kernel(_f32)}


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * width]`, gate first, contiguous: `[tokens, width]`."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    swiglu_call(gate_up, out).run()
    return out


def swiglu_call(gate_up: Tensor, out: Tensor) -> Call:
    """See swiglu."""
    rows, width = out.shape
    return Call(_KERNELS[out.dtype], -(-rows // _ROWS), (gate_up.data_ptr(), out.data_ptr(), rows, width))
