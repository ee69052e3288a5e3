"""RMS norm after a residual add on a CPU; a row is read once. See kernels.norm.ref."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_jit.llvm_intrinsics import bf16_at, f32_at, fast, fetch_add, float_of, narrow, widen
from kernels.cpu_jit.thread_team import Call, Kernel, Number, bits_of

_ROWS = 4  # of a piece of work
_ONE = np.float32(1.0)


@fast
def _rows(x: Any, residual: Any, weight: Any, out: Any, rows: int, width: int, eps: Any, p: Any) -> None:
    while True:
        first = fetch_add(p) * _ROWS
        if first >= rows:
            return
        for row in range(first, min(first + _ROWS, rows)):
            at = row * width
            squares = np.float32(0.0)
            for i in range(width):
                total = narrow(widen(x[at + i]) + widen(residual[at + i]), residual[0])
                residual[at + i] = total
                squares += widen(total) * widen(total)
            scale = _ONE / np.sqrt(squares / np.float32(width) + eps)
            for i in range(width):
                out[at + i] = narrow(widen(residual[at + i]) * scale * widen(weight[i]), out[0])


def _bf16(p: Any) -> None:
    eps = float_of(np.int32(p[7]))
    _rows(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), p[5], p[6], eps, p)


def _f32(p: Any) -> None:
    eps = float_of(np.int32(p[7]))
    _rows(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), f32_at(p[4]), p[5], p[6], eps, p)


_KERNELS = {torch.bfloat16: Kernel(_bf16), torch.float32: Kernel(_f32)}


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and the sum, which overwrites `residual`: `[tokens, hidden]` each,
    contiguous."""
    out = torch.empty_like(x)
    norm_call(x, residual, weight.data_ptr(), eps, out).run()
    return out, residual


def norm_call(x: Tensor, residual: Tensor, weight: Number, eps: float, out: Tensor) -> Call:
    """See add_rms_norm; `weight` is an address."""
    rows, width = x.shape
    addresses = (x.data_ptr(), residual.data_ptr(), weight, out.data_ptr())
    return Call(_KERNELS[x.dtype], -(-rows // _ROWS), (*addresses, rows, width, bits_of(eps)))
