"""Matrix products in kernels compiled for this CPU. Needs Numba; cpu/linear.py calls it.

Measured on 2 Zen 4 cores under other load, all products of a 135M model with its head, ms by rows:

    rows                             1     2     4     8    16    32    64   128   256
    f32    oneDNN, packed         32.9  28.0  26.3  29.1  40.1  67.5   118   225   438
           packed weights         19.4  19.2  17.0  22.4  37.7  48.9   101   198   424
    bf16   oneDNN, packed         16.4  14.0  15.6  20.4  24.8  40.6  67.2   115   207
           packed weights          9.8   8.8  11.3  11.6  15.5  28.9  53.8  94.0   199
           few rows, plain matrix 12.2  16.6  18.6

Packed weights need AVX-512, and AVX512-BF16 for bf16. They are bit-equal by row: every tile adds up a row's
sum in the same order.
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

# Up to so many rows the kernel on the plain matrix is faster than a library's product; _FEW_ROWS_WIDENED on
# CPUs without bf16 instructions, where a library widens the matrix first. Measured on a CPU held to AVX2, one
# thread, all products of a 135M model, ms by rows:
#
#     rows             1     2     3     4     8    16    24    28    32    48
#     library       41.2  57.5   120   119   126   160   197   247   216   311
#     plain matrix  35.2  43.6  49.2  48.6  73.9   125   175   202   226   332
_FEW_ROWS, _FEW_ROWS_WIDENED = 2, 24


class PackedProduct:
    """The product with packed weights, rounded to `dtype`; None: to the input's dtype."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype | None) -> None:
        self.matrix, self._dtype = matrix, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.matrix, self._dtype)


def packed_product(
    weight: Tensor, *, int8: bool = False, dtype: torch.dtype | None = None
) -> PackedProduct | None:
    """The product with a packed copy of `weight` `[out, in]`, in int8 if asked and the shape allows it; its
    result has `dtype`. None where this CPU or the shape does not allow packed weights."""
    if int8 and can_quantise(weight):
        return PackedProduct(quantise(weight), dtype)
    return PackedProduct(pack(weight), dtype) if can_multiply(weight) else None


def by_rows(weight: Tensor, many_rows: Linear) -> Linear:
    """The product `many_rows`, with the kernel on the plain `weight` for few rows."""
    plain = weight.contiguous()
    most = _FEW_ROWS if kernels.cpu_jit.has("avx512bf16") else _FEW_ROWS_WIDENED
    return lambda x: few_rows(x, plain) if len(x) <= most else many_rows(x)
