"""In how many parts the KV of each tile of a step is walked, so that a few tiles fill the device.

A short chunk behind a long prefix is a tile or two, each of which would walk the whole prefix alone. The
host knows all lengths, so it decides: it cuts KV into parts of one length, the one with which attention is
predicted to take least. Tiles that fill the device stay whole: merging parts costs something, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.paged_attention.prefill import PrefillTuning
from services.executor.cuda.inputs import SPLIT_COLUMNS, TILE_COLUMNS

Words = NDArray[np.int32]

# In the time that a program takes for one tile of KV:
_START = 3  # what a program takes beside its tiles
_MERGE = 2  # to merge anything
_PARTS = 4  # to write and to read the parts of as many programs as the device runs at once
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
    lengths = -(-(tiles[2] + tiles[3]) // room.tile_tokens)
    each = _part_tiles(lengths, room)
    return tiles if each >= lengths.max() else in_parts(tiles, lengths, each)


def in_parts(tiles: Words, lengths: Words, each: int) -> Words:
    """Cut `tiles` `[4, tiles]`, whose KV is `lengths` tiles, into parts of up to `each` of them."""
    parts = -(-lengths // each)
    walked = -(-lengths // parts)
    parts = -(-lengths // walked)  # as the kernel cuts: all parts of a tile but the last are the same length
    order = np.argsort(-walked, kind="stable")
    tiles, parts = tiles[:, order], parts[order]
    ends = np.cumsum(parts)
    found = np.zeros((SPLIT_COLUMNS, ends[-1]), dtype=np.int32)
    found[:TILE_COLUMNS] = np.repeat(tiles, parts, axis=1)
    found[4] = np.arange(ends[-1]) - np.repeat(ends - parts, parts)
    found[5] = np.repeat(np.where(parts > 1, parts, 0), parts)
    merges = ends[parts > 1] - 1
    found[6, : len(merges)] = merges
    return found


def _part_tiles(lengths: Words, room: SplitRoom) -> int:
    """The length of a part with which a step is predicted to take least, in tiles of KV."""
    longest = int(lengths.max())
    each = -(-longest // np.arange(1, min(longest, room.entries) + 1))
    entries = (-(-lengths[None] // each[:, None])).sum(1)
    rounds = -(-entries // room.at_once)
    cost = rounds * (each + _START) + (_MERGE + _PARTS * entries / room.at_once) * (each < longest)
    cost[entries > room.entries] = np.inf
    return int(each[np.argmin(cost)])
