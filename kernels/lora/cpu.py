"""The same on a CPU with Numba: a row is a piece of work, so its bits depend on no other row.

Rows of one adapter that follow each other read its matrices from a cache. A table has a line for each row:

    address of A, of B, rank, bits of the scale, bytes of a number; all zero: the row has no adapter
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_jit.llvm_intrinsics import (
    as_f32,
    bf16_at,
    f32_at,
    fast,
    fetch_add,
    float_of,
    i64_at,
    narrow,
    offset_by,
    on_stack,
    widen,
)
from kernels.cpu_jit.thread_team import Call, Kernel, Number, bits_of
from kernels.lora.ref import Adapted

COLUMNS = 5  # numbers of a line
MOST_LOW = 1024  # segments times rank
_BLOCK = 64  # outputs whose sums stay in the first cache
_low_memory, _block_memory = on_stack(4 * MOST_LOW), on_stack(4 * _BLOCK)
_ZERO = np.float32(0.0)


@fast
def _shrink(x: Any, a: Any, low: Any, count: int, width: int, scale: Any) -> None:
    for i in range(count):
        line, total = offset_by(a, i * width), _ZERO
        for j in range(width):
            total += widen(x[j]) * widen(line[j])
        low[i] = total * scale


@fast
def _expand(low: Any, b: Any, out: Any, rank: int, height: int, begin: int, end: int, sums: Any) -> None:
    first = begin
    while first < end:
        count = min(_BLOCK, end - first)
        for i in range(count):
            sums[i] = _ZERO
        for j in range(rank):
            line, factor = offset_by(b, j * height + first), low[j]
            for i in range(count):
                sums[i] += factor * widen(line[i])
        for i in range(count):
            out[first + i] = narrow(widen(out[first + i]) + sums[i], out[0])
        first += count


@fast
def _row(x: Any, out: Any, a: Any, b: Any, line: Any, p: Any) -> None:
    width, height, segments, layer, bounds = p[5], p[6], p[7], p[9], i64_at(p[8])
    low, sums, rank = as_f32(_low_memory()), as_f32(_block_memory()), line[2]
    count, scale = segments * rank, float_of(np.int32(line[3]))
    _shrink(x, offset_by(a, layer * count * width), low, count, width, scale)
    own = offset_by(b, layer * rank * height)
    for segment in range(segments):
        begin, end = bounds[segment], bounds[segment + 1]
        _expand(offset_by(low, segment * rank), own, out, rank, height, begin, end, sums)


def _bf16(p: Any) -> None:
    table = i64_at(p[3])
    while True:
        row = fetch_add(p)
        if row >= p[4]:
            return
        line = offset_by(table, row * COLUMNS)
        if line[2] != 0:
            x, out = offset_by(bf16_at(p[1]), row * p[5]), offset_by(bf16_at(p[2]), row * p[6])
            _row(x, out, bf16_at(line[0]), bf16_at(line[1]), line, p)


def _f32(p: Any) -> None:
    table = i64_at(p[3])
    while True:
        row = fetch_add(p)
        if row >= p[4]:
            return
        line = offset_by(table, row * COLUMNS)
        if line[2] != 0:
            x, out = offset_by(f32_at(p[1]), row * p[5]), offset_by(f32_at(p[2]), row * p[6])
            if line[4] == 2:
                _row(x, out, bf16_at(line[0]), bf16_at(line[1]), line, p)
            else:
                _row(x, out, f32_at(line[0]), f32_at(line[1]), line, p)


_KERNELS = {torch.bfloat16: Kernel(_bf16), torch.float32: Kernel(_f32)}


def line_of(adapted: Adapted) -> list[int]:
    """The line of rows with these matrices, of all layers."""
    scale = bits_of(adapted.scale)
    return [adapted.a.data_ptr(), adapted.b.data_ptr(), adapted.rank, scale, adapted.a.element_size()]


def adapt_call(
    x: Tensor, out: Tensor, table: NDArray[np.int64], bounds: NDArray[np.int64], layer: Number
) -> Call:
    """The call that adds to `out` `[rows, out]` what the adapters add for `x` `[rows, in]`, both contiguous.
    `table` `[rows, COLUMNS]`; matrices are those of `layer`, bfloat16, or float32 where `x` is."""
    rows, width = x.shape
    numbers = (x.data_ptr(), out.data_ptr(), table.ctypes.data, rows, width, out.shape[1])
    return Call(_KERNELS[x.dtype], rows, (*numbers, len(bounds) - 1, bounds.ctypes.data, layer))
