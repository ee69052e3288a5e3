"""In how many parts the KV of each tile of a step is walked, so that a few tiles fill the device.

A short chunk behind a long prefix is a tile or two, each of which would walk the whole prefix alone. The
host knows all lengths, so it decides: it cuts KV into parts of one length, the one with which attention is
predicted to take least. Tiles that fill the device stay whole: merging parts costs something, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.paged_attention.prefill import PrefillTuning
from services.executor.cuda.inputs import SPLIT_COLUMNS, Words

# In the time that a program takes for one tile of KV, as measured on an H200 (docs/benchmarks/gpu.md):
_START = 1  # what a program takes beside its tiles
_MERGE = 2  # to merge anything
_PARTS = 10  # to write and to read the parts of as many programs as the device runs at once
_ROUNDS = 2  # of such programs in a step with parts, at most: the room for parts is bounded


@dataclass(frozen=True, slots=True)
class SplitRoom:
    """What bounds the splits of a step."""

    tile_tokens: int  # KV that a program walks at a time
    at_once: int  # entries, each a program for every kv head, that the device runs at once
    entries: int  # of the list of a step in which a tile is split; 0: none ever is


def split_room(tuning: PrefillTuning, kv_heads: int, processors: int) -> SplitRoom:
    """For a GPU of so many multiprocessors. A layout of one loop has no splits: where a sum is cut would
    depend on the rest of the step, and so would its bits."""
    at_once = max(1, processors * tuning.per_sm // kv_heads)
    return SplitRoom(tuning.tile_tokens, at_once, 0 if tuning.one_loop else _ROUNDS * at_once)


def split_tiles(tiles: Words, room: SplitRoom) -> Words:
    """`tiles` as `tiles_of` gives them, `[4, tiles]`, with a split for each that gains by it.

    `[7, entries]` then, at most `room.entries`, those with much to do first: with the columns part, parts and
    merges of `kernels.paged_attention.split.PrefillSplit`; the same `tiles` where none is split."""
    count = tiles.shape[1]
    if not count or 2 * count > room.entries:
        return tiles
    lengths: list[int] = (-(-(tiles[2] + tiles[3]) // room.tile_tokens)).tolist()
    each = _part_tiles(lengths, room)
    return tiles if each >= max(lengths) else in_parts(tiles, lengths, each)


def in_parts(tiles: Words, lengths: list[int], each: int) -> Words:
    """Cut `tiles` `[4, tiles]`, whose KV is `lengths` tiles, into parts of up to `each` of them."""
    cut = []
    for column, length in zip(tiles.T.tolist(), lengths, strict=True):
        walked = -(-length // -(-length // each))  # as the kernel cuts: all parts of a tile but the last
        cut.append((walked, -(-length // walked), column))
    entries: list[tuple[int, ...]] = []
    merges = []
    for _, parts, column in sorted(cut, key=lambda tile: -tile[0]):
        entries += [(*column, part, parts if parts > 1 else 0, 0) for part in range(parts)]
        if parts > 1:
            merges.append(len(entries) - 1)
    found: Words = np.array(entries, dtype=np.int32).reshape(-1, SPLIT_COLUMNS).T
    found[-1, : len(merges)] = merges
    return found


def _part_tiles(lengths: list[int], room: SplitRoom) -> int:
    """The length of a part with which a step is predicted to take least, in tiles of KV. A few tens of µs, so
    in plain numbers: arrays this small are slower."""
    longest, total = max(lengths), sum(lengths)
    most = max(1, room.entries * longest // total)  # parts of the longest; more would never fit
    chosen, least = longest, -(-len(lengths) // room.at_once) * (longest + _START) * 1.0
    for each in sorted({-(-longest // parts) for parts in range(2, most + 1)}, reverse=True):
        entries = sum(-(-length // each) for length in lengths)
        rounds = -(-entries // room.at_once)
        cost = rounds * (each + _START) + _MERGE + _PARTS * entries / room.at_once
        if entries <= room.entries and cost < least:
            chosen, least = each, cost
    return chosen
