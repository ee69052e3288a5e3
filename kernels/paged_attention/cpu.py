"""Decode attention on a CPU, over the blocks where they lie: nothing is gathered, no row is padded.

A piece of work is one head of one row: its scores, their softmax, the sum of the values. Heads that share
keys and values are neighbours, so that these come from memory once. See kernels.paged_attention.ref.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.machine import bf16_at, exp, f32_at, fast, i64_at, narrow, take, widen
from kernels.cpu.team import Kernel

_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-3.0e38)


@fast
def _scores(
    query: Any, q: int, kv: Any, k: int, stride: int, tokens: int, dim: int, out: Any, to: int
) -> Any:
    """The products of a query with `tokens` keys, from `kv[k]` on and `stride` apart; the highest of them."""
    highest = _LOWEST
    for token in range(tokens):
        score = _ZERO
        for i in range(dim):
            score += widen(query[q + i]) * widen(kv[k + i])
        out[to + token] = score
        highest = max(highest, score)
        k += stride
    return highest


@fast
def _weights(scores: Any, at: int, tokens: int, highest: Any, scale: Any) -> Any:
    """Scores become weights, in their place, that add up to what is returned."""
    total = _ZERO
    for token in range(tokens):
        weight = exp((scores[at + token] - highest) * scale)
        scores[at + token] = weight
        total += weight
    return total


@fast
def _add_values(
    kv: Any, v: int, stride: int, weights: Any, at: int, tokens: int, dim: int, out: Any, to: int
) -> None:
    for token in range(tokens):
        weight = weights[at + token]
        for i in range(dim):
            out[to + i] += weight * widen(kv[v + i])
        v += stride


@fast
def _one(
    query: Any,
    q: int,
    kv: Any,
    tables: Any,
    table: int,
    length: int,
    block_stride: int,
    block_tokens: int,
    stride: int,
    dim: int,
    key: int,
    value: int,
    scratch: Any,
    scores: int,
    out: Any,
    to: int,
) -> None:
    """One query over its context. `key`, `value`: where its head's begin in a block; `scratch[scores]` has
    room for a score a token, and before that for a sum in float32."""
    sums, blocks = scores - dim, (length + block_tokens - 1) // block_tokens
    highest = _LOWEST
    for block in range(blocks):
        at, tokens = block * block_tokens, min(block_tokens, length - block * block_tokens)
        k = tables[table + block] * block_stride + key
        highest = max(highest, _scores(query, q, kv, k, stride, tokens, dim, scratch, scores + at))
    total = _weights(scratch, scores, length, highest, _ONE / np.sqrt(np.float32(dim)))
    for i in range(dim):
        scratch[sums + i] = _ZERO
    for block in range(blocks):
        at, tokens = block * block_tokens, min(block_tokens, length - block * block_tokens)
        v = tables[table + block] * block_stride + value
        _add_values(kv, v, stride, scratch, scores + at, tokens, dim, scratch, sums)
    for i in range(dim):
        out[to + i] = narrow(scratch[sums + i] / total, out[0])


@fast
def _heads(
    query: Any,
    kv: Any,
    out: Any,
    scratch: Any,
    tables: Any,
    lengths: Any,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    row_stride: int,
    table_stride: int,
    block_tokens: int,
    block_stride: int,
    first: int,
    most: int,
    p: Any,
) -> None:
    stride = kv_heads * dim
    while True:
        piece = take(p)
        if piece >= rows * heads:
            return
        row, head = piece // heads, piece % heads
        key = first + head // (heads // kv_heads) * dim
        _one(
            query,
            row * row_stride + head * dim,
            kv,
            tables,
            row * table_stride,
            lengths[row],
            block_stride,
            block_tokens,
            stride,
            dim,
            key,
            key + block_tokens * stride,
            scratch,
            piece * most + dim,
            out,
            piece * dim,
        )


def _bf16(p: Any) -> None:
    _heads(
        bf16_at(p[1]),
        bf16_at(p[2]),
        bf16_at(p[3]),
        f32_at(p[4]),
        i64_at(p[5]),
        i64_at(p[6]),
        p[7],
        p[8],
        p[9],
        p[10],
        p[11],
        p[12],
        p[13],
        p[14],
        p[15],
        p[16],
        p,
    )


def _f32(p: Any) -> None:
    _heads(
        f32_at(p[1]),
        f32_at(p[2]),
        f32_at(p[3]),
        f32_at(p[4]),
        i64_at(p[5]),
        i64_at(p[6]),
        p[7],
        p[8],
        p[9],
        p[10],
        p[11],
        p[12],
        p[13],
        p[14],
        p[15],
        p[16],
        p,
    )


_KERNELS = {torch.bfloat16: Kernel(_bf16), torch.float32: Kernel(_f32)}


def attend_decode(query: Tensor, kv: Tensor, layer: int, tables: Tensor, lengths: Tensor) -> Tensor:
    """One query token per row over its whole context.

    `query` `[rows, heads, head_dim]`, rows any distance apart, of the dtype of `kv`; `tables`
    `[rows, blocks]` and `lengths` `[rows]` int64, contiguous: a row's tokens, itself included. Returns the
    shape of `query`.
    """
    rows, heads, dim = query.shape
    _, _, _, block_tokens, kv_heads, _ = kv.shape
    out = query.new_empty(rows, heads, dim)
    blocks = tables.shape[1]
    most = -(-(blocks * block_tokens + dim) // 16) * 16
    scratch = torch.empty(rows * heads * most, dtype=torch.float32)
    _KERNELS[kv.dtype](
        rows * heads,
        query.data_ptr(),
        kv.data_ptr(),
        out.data_ptr(),
        scratch.data_ptr(),
        tables.data_ptr(),
        lengths.data_ptr(),
        rows,
        heads,
        kv_heads,
        dim,
        query.stride(0),
        blocks,
        block_tokens,
        kv.stride(0),
        layer * kv.stride(1),
        most,
    )
    return out
