"""Products with a bfloat16 matrix in kernels compiled for this CPU. Needs Numba.

Measured on 2 Zen 4 cores, all products of a 135M model with its head, ms by rows, other work beside:

    rows                        1     2     4     8    16    32    64   128   256
    oneDNN, packed           16.0  18.1  14.0  16.9  20.5  35.8  52.1  93.1   180
    panels                   10.8  11.5  11.3  12.8  15.7  26.1  46.5  93.5   170
    few rows, plain matrix   13.4  14.8  17.8

Panels need AVX-512 BF16. They are bit-equal by row: a row's sums are added up in one order in every tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.matmul.cpu import few_rows
from kernels.matmul.panels import can_multiply, multiply, pack

if TYPE_CHECKING:
    from services.executor.linear import Linear

_FEW_ROWS = 2  # up to here reading the plain matrix is quicker than a library's product


def in_panels(weight: Tensor) -> Linear | None:
    """The product with `weight` `[out, in]`, of which a copy is kept; None where this CPU or the shape is not
    made for it."""
    if not can_multiply(weight):
        return None
    panels, height = pack(weight), weight.shape[0]
    return lambda x: multiply(x, panels, height)


def by_rows(weight: Tensor, many_rows: Linear) -> Linear:
    """`many_rows`, and for few another way to the same product with `weight`."""
    plain = weight.contiguous()
    return lambda x: few_rows(x, plain) if len(x) <= _FEW_ROWS else many_rows(x)
