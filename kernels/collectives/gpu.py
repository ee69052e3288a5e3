"""Collectives in which GPUs store to each other's memory, in Triton.

`all_reduce_add_rms_norm_` fuses the sum of all GPUs' parts of a product, the residual add and the norm:

    rank 0   row 0: part ─┐                      ┌─▶ row 0's norm          rank r % ranks owns row r: only it
    rank 1   row 0: part ─┴─▶ rank 0: add, norm ─┴─▶ row 0's norm          keeps that row's residual

A sender stores numbers to the receiver's buffer, and the receiver reads until they are there: two hops, no
barrier. For a short sum every part goes to all ranks, and each rank adds up all rows: one hop with more
bytes. In both ways every rank gets the same bits of a row. An empty cell of a buffer holds EMPTY, a pattern
that no sent number has (of the two zeros in 16 bits only one is sent); the receiver writes EMPTY again after
it has read a cell. Calls alternate between two halves of the buffers: before a half is written again, all
ranks have made the call between, and so have emptied it. Numbers that show by themselves that they have
arrived: "LL" of NCCL, and TensorRT-LLM's Lamport all-reduce.

`all_gather` stores a rank's columns directly into the whole rows on every rank, so no copy has to join them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gemm.gpu import begin, ready

EMPTY = -(1 << 15)  # an empty cell of 16 bits: -0.0 in both types of float
_EMPTY_32 = -((1 << 31) - (1 << 15))  # the same pattern twice: a tiny float32, which is sent as zero
_BLOCK = 2048  # columns of a program


@triton.jit
def _rank_buffer(buffers: tl.tensor, rank: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(BITS)), 16)


@triton.jit
def _cells(value: tl.tensor, BITS: tl.constexpr, NOTHING: tl.constexpr) -> tl.tensor:
    bits = value.to(BITS, bitcast=True)
    return tl.where(bits == NOTHING, 0, bits)


@triton.jit
def _take(
    cells: tl.tensor,
    inside: tl.tensor,
    stride: tl.constexpr,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    NOTHING: tl.constexpr,
) -> tl.tensor:
    """Wait for COUNT cells; their sum in float32, in their order."""
    total = tl.zeros(cells.shape, tl.float32)
    missing = 1
    while missing > 0:
        total = tl.zeros(cells.shape, tl.float32)
        empty = tl.zeros(cells.shape, tl.int32)
        for i in tl.static_range(COUNT):
            bits = tl.load(cells + i * stride, mask=inside, other=0, volatile=True)
            empty |= (bits == NOTHING).to(tl.int32)
            total += bits.to(DTYPE, bitcast=True).to(tl.float32)
        missing = tl.max(empty, 0)
    return total


@triton.jit
def _empty(
    cells: tl.tensor,
    inside: tl.tensor,
    stride: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    NOTHING: tl.constexpr,
) -> None:
    for i in tl.static_range(COUNT):
        tl.store(cells + i * stride, tl.full(cells.shape, NOTHING, BITS), mask=inside)


@triton.jit(do_not_specialize=["turn", "rank", "rows"])
def _all_reduce_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    buffers: tl.tensor,
    split_stride: tl.tensor,
    turn: tl.tensor,
    rank: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    RANKS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
    NOTHING: tl.constexpr,
    ONE_HOP: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    row = tl.program_id(0)
    owner = rank if ONE_HOP else row % RANKS
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    dtype: tl.constexpr = residual.dtype.element_ty
    scales = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    own = _rank_buffer(buffers, rank, BITS)
    norms = turn * HALF + row * WIDTH  # a half: the norms of all rows, then the parts of those that are owned
    parts = turn * HALF + rows * WIDTH + row // RANKS * (RANKS * WIDTH)
    if ONE_HOP:
        parts = turn * HALF + row * (RANKS * WIDTH)
    ready(CHAINED)
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(x + split * split_stride + row * WIDTH + at, mask=inside, other=0.0)
    letters = _cells(value.to(dtype), BITS, NOTHING)
    if ONE_HOP:
        for step in tl.static_range(1, RANKS + 1):
            there = _rank_buffer(buffers, (rank + step) % RANKS, BITS)
            tl.store(there + parts + rank * WIDTH + at, letters, mask=inside)
    else:
        tl.store(_rank_buffer(buffers, owner, BITS) + parts + rank * WIDTH + at, letters, mask=inside)
    if owner == rank:
        kept = tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        value = _take(own + parts + at, inside, WIDTH, RANKS, dtype, NOTHING)
        total = (value.to(dtype).to(tl.float32) + kept).to(dtype)  # rounded as a sum and an add apart are
        value = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        normed = (value * scale * scales).to(dtype)
        if not ONE_HOP:
            for step in tl.static_range(1, RANKS):
                there = _rank_buffer(buffers, (rank + step) % RANKS, BITS)
                tl.store(there + norms + at, _cells(normed, BITS, NOTHING), mask=inside)
        tl.store(out + row * WIDTH + at, normed, mask=inside)
        tl.store(residual + row * WIDTH + at, total, mask=inside)
        _empty(own + parts + at, inside, WIDTH, RANKS, BITS, NOTHING)
    else:
        value = _take(own + norms + at, inside, WIDTH, 1, dtype, NOTHING)
        tl.store(out + row * WIDTH + at, value.to(dtype), mask=inside)
        _empty(own + norms + at, inside, WIDTH, 1, BITS, NOTHING)


@triton.jit(do_not_specialize=["rank"])
def _all_gather(
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


@dataclass(frozen=True, slots=True)
class MappedBuffers:
    """The symmetric buffers of a group for rank `rank` of `size`. Each has two halves of `half_bytes`, filled
    with EMPTY before the first call. Sums of up to `one_hop_bytes` use one hop."""

    addresses: Tensor  # [size] int64, of all ranks' buffers
    rank: int
    size: int
    half_bytes: int
    one_hop_bytes: int = 0

    def has_room(self, rows: int, row_bytes: int) -> bool:
        """Whether a half is large enough for such a call."""
        owned = -(-rows // self.size) * self.size
        needed = rows * self.size if rows * row_bytes <= self.one_hop_bytes else rows + owned
        return row_bytes % 16 == 0 and needed * row_bytes <= self.half_bytes


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm after a sum, with `weight` `[width]`."""

    weight: Tensor
    eps: float
    chained: bool = False  # see kernels.gemm.gpu


