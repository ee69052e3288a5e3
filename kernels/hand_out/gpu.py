"""Columns that a rank has computed, stored to where every rank of the group wants them, in Triton.

Each GPU then has the whole rows in their order, without a copy that puts together what has come.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["rank"])
def _hand_out(
    own: tl.tensor,
    addresses: tl.tensor,
    rank: tl.tensor,
    width: tl.tensor,
    whole: tl.tensor,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = rank * width + at
    exists = (at < width) & (column < whole)
    value = tl.load(own + row * width + at, mask=exists, other=0.0)
    for step in tl.static_range(RANKS):  # from the next rank on: each is written to by one at a time
        address = tl.load(addresses + (rank + step + 1) % RANKS)
        there = tl.multiple_of(address.to(tl.pointer_type(own.dtype.element_ty)), 16)
        tl.store(there + row * whole + column, value, mask=exists)


def hand_out(own: Tensor, addresses: Tensor, rank: int, whole: int) -> None:
    """Put `own` `[rows, width]` into columns `rank * width` on of `[rows, whole]` at each of `addresses`,
    int64, one for each rank. Columns behind the last are left out."""
    rows, width = own.shape
    _hand_out[(rows, triton.cdiv(width, _BLOCK))](
        own, addresses, rank, width, whole, RANKS=len(addresses), BLOCK=_BLOCK, num_warps=8
    )
