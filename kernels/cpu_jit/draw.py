"""One draw per row on a CPU, as kernels.sampling.ref defines it: each group of tokens is read once.

A row is a piece of work, in one order of sums: its token does not depend on the batch or on the threads. The
random numbers are those of the definition. Sums and logarithms may differ from torch's in the last bits, so
two tokens whose logits and noises are nearly equal may change places.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_jit.llvm_intrinsics import as_f32, f32_at, fetch_add, i64_at, offset_by, on_stack, strict
from kernels.cpu_jit.thread_team import Kernel
from kernels.cpu_jit.vectors import highest, weigh
from kernels.sampling.ref import GROUP_TOKENS

_LOG2E = np.float32(math.log2(math.e))
_ONE, _HALF, _STEP = np.float32(1.0), np.float32(0.5), np.float32(2.0**-23)
_NOTHING = np.float32(-np.inf)
_WORD, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_MUL_A, _MUL_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_powers = on_stack(4 * GROUP_TOKENS)


@strict
def _noise(seed: Any, index: Any, position: Any, level: Any) -> Any:
    """Gumbel noise of kernels.sampling.ref: philox, gumbel."""
    low, high = np.uint64(seed) & _WORD, np.uint64(seed) >> _32
    x0, x1, x2, x3 = np.uint64(index), np.uint64(position), np.uint64(level), np.uint64(0)
    for _ in range(10):
        a, b = x0 * _MUL_A, x2 * _MUL_B
        x0, x1, x2, x3 = (b >> _32) ^ x1 ^ low, b & _WORD, (a >> _32) ^ x3 ^ high, a & _WORD
        low, high = (low + _KEY_A) & _WORD, (high + _KEY_B) & _WORD
    uniform = (np.float32(x0 >> np.uint64(9)) + _HALF) * _STEP
    return np.float32(-math.log(-math.log(np.float64(uniform))))


@strict
def _draw_row(logits: Any, vocab: int, best: Any, heat: Any, seed: Any, position: Any) -> int:
    per_heat, powers = _ONE / heat, as_f32(_powers())
    most, start, token = _NOTHING, 0, 0
    for group in range((vocab + GROUP_TOKENS - 1) // GROUP_TOKENS):
        first = group * GROUP_TOKENS
        count = min(GROUP_TOKENS, vocab - first)
        own = offset_by(logits, first)
        top = highest(own, count, _NOTHING)
        if top > _NOTHING:  # else no token of it may be drawn
            mass = np.float32(math.log(np.float64(weigh(own, count, top, _LOG2E * per_heat, powers))))
            found = (top - best) * per_heat + mass + _noise(seed, group, position, 1)
            if found > most:
                most, start = found, first
    most = _NOTHING
    for i in range(start, min(start + GROUP_TOKENS, vocab)):
        if logits[i] > _NOTHING:
            found = (logits[i] - best) * per_heat + _noise(seed, i, position, 0)
            if found > most:
                most, token = found, i
    return token


def _draw_rows(p: Any) -> None:
    rows, vocab = p[7], p[8]
    while True:
        row = fetch_add(p)
        if row >= rows:
            return
        logits = offset_by(f32_at(p[1]), row * vocab)
        seed, position = i64_at(p[4])[row], i64_at(p[5])[row]
        i64_at(p[6])[row] = _draw_row(logits, vocab, f32_at(p[2])[row], f32_at(p[3])[row], seed, position)


_DRAW = Kernel(_draw_rows)


def draw(logits: Tensor, best: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token per row, `[rows]` int64, with probability softmax(`logits / heat`), `[rows, vocab]` float32.

    `best` is each row's largest logit, `heat` its temperature, both `[rows]` float32; `seeds` and `positions`
    are int64. Minus infinity is never drawn. The token of a row without a finite largest logit means nothing.
    """
    columns = [logits, best, heat, seeds, positions]
    columns = [column.contiguous() for column in columns]
    rows, vocab = logits.shape
    out = torch.zeros(rows, dtype=torch.int64)
    _DRAW(rows, *(column.data_ptr() for column in (*columns, out)), rows, vocab)
    return out
