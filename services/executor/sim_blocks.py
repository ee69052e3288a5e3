"""KV blocks of the simulated engine: each holds a signature of what was last written to it, and no more.

    signature [sequence, index in the sequence, tokens so far, step]   of 8 bytes each

Copies take the time that the setting `sim` gives, and move the signature for real: what comes back from
the arena is what was stored there, or a test can tell.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.executor.arena import Arena
from services.executor.sim_timing import SimCopies
from shared.blocks import blocks_for
from shared.messages import StepPlan

_WORDS = 4
SIGNATURE_BYTES = 8 * _WORDS
_FREE_PIECE_BYTES = 64 << 20  # where copies take no time


class SimBlocks:
    """The blocks and the tables of all slots. Its Copier half belongs to the copy lane."""

    def __init__(self, blocks: int, block_tokens: int, slots: int, max_context: int) -> None:
        self._block_tokens = block_tokens
        self.signatures: NDArray[np.int64] = np.zeros((blocks, _WORDS), dtype=np.int64)
        self._tables: NDArray[np.int32] = np.zeros((slots, blocks_for(max_context, block_tokens)), np.int32)

    def write(self, plan: StepPlan, rows: Sequence[int], sequences: Sequence[int]) -> None:
        """Apply a plan's tables and copies, then write what its forward `rows` write. `sequences` are those
        of the rows."""
        at = 0
        for slot, begin, count in zip(plan.table_slots, plan.table_first, plan.table_counts, strict=True):
            self._tables[slot, begin : begin + count] = plan.table_blocks[at : at + count]
            at += count
        if plan.copy_from:
            self.signatures[_numbers(plan.copy_to)] = self.signatures[_numbers(plan.copy_from)]
        if not rows:
            return
        slots, starts = _numbers(plan.slots)[rows], _numbers(plan.starts)[rows]
        ends = starts + _numbers(plan.counts)[rows]
        first, last = starts // self._block_tokens, (ends - 1) // self._block_tokens
        spans = last - first + 1
        row = np.repeat(np.arange(len(rows)), spans)  # of each block that is written
        index = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(spans) - spans, spans)
        written = np.empty((len(row), _WORDS), np.int64)
        written[:, 0] = np.asarray(sequences)[row]
        written[:, 1] = index
        written[:, 2] = np.minimum(ends[row], (index + 1) * self._block_tokens)
        written[:, 3] = plan.step
        self.signatures[self._tables[slots[row], index]] = written


class SimCopier:
    """See services.executor.backend.Copier."""

    def __init__(self, blocks: SimBlocks, times: SimCopies) -> None:
        self._signatures = blocks.signatures
        self._times = times
        slower_mb_s = min(times.d2h_mb_s, times.h2d_mb_s)
        self.piece_bytes = slower_mb_s * 1_000 or _FREE_PIECE_BYTES  # a millisecond's
        self._arena: NDArray[np.uint8] | None = None

    def attach(self, arena: Arena) -> None:
        self._arena = np.frombuffer(arena.view, dtype=np.uint8)

    def detach(self) -> None:
        self._arena = None

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        due_s = time.monotonic() + self._times.store_s(len(blocks))
        for block, offset in zip(blocks, offsets, strict=True):
            self._arena[offset : offset + SIGNATURE_BYTES] = self._signatures[block].view(np.uint8)
        _sleep_until(due_s)

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        assert self._arena is not None, "no arena is attached"
        due_s = time.monotonic() + self._times.load_s(len(blocks))
        for block, offset in zip(blocks, offsets, strict=True):
            self._signatures[block].view(np.uint8)[:] = self._arena[offset : offset + SIGNATURE_BYTES]
        _sleep_until(due_s)

    def finish(self) -> int:
        """Nothing is left to wait for: copies are over when they return."""
        return 0


def _numbers(column: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(column, dtype=np.int32)


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
