"""Products of few rows with a plain matrix on a CPU: the read of the matrix takes nearly all the time.

A library's product is made for many rows. Here a row of the matrix is read and widened once, and multiplied
with every row of `x`, which stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

import kernels.cpu_jit
from kernels.cpu_jit.llvm_intrinsics import bf16_at, fast, fetch_add, narrow, widen
from kernels.cpu_jit.thread_team import Kernel

_BYTES = 1 << 15  # of the matrix, about, in a piece of work
_ZERO = np.float32(0.0)

# Up to so many rows the kernel on the plain matrix is faster than a library's product; _FEW_ROWS_WIDENED on
# CPUs without bf16 instructions, where a library widens the matrix first. Measured on a CPU held to AVX2, one
# thread, all products of a 135M model, ms by rows:
#
#     rows             1     2     3     4     8    16    24    28    32    48
#     library       41.2  57.5   120   119   126   160   197   247   216   311
#     plain matrix  35.2  43.6  49.2  48.6  73.9   125   175   202   226   332
_FEW_ROWS, _FEW_ROWS_WIDENED = 2, 24


@fast
def _one(x: Any, first: int, weight: Any, at: int, width: int, out: Any, to: int) -> None:
    a = _ZERO
    for i in range(width):
        a += widen(x[first + i]) * widen(weight[at + i])
    out[to] = narrow(a, out[0])


@fast
def _four(x: Any, first: int, weight: Any, at: int, width: int, out: Any, to: int, height: int) -> None:
    a = b = c = d = _ZERO
    x0, x1, x2, x3 = first, first + width, first + 2 * width, first + 3 * width
    for i in range(width):
        w = widen(weight[at + i])
        a += widen(x[x0 + i]) * w
        b += widen(x[x1 + i]) * w
        c += widen(x[x2 + i]) * w
        d += widen(x[x3 + i]) * w
    out[to] = narrow(a, out[0])
    out[to + height] = narrow(b, out[0])
    out[to + 2 * height] = narrow(c, out[0])
    out[to + 3 * height] = narrow(d, out[0])


@fast
def _tall(x: Any, weight: Any, out: Any, rows: int, width: int, height: int, piece_rows: int, p: Any) -> None:
    while True:
        first = fetch_add(p) * piece_rows
        if first >= height:
            return
        for row in range(first, min(first + piece_rows, height)):
            done = 0
            while done + 4 <= rows:
                _four(x, done * width, weight, row * width, width, out, done * height + row, height)
                done += 4
            while done < rows:
                _one(x, done * width, weight, row * width, width, out, done * height + row)
                done += 1


def _bf16(p: Any) -> None:
    _tall(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), p[4], p[5], p[6], p[7], p)


_KERNEL = Kernel(_bf16)


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of `x` `[rows, in]` and `weight` `[out, in]`, both contiguous bfloat16, with float32
    sums rounded once: `[rows, out]`."""
    rows, width = x.shape
    height = weight.shape[0]
    out = x.new_empty(rows, height)
    piece_rows = max(4, _BYTES // (width * weight.element_size()))
    _KERNEL(
        -(-height // piece_rows),
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        height,
        piece_rows,
    )
    return out


def by_rows(weight: Tensor, many_rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The product `many_rows`, with the kernel on the plain `weight` for few rows."""
    plain = weight.contiguous()
    most = _FEW_ROWS if kernels.cpu_jit.has("avx512bf16") else _FEW_ROWS_WIDENED
    return lambda x: few_rows(x, plain) if len(x) <= most else many_rows(x)
