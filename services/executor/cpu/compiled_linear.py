"""Products in kernels compiled for this CPU. Needs Numba.

Measured on 2 Zen 4 cores, all products of a 135M model with its head, ms by rows, other work beside:

    rows                             1     2     4     8    16    32    64   128   256
    f32    oneDNN, packed         32.9  28.0  26.3  29.1  40.1  67.5   118   225   438
           panels                 19.4  19.2  17.0  22.4  37.7  48.9   101   198   424
    bf16   oneDNN, packed         16.4  14.0  15.6  20.4  24.8  40.6  67.2   115   207
           panels                  9.8   8.8  11.3  11.6  15.5  28.9  53.8  94.0   199
           few rows, plain matrix 12.2  16.6  18.6

Panels need AVX-512, those of bf16 its BF16 part. They are bit-equal by row: a row's sums are added up in one
order in every tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import kernels.cpu_jit
from kernels.cpu_jit.gemm_few_rows import few_rows
from kernels.cpu_jit.packed_int8 import can_quantise, quantise
from kernels.cpu_jit.packed_weights import PackedMatrix, can_multiply, multiply, pack

Linear = Callable[[Tensor], Tensor]  # as in linear.py

# Up to here reading the plain matrix is quicker than a library's product, and where a CPU has no bf16
# instructions, for which a library widens the matrix first. There, all products of a 135M model, ms of one
# thread by rows, of a CPU held to AVX2:
#
#     rows             1     2     3     4     8    16    24    28    32    48
#     library       41.2  57.5   120   119   126   160   197   247   216   311
#     plain matrix  35.2  43.6  49.2  48.6  73.9   125   175   202   226   332
_FEW_ROWS, _FEW_ROWS_WIDENED = 2, 24


class PackedProduct:
    """The product with a matrix in panels, in `dtype`; None: in that of what is multiplied."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype | None) -> None:
        self.matrix, self._dtype = matrix, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.matrix, self._dtype)


def packed_product(
    weight: Tensor, *, int8: bool = False, dtype: torch.dtype | None = None
) -> PackedProduct | None:
    """The product with `weight` `[out, in]`, of which a copy is kept, in int8 where that is wanted and the
    shape is made for it; None where this CPU or the shape is not made for panels. It comes in `dtype`."""
    if int8 and can_quantise(weight):
        return PackedProduct(quantise(weight), dtype)
    return PackedProduct(pack(weight), dtype) if can_multiply(weight) else None


def by_rows(weight: Tensor, many_rows: Linear) -> Linear:
    """`many_rows`, and for few another way to the same product with `weight`."""
    plain = weight.contiguous()
    most = _FEW_ROWS if kernels.cpu_jit.has("avx512bf16") else _FEW_ROWS_WIDENED
    return lambda x: few_rows(x, plain) if len(x) <= most else many_rows(x)
