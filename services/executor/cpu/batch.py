"""A BatchBuilder makes the tensors of a forward pass from the columns of a plan and the state of the Slots.

Decode rows come first, grouped by context length, then the prompt chunks:

    | decode, ≤ 16 tokens | decode, 17-32 | ... | chunk of slot 3 | chunk of slot 5 | padding |

A group of decode rows is one attention call, padded to its longest row; a chunk is one call.
Kernels that process a whole step in one call get all sequences in the plan's order, without groups.
With other kernels deterministic mode makes one attention call for each token, so neither other rows nor the
chunk's bounds change its bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.checkpoint.kv_cache import KvCache
from services.executor.cpu.linear import ROW_TILE
from services.executor.engine import Drafts
from services.executor.sampling.sampler import NO_TOKEN, STOP_IDS, SlotTokens, append_sampled, row_errors
from shared.errors import EngineError
from shared.messages import AT_DEVICE, Ints, SlotOpen, StepPlan, ints

_Column = NDArray[np.int64]
MakeSequences = Callable[[_Column, _Column, _Column, _Column], Any]  # tables, firsts, starts, counts


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Token rows `first` to `first + len(tables)`: decode rows of similar context. See attend_decode."""

    first: int
    tables: Tensor  # [rows, blocks]
    mask: Tensor  # [rows, 1, 1, tokens]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Token rows `first` to `first + count`: a chunk of one prompt. See attend_prefill."""

    first: int
    count: int
    table: Tensor  # [blocks]
    mask: Tensor | None  # [count, tokens]


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a forward pass. All tensors are on the device."""

    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    rows: Tensor  # [layers, K|V, tokens], slot mapping
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]
    sampled: Tensor  # [samples], the token row of each sample row
    each_sampled: bool  # all token rows are sampled, in order
    first: _Column  # [rows of the plan], the first token row of each
    padding: int  # token rows at the end without a token
    sequences: Any = None  # all rows, instead of `decode` and `prefill`
    adapted: Any = None  # the adapters of the token rows; None: no row has one


class BatchBuilder:
    """Builds batches over one set of slots and one cache."""

    def __init__(
        self,
        slots: Slots,
        cache: KvCache,
        *,
        deterministic: bool = False,
        sequences: MakeSequences | None = None,
        adapters: Any = None,
    ) -> None:
        """`sequences` makes what a kernel needs that takes all rows at once. `adapters`: see
        services.executor.adapters.places."""
        self._slots = slots
        self._cache = cache
        self._deterministic = deterministic
        self._sequences = sequences
        self._adapters = adapters
        _, layers, two, block_tokens, *_ = cache.tensor.shape
        self._planes = np.arange(layers * two).reshape(layers, two, 1) * block_tokens

    def build(self, plan: StepPlan, drafts: Drafts | None = None) -> Batch:
        """The batch of a plan, after Slots.apply_tables; its rows AT_DEVICE are these drafts. Raises
        EngineError for a slot that is not open."""
        slots, starts, counts = map(_column, (plan.slots, plan.starts, plan.counts))
        in_order = self._deterministic or self._sequences is not None
        order, ranks = (np.arange(len(counts)), counts[:0]) if in_order else self._order(starts, counts)
        first = np.empty_like(counts)
        first[order] = np.cumsum(counts[order]) - counts[order]
        row = np.repeat(order, counts[order])
        positions = starts[row] + np.arange(len(row)) - first[row]
        padding = -len(row) % ROW_TILE if self._deterministic else 0
        decode: tuple[DecodeGroup, ...] = ()
        prefill, sequences = order[:0], None
        if self._sequences is not None:
            blocks = -(-int((starts + counts).max()) // self._cache.block_tokens)
            sequences = self._sequences(self._slots.tables[slots, :blocks], first, starts, counts)
        elif self._deterministic:  # one group each: a chunk's bounds would change the last bits
            each = np.arange(len(row))
            decode = self._decode(slots[row], positions, each, each)
        else:
            decode, prefill = self._decode(slots, starts, order, ranks), order[len(ranks) :]
        sampled = (first + counts - 1)[_column(plan.sample_rows)]
        return Batch(
            ids=self._ids(plan, first, len(row) + padding, drafts),
            positions=self._on_device(_padded(positions, padding)),
            rows=self._rows(slots[row], positions, padding),
            decode=decode,
            prefill=tuple(
                self._chunk(int(slots[i]), int(starts[i]), int(counts[i]), int(first[i])) for i in prefill
            ),
            sampled=self._on_device(sampled),
            first=first,
            each_sampled=not padding and np.array_equal(sampled, np.arange(len(row))),
            padding=padding,
            sequences=sequences,
            adapted=None if self._adapters is None else self._adapters.rows(slots[row], padding),
        )

    def _order(self, starts: _Column, counts: _Column) -> tuple[_Column, _Column]:
        """Rows in token order, and the group of each decode row. The lengths of groups double, so padding
        costs less than a factor of two."""
        decode = np.flatnonzero(counts == 1)
        blocks = -(-(starts[decode] + 1) // self._cache.block_tokens)
        ranks = np.ceil(np.log2(blocks)).astype(np.int64)
        by_rank = np.argsort(ranks, kind="stable")
        return np.concatenate((decode[by_rank], np.flatnonzero(counts != 1))), ranks[by_rank]

    def _ids(self, plan: StepPlan, first: _Column, tokens: int, drafts: Drafts | None) -> Tensor:
        ids = np.zeros(tokens, dtype=np.int64)
        fed, foreseen = [], iter(drafts.ids if drafts is not None else ())
        for i, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            known = self._slots.tokens(slot)
            if plan.from_device[i] == AT_DEVICE:
                ids[first[i]] = next(foreseen)
            elif plan.from_device[i]:
                fed.append(i)
            elif start + count > len(known):
                raise EngineError(
                    f"slot {slot} has {len(known)} tokens; the plan wants {start} to {start + count}"
                )
            else:
                ids[first[i] : first[i] + count] = known[start : start + count]
        if fed:
            ids[first[fed]] = self._slots.last_token[[plan.slots[i] for i in fed]]
        return self._on_device(ids)

    def _rows(self, slots: _Column, positions: _Column, padding: int) -> Tensor:
        """The rows of `write_kv`, `[layers, K|V, tokens]`. KV of done slots and of padding goes to the spare
        block."""
        cache = self._cache
        blocks, offsets = np.divmod(positions, cache.block_tokens)
        blocks = np.where(self._slots.done[slots], cache.spare, self._slots.tables[slots, blocks])
        blocks, offsets = _padded(blocks, padding, cache.spare), _padded(offsets, padding)
        return self._on_device(blocks * (self._planes.size * cache.block_tokens) + offsets + self._planes)

    def _decode(
        self, slots: _Column, starts: _Column, order: _Column, ranks: _Column
    ) -> tuple[DecodeGroup, ...]:
        groups = []
        edges = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
        for first, end in itertools.pairwise(edges):
            if first == end:
                continue
            members = order[first:end]
            lengths = starts[members] + 1
            tokens = int(lengths.max())
            tables = self._slots.tables[slots[members], : -(-tokens // self._cache.block_tokens)]
            groups.append(DecodeGroup(first, self._on_device(tables), self._past_end(lengths, tokens)))
        return tuple(groups)

    def _past_end(self, lengths: _Column, tokens: int) -> Tensor:
        past_end = self._on_device(np.arange(tokens) >= lengths[:, None])
        mask = torch.zeros(past_end.shape, dtype=self._cache.activations, device=past_end.device)
        return mask.masked_fill_(past_end, -torch.inf)[:, None, None]

    def _chunk(self, slot: int, start: int, count: int, first: int) -> PrefillChunk:
        end = start + count
        table = self._on_device(self._slots.tables[slot, : -(-end // self._cache.block_tokens)])
        mask = None
        if start:
            later = self._on_device(np.arange(end) > np.arange(start, end)[:, None])
            mask = torch.zeros(later.shape, dtype=self._cache.activations, device=later.device)
            mask.masked_fill_(later, -torch.inf)
        return PrefillChunk(first, count, table, mask)

    def _on_device(self, values: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._cache.tensor.device)


class Slots:
    """The slots of running sequences: tokens, block tables, the last token, and whether they are done. Tables
    are `[slots, blocks]`; entries never set point at the spare block. All of it is in NumPy, which needs a
    third of torch's time for a few numbers.

    Sampling finds a slot's end (stop id or length). The scheduler may have sent the next plan before: its
    rows of a slot in `done` are no-ops. The host thread advances slots while the device thread
    reads and opens others. There is no lock, since each thread writes only the entries of its own slots, in
    place. Only the device thread uses `tables`."""

    def __init__(self, count: int, table_blocks: int, spare: int, max_context: int) -> None:
        self._record = SlotTokens(count, max_context)
        self.tokens, self.close = self._record.tokens, self._record.close
        self.tables: NDArray[np.int64] = np.full((count, table_blocks), spare, dtype=np.int64)
        self.last_token = np.zeros(count, np.int64)
        self.done = np.zeros(count, np.bool_)
        self._max_length = np.zeros(count, np.int64)
        self._stop_ids = np.full((count, STOP_IDS), NO_TOKEN, np.int64)
        self._spare = spare

    def open(self, opened: SlotOpen) -> None:
        """Set up a slot. Raises EngineError for one that cannot be."""
        slot, (limit, stops) = opened.slot, self._record.open(opened)
        self.tables[slot] = self._spare
        self.last_token[slot] = opened.tokens[-1] if opened.tokens else 0
        self.done[slot] = False
        self._max_length[slot] = limit
        self._stop_ids[slot] = stops

    def apply_tables(self, plan: StepPlan) -> None:
        """Write the plan's block-table deltas."""
        at = 0
        for slot, first, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            self.tables[slot, first : first + count] = plan.table_blocks[at : at + count]
            at += count

    def advance(
        self, slots: list[int], ids: Tensor, positions: list[int]
    ) -> tuple[Ints, Ints, dict[int, str]]:
        """Append one sampled token, or an id of ROW_ERRORS, to each of `slots`, at `positions` of the
        sequences. Waits for the device. Returns the columns `ids` and `done` of a StepResult, and the errors
        of rows without a token by index."""
        at, found, lengths = _column(slots), ids.cpu().numpy(), _column(positions) + 1
        before, flawed, last = self.done[at], found < 0, self.last_token[at]
        stopped = (found[:, None] == self._stop_ids[at]).any(1) | (lengths >= self._max_length[at])
        without = before | flawed
        self.last_token[at] = np.where(without, last, found)
        self.done[at] = without | stopped
        chosen: list[int] = np.where(without, NO_TOKEN, found).tolist()
        ended: list[int] = np.where(before, 2, np.where(flawed, -found, stopped)).tolist()
        flaws = row_errors(ended)
        append_sampled(map(self.tokens, slots), chosen, positions)
        return ints(chosen), ints(ended), flaws


def _column(numbers: Sequence[int]) -> _Column:
    return np.array(numbers, dtype=np.int64)


def _padded(column: _Column, padding: int, value: int = 0) -> _Column:
    return np.pad(column, (0, padding), constant_values=value) if padding else column
