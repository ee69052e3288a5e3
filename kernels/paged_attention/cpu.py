"""Decode attention on a CPU, over the blocks where they lie: nothing is gathered, no row is padded.

A piece of work is one row and one kv head with the query heads that share it: their scores, softmax, and sums
of the values. Keys and values come from memory once and are widened once. See kernels.paged_attention.ref.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kernels.cpu.machine import after, bf16_at, exp, f32_at, fast, i64_at, narrow, take
from kernels.cpu.team import Kernel
from kernels.cpu.vectors import LANES, add_weighted, dots

_REGISTERS = 24  # of sums at once
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-3.0e38)


@fast
def _softmax(scores: Any, tokens: int, scale: Any) -> Any:
    """Scores become weights, in their place, that add up to what is returned."""
    highest, total = _LOWEST, _ZERO
    for token in range(tokens):
        highest = max(highest, scores[token])
    for token in range(tokens):
        weight = exp((scores[token] - highest) * scale)
        scores[token] = weight
        total += weight
    return total


@fast
def _divide(sums: Any, total: Any, dim: int, out: Any) -> None:
    for i in range(dim):
        out[i] = narrow(sums[i] / total, out[0])


@njit(inline="always")
def _attend(query: Any, kv: Any, out: Any, p: Any, heads: int, dim: int) -> None:
    """`heads` query heads at a time; `p` as `attend_decode` fills it."""
    scratch, tables, lengths = f32_at(p[4]), i64_at(p[5]), i64_at(p[6])
    rows, shared, kv_heads, row_stride, blocks = p[7], p[8], p[9], p[10], p[11]
    block_tokens, block_stride, layer, room = p[12], p[13], p[14], p[15]
    stride = kv_heads * dim
    scale = _ONE / np.sqrt(np.float32(dim))
    while True:
        piece = take(p)
        if piece >= rows * kv_heads:
            return
        row, head = piece // kv_heads, piece % kv_heads * shared
        length, table = lengths[row], after(tables, row * blocks)
        key = layer + piece % kv_heads * dim
        scores = after(scratch, piece * heads * (room + dim))
        sums = after(scores, heads * room)
        for first in range(head, head + shared, heads):
            own = after(query, row * row_stride + first * dim)
            for at in range(0, length, block_tokens):
                keys = after(kv, table[at // block_tokens] * block_stride + key)
                dots(own, keys, stride, min(block_tokens, length - at), after(scores, at), room, heads, dim)
            for i in range(heads * dim):
                sums[i] = _ZERO
            totals = after(scores, room - 1)
            for each in range(heads):
                totals[each * room] = _softmax(after(scores, each * room), length, scale)
            for at in range(0, length, block_tokens):
                values = after(kv, table[at // block_tokens] * block_stride + key + block_tokens * stride)
                tokens = min(block_tokens, length - at)
                add_weighted(values, stride, tokens, after(scores, at), room, sums, heads, dim)
            for each in range(heads):
                to = after(out, ((row * kv_heads * shared) + first + each) * dim)
                _divide(after(sums, each * dim), totals[each * room], dim, to)


@cache
def _bf16(heads: int, dim: int) -> Kernel:
    def attend(p: Any) -> None:
        _attend(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), p, heads, dim)

    return Kernel(attend)


@cache
def _f32(heads: int, dim: int) -> Kernel:
    def attend(p: Any) -> None:
        _attend(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), p, heads, dim)

    return Kernel(attend)


def can_attend(kv: Tensor) -> bool:
    """True for KV of a dtype and a head size that there are kernels for."""
    return kv.dtype in (torch.bfloat16, torch.float32) and kv.shape[-1] % LANES == 0


def attend_decode(query: Tensor, kv: Tensor, layer: int, tables: Tensor, lengths: Tensor) -> Tensor:
    """One query token per row over its whole context.

    `query` `[rows, heads, head_dim]`, rows any distance apart, of the dtype of `kv`; `tables`
    `[rows, blocks]` and `lengths` `[rows]` int64, contiguous: a row's tokens, itself included. Returns the
    shape of `query`.
    """
    rows, heads, dim = query.shape
    _, _, _, block_tokens, kv_heads, _ = kv.shape
    out = query.new_empty(rows, heads, dim)
    blocks, shared = tables.shape[1], heads // kv_heads
    fit = max(1, _REGISTERS * LANES // dim)
    at_once = max(n for n in range(1, fit + 1) if shared % n == 0)
    room = blocks * block_tokens + 1  # for scores, and their sum
    scratch = torch.empty(rows * kv_heads * at_once * (room + dim))
    kernel = (_bf16 if kv.dtype == torch.bfloat16 else _f32)(at_once, dim)
    kernel(
        rows * kv_heads,
        *(each.data_ptr() for each in (query, kv, out, scratch, tables, lengths)),
        *(rows, shared, kv_heads, query.stride(0), blocks),
        *(block_tokens, kv.stride(0), layer * kv.stride(1), room),
    )
    return out
