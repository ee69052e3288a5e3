"""Computes a step's inputs on a GPU, in Triton, from the host's columns and the state of the slots.

The host has the slot, position and batch index of every token, and the ids of host-fed tokens. Only the
device has the ids that the step before has chosen, and whether a slot is done. `record_timestamp` writes the
device's clock, to time parts of a stream or graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

FROM_DEVICE = -1  # in place of the id of a device-fed token
_BLOCK = 128


@triton.jit(do_not_specialize=["tokens", "rows", "table_blocks", "spare", "spare_slot"])
def _resolve(
    columns: tl.tensor,
    tables: tl.tensor,
    last_tokens: tl.tensor,
    done: tl.tensor,
    ids: tl.tensor,
    slot_mapping: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    table_blocks: tl.tensor,
    spare: tl.tensor,
    spare_slot: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tokens
    slot = tl.load(columns + at, mask=inside, other=0).to(tl.int64)
    position = tl.load(columns + tokens + at, mask=inside, other=0)
    given = tl.load(columns + 2 * tokens + at, mask=inside, other=0)
    last = tl.load(last_tokens + slot, mask=inside, other=0)
    ended = tl.load(done + slot, mask=inside, other=1)
    block = tl.load(tables + slot * table_blocks + position // BLOCK_TOKENS, mask=inside, other=0)
    block = tl.where(ended != 0, spare, block)
    decode_rows = tl.load(columns + 3 * tokens)
    tl.store(ids + at, tl.where(given < 0, last, given), mask=inside)
    tl.store(slot_mapping + at, block * BLOCK_TOKENS + position % BLOCK_TOKENS, mask=inside)
    attends = (at < decode_rows) & (slot != spare_slot) & (ended == 0)
    tl.store(lengths + at, tl.where(attends, position + 1, 0), mask=at < rows)


@triton.jit(do_not_specialize=["count"])
def _scatter(
    at: tl.tensor, values: tl.tensor, target: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.load(at + i, mask=i < count, other=0)
    tl.store(target + where, tl.load(values + i, mask=i < count, other=0), mask=i < count)


@triton.jit(do_not_specialize=["count"])
def _move(source: tl.tensor, target: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


@triton.jit
def _record_timestamp(target: tl.tensor) -> None:
    tl.store(target, globaltimer())


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of the slots on the device, int32. The last slot is spare: always done, its table the spare
    block."""

    tables: Tensor  # [slots + 1, blocks]
    last_tokens: Tensor  # [slots + 1]
    done: Tensor  # [slots + 1]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The results of `resolve`, int32: for every token, and `lengths` for the decode rows, which come
    first."""

    ids: Tensor  # [tokens]
    slot_mapping: Tensor  # [tokens], block * block_tokens + offset
    lengths: Tensor  # [rows], tokens of context; 0 for rows that are no-ops


def resolve(columns: Tensor, state: SlotState, spare: int, block_tokens: int, found: Resolved) -> None:
    """Resolve the tokens of a step. `columns` is `[3 * tokens + 1]` int32: slots, positions, ids (FROM_DEVICE
    for the slot's last token), and the number of decode rows, which come first. KV of done slots goes to the
    block `spare`."""
    tokens = len(found.ids)
    _resolve[(triton.cdiv(tokens, _BLOCK),)](
        columns, state.tables, state.last_tokens, state.done, found.ids, found.slot_mapping, found.lengths,
        tokens, len(found.lengths), state.tables.shape[1], spare, len(state.done) - 1,
        BLOCK_TOKENS=block_tokens, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def scatter(at: Tensor, values: Tensor, target: Tensor) -> None:
    """`target.view(-1)[at] = values`, all int32. Equal indices must have equal values."""
    count = len(at)
    _scatter[(triton.cdiv(count, _BLOCK),)](at, values, target, count, BLOCK=_BLOCK, num_warps=4)


def move(source: Tensor, target: Tensor) -> None:
    """`target = source`, int32 `[count]`; either may be in pinned host memory. A few KiB take 3 µs. With a
    copy engine they would wait for the KV blocks that it is copying: up to 0.7 ms."""
    count = source.numel()
    _move[(triton.cdiv(count, 4 * _BLOCK),)](source, target, count, BLOCK=4 * _BLOCK, num_warps=4)


def record_timestamp(target: Tensor) -> None:
    """Write the device's clock in ns to `target[0]`, int64, when all earlier work of this stream is done. It
    takes a microsecond of one processor; the clock of some devices has steps of 1 µs."""
    _record_timestamp[(1,)](target, num_warps=1)
