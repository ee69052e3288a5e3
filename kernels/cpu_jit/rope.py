"""Rotates queries and keys on a CPU and writes K and V to the cache, in one pass over the rows of the QKV
product.

See kernels.rope.ref and kernels.attention.ref."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu_jit.llvm_intrinsics import bf16_at, f32_at, fast, fetch_add, i64_at, narrow, widen
from kernels.cpu_jit.thread_team import Call, Kernel, Number

_ROWS = 4  # of a piece of work


@fast
def _rotate(x: Any, at: int, rotation: Any, turn: int, dim: int, out: Any, to: int) -> None:
    half = dim // 2
    for i in range(half):
        low, high = widen(x[at + i]), widen(x[at + half + i])
        cos, sin = rotation[turn + i], rotation[turn + dim + half + i]
        out[to + i] = narrow(low * cos - high * sin, out[0])
        out[to + half + i] = narrow(high * cos + low * sin, out[0])


@fast
def _rows(
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
                kv[value + i] = x[at + i]


def _bf16(p: Any) -> None:
    _rows(bf16_at(p[1]), f32_at(p[2]), bf16_at(p[3]), i64_at(p[4]), p[5], p[6], p[7], p[8], p)


def _f32(p: Any) -> None:
    _rows(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), i64_at(p[4]), p[5], p[6], p[7], p[8], p)


_KERNELS = {torch.bfloat16: Kernel(_bf16), torch.float32: Kernel(_f32)}


def rotate_and_write(x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Rotate queries and keys of a contiguous `x` `[tokens, heads + 2 * kv_heads, head_dim]` by `rotation`
    `[tokens, 2, head_dim]` float32, and store keys and values at `rows` `[K|V, tokens]` int64 of `write_rows`
    in `kv`, of the dtype of `x`. Returns the queries `[tokens, heads, head_dim]`: a view of `x`, which is
    overwritten."""
    rotation_call(x, rotation, kv, rows.data_ptr(), heads).run()
    return x[:, :heads]


def rotation_call(x: Tensor, rotation: Tensor, kv: Tensor, rows: Number, heads: int) -> Call:
    """See rotate_and_write; `rows` is an address."""
    tokens, every, dim = x.shape
    addresses = (x.data_ptr(), rotation.data_ptr(), kv.data_ptr(), rows)
    return Call(
        _KERNELS[x.dtype], -(-tokens // _ROWS), (*addresses, tokens, heads, (every - heads) // 2, dim)
    )