def all_reduce_add_rms_norm_(
    x: Tensor, residual: Tensor, norm: Norm, buffers: MappedBuffers, turn: int, out: Tensor | None = None
) -> Tensor:
    """kernels.elementwise.gpu.add_rms_norm_ of the sum of all ranks' `x`; all ranks call it at once. Then
    `residual` is right only in the rows that a rank owns (`rank` and every `size`-th after it), or in all
    rows of a short sum. `turn` alternates between 0 and 1 over all calls."""
    out = torch.empty_like(residual) if out is None else out
    rows, width = out.shape
    block, narrow = triton.next_power_of_2(width), out.element_size() == 2
    _all_reduce_norm[(rows,)](
        x, residual, norm.weight, out, buffers.addresses, rows * width, turn, buffers.rank, rows, norm.eps,
        RANKS=buffers.size, HALF=buffers.half_bytes // out.element_size(), WIDTH=width, BLOCK=block,
        SPLITS=x.shape[0] if x.dim() == 3 else 1, BITS=tl.int16 if narrow else tl.int32,
        NOTHING=EMPTY if narrow else _EMPTY_32, ONE_HOP=out.nbytes <= buffers.one_hop_bytes,
        CHAINED=norm.chained, launch_pdl=norm.chained,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


def all_gather(own: Tensor, addresses: Tensor, rank: int, whole: int) -> None:
    """Store `own` `[rows, width]` from column `rank * width` on of `[rows, whole]` at each of `addresses`
    (int64, one for each rank). Columns from `whole` on are left out."""
    rows, width = own.shape
    _all_gather[(rows, triton.cdiv(width, _BLOCK))](
        own, addresses, rank, width, whole, RANKS=len(addresses), BLOCK=_BLOCK, num_warps=8
    )
