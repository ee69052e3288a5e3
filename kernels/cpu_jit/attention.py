"""Attention on a CPU reads the KV blocks in place: it gathers nothing and pads no row.

A piece of work is one row and one KV head with the query heads that share it: their scores, softmax, and sums
of the values. Keys and values are read and widened once. See kernels.attention.ref.

The tokens of a prompt are rows, too, each one token longer than the row before; their keys and values come
from the core's caches. Measured against a gather and torch's scaled dot product, on two Zen 4 cores, us for 9
heads and 3 KV heads of 64 in bfloat16:

    tokens before + of the chunk   0+32   96+32   0+64   0+128   512+32   512+128   0+512
    gather and sdpa                  78     145    155     406      427     1,706   4,511
    rows                             35      98     75     221      378     1,644   3,072
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kernels.cpu_jit.llvm_intrinsics import bf16_at, exp, f32_at, fast, fetch_add, i64_at, narrow, offset_by
from kernels.cpu_jit.thread_team import Call, Kernel, Number, team_size
from kernels.cpu_jit.vectors import LANES, add_weighted, dots

_REGISTERS = 24  # of sums at once
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-3.0e38)


@fast
def _softmax(scores: Any, tokens: int, scale: Any) -> Any:
    """Turn scores into weights in place; returns the sum of the weights."""
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
    """Attend `heads` query heads at a time; `decode_call` fills `p`."""
    tables, lengths = i64_at(p[6]), i64_at(p[7])
    rows, shared, kv_heads, row_stride, blocks = p[8], p[9], p[10], p[11], p[12]
    block_tokens, block_stride, layer, room = p[13], p[14], p[15], p[16]
    stride = kv_heads * dim
    scores = offset_by(f32_at(p[5]), fetch_add(offset_by(p, 1)) * heads * (room + dim))  # this thread's own
    sums = offset_by(scores, heads * room)
    scale = _ONE / np.sqrt(np.float32(dim))
    while True:
        piece = fetch_add(p)
        if piece >= rows * kv_heads:
            return
        row, head = piece // kv_heads, piece % kv_heads * shared
        length, table = lengths[row], offset_by(tables, row * blocks)
        key = layer + piece % kv_heads * dim
        for first in range(head, head + shared, heads):
            own = offset_by(query, row * row_stride + first * dim)
            for at in range(0, length, block_tokens):
                keys = offset_by(kv, table[at // block_tokens] * block_stride + key)
                dots(
                    own, keys, stride, min(block_tokens, length - at), offset_by(scores, at), room, heads, dim
                )
            for i in range(heads * dim):
                sums[i] = _ZERO
            totals = offset_by(scores, room - 1)
            for each in range(heads):
                totals[each * room] = _softmax(offset_by(scores, each * room), length, scale)
            for at in range(0, length, block_tokens):
                values = offset_by(kv, table[at // block_tokens] * block_stride + key + block_tokens * stride)
                tokens = min(block_tokens, length - at)
                add_weighted(values, stride, tokens, offset_by(scores, at), room, sums, heads, dim)
            for each in range(heads):
                to = offset_by(out, ((row * kv_heads * shared) + first + each) * dim)
                _divide(offset_by(sums, each * dim), totals[each * room], dim, to)


@cache
def _bf16(heads: int, dim: int) -> Kernel:
    def attend(p: Any) -> None:
        _attend(bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), p, heads, dim)

    return Kernel(attend)


@cache
def _f32(heads: int, dim: int) -> Kernel:
    def attend(p: Any) -> None:
        _attend(f32_at(p[2]), f32_at(p[3]), f32_at(p[4]), p, heads, dim)

    return Kernel(attend)


def can_attend(kv: Tensor) -> bool:
    """Whether kernels exist for the dtype and the head size of `kv`."""
    return kv.dtype in (torch.bfloat16, torch.float32) and kv.shape[-1] % LANES == 0


def attend_decode(query: Tensor, kv: Tensor, layer: int, tables: Tensor, lengths: Tensor) -> Tensor:
    """One query token per row over its context, decode rows and tokens of prompts.

    `query` `[rows, heads, head_dim]` of the dtype of `kv`, with any stride between rows; `tables` `[rows,
    blocks]` and `lengths` `[rows]` int64, contiguous; a row's length counts its own token. Returns the shape
    of `query`.
    """
    out = query.new_empty(query.shape)
    decode_call(query, kv, layer * kv.stride(1), tables, lengths, out).run()
    return out


def decode_call(
    query: Tensor, kv: Tensor, layer: Number, tables: Tensor, lengths: Tensor, out: Tensor
) -> Call:
    """See attend_decode; `layer` is the layer's offset in a block, in numbers."""
    rows, heads, dim = query.shape
    _, _, _, block_tokens, kv_heads, _ = kv.shape
    blocks, shared = tables.shape[1], heads // kv_heads
    at_once = max(n for n in range(1, max(1, _REGISTERS * LANES // dim) + 1) if shared % n == 0)
    room = blocks * block_tokens + 1  # for scores, and their sum
    scratch = torch.empty(team_size(), at_once * (room + dim))
    addresses = [each.data_ptr() for each in (query, kv, out, scratch, tables, lengths)]
    sizes = rows, shared, kv_heads, query.stride(0), blocks, block_tokens, kv.stride(0)
    kernel = (_bf16 if kv.dtype == torch.bfloat16 else _f32)(at_once, dim)
    return Call(kernel, rows * kv_heads, (0, *addresses, *sizes, layer, room), scratch)
