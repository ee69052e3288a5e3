"""From the columns of a plan to words that a graph reads: one pinned buffer, one copy to the device.

    sample rows, slots, positions [3 * slots] | token slots, positions, ids [3 * tokens], decode rows |
    tiles: slots, rows, starts, counts, and where they may be split part, parts, merges [4 or 7 * tiles] |
    places, values of slot words to set

Tokens are laid out decode rows first, then chunks one after the other; what a bucket has over is padding on
nobody's slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.step_inputs.gpu import FROM_DEVICE
from services.executor.cuda.slots import CudaSlots
from services.executor.halves import Chunk
from shared.errors import EngineError
from shared.messages import Ints, StepPlan

Words = NDArray[np.int32]

TILE_COLUMNS, SPLIT_COLUMNS = 4, 7  # slots, rows, starts, counts; and part, parts, merges
DENSE_TOKENS = 1024  # a prompt's first chunk from here on is attended by cuDNN, which reads no block table
DENSE_STEP = 512  # but for what is over a multiple of this: cuDNN plans each length once, for 80 ms


@dataclass(frozen=True, slots=True)
class Arranged:
    """A plan with its rows in token order."""

    tokens: int
    decode_rows: int
    columns: Words  # [3, tokens]: slots, positions, ids
    chunks: tuple[Chunk, ...]
    samples: Words  # [3, samples]: token rows, slots, positions of the new tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are in the buffer, in words. `tiles` 0: a step of decodes; `split`: they may be split."""

    samples: int
    tokens: int
    tiles: int
    split: bool = False

    @property
    def token_at(self) -> int:
        return 3 * self.samples

    @property
    def tile_at(self) -> int:
        return self.token_at + -(-(3 * self.tokens + 1) // 4) * 4

    @property
    def tile_columns(self) -> int:
        return SPLIT_COLUMNS if self.split else TILE_COLUMNS

    @property
    def words(self) -> int:
        return self.tile_at + self.tile_columns * self.tiles


def arrange(plan: StepPlan, slots: CudaSlots, *, apart: bool = True) -> Arranged:
    """Put a plan's rows in token order; decodes are chunks of one token unless they stand `apart`. Raises
    EngineError for a slot not open or tokens not known."""
    rows, starts, counts = _numbers(plan.slots), _numbers(plan.starts), _numbers(plan.counts)
    fed = _numbers(plan.from_device)
    alone = (counts == 1) & apart
    decode = np.flatnonzero(alone)
    order = np.concatenate((decode, np.flatnonzero(~alone))) if len(decode) < len(counts) else decode
    first = np.empty_like(counts)
    first[order] = np.cumsum(counts[order]) - counts[order]
    tokens = int(counts.sum())
    columns = np.empty((3, tokens), dtype=np.int32)
    columns[0], columns[1], columns[2] = np.repeat(rows[order], counts[order]), 0, FROM_DEVICE
    by_device = np.flatnonzero(fed)
    columns[1, first[by_device]] = starts[by_device]
    for i in np.flatnonzero(fed == 0).tolist():
        start, count, at = int(starts[i]), int(counts[i]), int(first[i])
        known = slots.tokens(int(rows[i]))
        if start + count > len(known):
            raise EngineError(
                f"slot {rows[i]} has {len(known)} tokens; the plan wants {start} to {start + count}"
            )
        columns[1, at : at + count] = np.arange(start, start + count)
        columns[2, at : at + count] = known[start : start + count]
    chunks = tuple(
        Chunk(int(rows[i]), int(first[i]), int(starts[i]), int(counts[i]))
        for i in order[len(decode) :].tolist()
    )
    sampled = _numbers(plan.sample_rows)
    samples = np.stack(
        (first[sampled] + counts[sampled] - 1, _numbers(plan.sample_slots), starts[sampled] + counts[sampled])
    )
    return Arranged(tokens, len(decode), columns, chunks, samples)


def samples_of(first: Arranged, second: Arranged, behind: int, order: Sequence[int]) -> Words:
    """The samples of both halves of a step in the `order` of services.executor.halves; the tokens of the
    second begin `behind` those of the first."""
    moved = second.samples + np.array([[behind], [0], [0]], dtype=np.int32)
    return np.concatenate((first.samples, moved), 1)[:, list(order)]


def split_dense(chunks: tuple[Chunk, ...]) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """What cuDNN attends, and the rest: long chunks that start their sequence, but for their last tokens."""
    dense, tiled = [], []
    for chunk in chunks:
        count = 0 if chunk.start or chunk.count < DENSE_TOKENS else chunk.count // DENSE_STEP * DENSE_STEP
        if count:
            dense.append(Chunk(chunk.slot, chunk.first, 0, count))
        if count < chunk.count:
            tiled.append(Chunk(chunk.slot, chunk.first + count, chunk.start + count, chunk.count - count))
    return tuple(dense), tuple(tiled)


def tiles_of(chunks: tuple[Chunk, ...], size: int) -> Words:
    """`[4, tiles]`: slot, token row, position and count of tiles of up to `size` tokens, long ones first."""
    found = [
        (chunk.slot, chunk.first + at, chunk.start + at, min(size, chunk.count - at))
        for chunk in chunks
        for at in range(0, chunk.count, size)
    ]
    found.sort(key=lambda tile: -tile[2])  # those that look back farthest take longest
    return np.array(found, dtype=np.int32).reshape(-1, 4).T


def fill(buffer: Words, layout: Layout, step: Arranged, tiles: Words, nobody: int) -> None:
    """Write a step into the first `layout.words` words of `buffer`. `tiles` may lack the columns of splits:
    then none is split."""
    samples = buffer[: layout.token_at].reshape(3, -1)
    samples[0], samples[1], samples[2] = 0, nobody, 0
    samples[:, : step.samples.shape[1]] = step.samples
    columns = buffer[layout.token_at : layout.token_at + 3 * layout.tokens].reshape(3, -1)
    columns[0, step.tokens :], columns[1:, step.tokens :] = nobody, 0
    columns[:, : step.tokens] = step.columns
    buffer[layout.token_at + 3 * layout.tokens] = step.decode_rows
    if layout.tiles:
        named = buffer[layout.tile_at : layout.words].reshape(layout.tile_columns, -1)
        named[:] = 0
        named[: len(tiles), : tiles.shape[1]] = tiles


def _numbers(column: Ints) -> NDArray[np.int64]:
    return np.array(column, dtype=np.int64)
