"""The row-wise operations of a layer on a CPU, each in one pass: a row is read once, float32 in between.

RMS norm after a residual add (kernels.norm.ref); SwiGLU (kernels.activation.ref); the rotation of queries and
keys with the write of K and V to the cache, over the rows of the QKV product (kernels.rope.ref,
kernels.attention.ref).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_jit.llvm_intrinsics import (
    bf16_at,
    exp,
    f16_at,
    f32_at,
    fast,
    fetch_add,
    float_of,
    i64_at,
    narrow,
    offset_by,
    widen,
)
from kernels.cpu_jit.thread_team import Call, Kernel, Number, bits_of
from kernels.cpu_jit.vectors import LANES, rotate_lanes
from kernels.elementwise.ref import swiglu_by_row

_ROWS = 4  # of a piece of work
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_TWO_ROOTS, _CUBIC = np.float32(1.5957691216057308), np.float32(0.044715)  # 2 * sqrt(2 / pi)
_LEAST = np.float32(-88.0)  # below it the gate is zero: `exp` stops growing at 88, the gate's value would not


@fast
def _norm_rows(x: Any, residual: Any, weight: Any, out: Any, rows: int, width: int, eps: Any, p: Any) -> None:
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


def _norm_bf16(p: Any) -> None:
    eps = float_of(np.int32(p[7]))
    _norm_rows(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), p[5], p[6], eps, p)


def _norm_f32(p: Any) -> None:
    eps = float_of(np.int32(p[7]))
    _norm_rows(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), f32_at(p[4]), p[5], p[6], eps, p)


_NORM = {torch.bfloat16: Kernel(_norm_bf16), torch.float32: Kernel(_norm_f32)}


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
    return Call(_NORM[x.dtype], -(-rows // _ROWS), (*addresses, rows, width, bits_of(eps)))


@fast
def _silu(value: Any) -> Any:
    return value


@fast
def _gelu(value: Any) -> Any:
    """tanh(y) is 1 - 2 / (1 + e^2y), so (1 + tanh(y)) / 2 is 1 / (1 + e^-2y)."""
    return _TWO_ROOTS * (value + _CUBIC * value * value * value)


def _gate_rows(inner: Any) -> Any:
    """The rows of `gate * sigmoid(inner(gate)) * up`."""

    @fast
    def rows_of(gate_up: Any, out: Any, rows: int, width: int, p: Any) -> None:
        while True:
            first = fetch_add(p) * _ROWS
            if first >= rows:
                return
            for row in range(first, min(first + _ROWS, rows)):
                gate, to = 2 * row * width, row * width
                up = gate + width
                for i in range(width):
                    value = widen(gate_up[gate + i])
                    y = inner(value)
                    act = value / (_ONE + exp(-y)) if y > _LEAST else value * _ZERO
                    out[to + i] = narrow(act * widen(gate_up[up + i]), out[0])

    return rows_of


_swiglu_rows, _geglu_rows = _gate_rows(_silu), _gate_rows(_gelu)


def _swiglu_bf16(p: Any) -> None:
    _swiglu_rows(bf16_at(p[1]), bf16_at(p[2]), p[3], p[4], p)


def _swiglu_f32(p: Any) -> None:
    _swiglu_rows(f32_at(p[1]), f32_at(p[2]), p[3], p[4], p)


def _geglu_bf16(p: Any) -> None:
    _geglu_rows(bf16_at(p[1]), bf16_at(p[2]), p[3], p[4], p)


def _geglu_f32(p: Any) -> None:
    _geglu_rows(f32_at(p[1]), f32_at(p[2]), p[3], p[4], p)


GATES = {
    "silu": {torch.bfloat16: Kernel(_swiglu_bf16), torch.float32: Kernel(_swiglu_f32)},
    "gelu_tanh": {torch.bfloat16: Kernel(_geglu_bf16), torch.float32: Kernel(_geglu_f32)},
}


def swiglu(gate_up: Tensor, act: str = "silu") -> Tensor:
    """`act(gate) * up` of `[tokens, 2 * width]`, gate first, contiguous: `[tokens, width]`."""
    if act not in GATES:
        return swiglu_by_row(gate_up, act)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    swiglu_call(gate_up, out, act).run()
    return out


def swiglu_call(gate_up: Tensor, out: Tensor, act: str = "silu") -> Call:
    """See swiglu; `act` is `silu` or `gelu_tanh`."""
    rows, width = out.shape
    return Call(GATES[act][out.dtype], -(-rows // _ROWS), (gate_up.data_ptr(), out.data_ptr(), rows, width))


@fast
def _rotate(x: Any, at: int, rotation: Any, turn: int, dim: int, out: Any, to: int) -> None:
    half, i = dim // 2, 0
    while i + LANES <= half:  # a compiler does not do it: `out` may be `x`
        cos = offset_by(rotation, turn + i)
        rotate_lanes(offset_by(x, at + i), half, cos, offset_by(cos, dim + half), offset_by(out, to + i))
        i += LANES
    while i < half:
        low, high = widen(x[at + i]), widen(x[at + half + i])
        one, other = rotation[turn + i], rotation[turn + dim + half + i]
        out[to + i] = narrow(low * one - high * other, out[0])
        out[to + half + i] = narrow(high * one + low * other, out[0])
        i += 1


@fast
def _rope_rows(
    x: Any, rotation: Any, kv: Any, to: Any, rows: int, heads: int, kv_heads: int, dim: int, p: Any
) -> None:
    width = kv_heads * dim
    while True:
        first = fetch_add(p) * _ROWS
        if first >= rows:
            return
        for row in range(first, min(first + _ROWS, rows)):
            at, turn = row * (heads + 2 * kv_heads) * dim, row * 2 * dim
            for head in range(heads):
                _rotate(x, at + head * dim, rotation, turn, dim, x, at + head * dim)
            key, value = to[row] * width, to[rows + row] * width
            for head in range(kv_heads):
                _rotate(x, at + (heads + head) * dim, rotation, turn, dim, kv, key + head * dim)
            at += (heads + kv_heads) * dim
            for i in range(width):
                kv[value + i] = narrow(x[at + i], kv[0])


def _rope_bf16(p: Any) -> None:
    _rope_rows(bf16_at(p[1]), f32_at(p[2]), bf16_at(p[3]), i64_at(p[4]), p[5], p[6], p[7], p[8], p)


def _rope_f32(p: Any) -> None:
    _rope_rows(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), i64_at(p[4]), p[5], p[6], p[7], p[8], p)


def _rope_f16(p: Any) -> None:
    _rope_rows(f32_at(p[1]), f32_at(p[2]), f16_at(p[3]), i64_at(p[4]), p[5], p[6], p[7], p[8], p)


_ROPE = {  # by the dtype of KV
    torch.bfloat16: Kernel(_rope_bf16),
    torch.float32: Kernel(_rope_f32),
    torch.float16: Kernel(_rope_f16),
}


def rotate_and_write(x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Rotate queries and keys of a contiguous `x` `[tokens, heads + 2 * kv_heads, head_dim]` by `rotation`
    `[tokens, 2, head_dim]` float32, and store keys and values at `rows` `[K|V, tokens]` int64 of `write_kv`
    in `kv`, of the dtype of `x`, or float16 for float32. Returns the queries `[tokens, heads, head_dim]`: a
    view of `x`, which is overwritten."""
    rotation_call(x, rotation.data_ptr(), kv, rows.data_ptr(), heads).run()
    return x[:, :heads]


def rotation_call(x: Tensor, rotation: Number, kv: Tensor, rows: Number, heads: int) -> Call:
    """See rotate_and_write; `rotation` and `rows` are addresses."""
    tokens, every, dim = x.shape
    addresses = (x.data_ptr(), rotation, kv.data_ptr(), rows)
    return Call(_ROPE[kv.dtype], -(-tokens // _ROWS), (*addresses, tokens, heads, (every - heads) // 2, dim))
