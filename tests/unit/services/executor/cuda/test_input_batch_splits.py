"""In how many parts the host has tiles of chunks walked: exact plans, and what holds for any step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernels.attention.prefill import PrefillTuning
from services.executor.cuda.input_batch import (
    ArrangedStep,
    Layout,
    SplitRoom,
    Words,
    fill,
    in_parts,
    split_room,
    split_tiles,
    tiles_of,
)
from services.executor.cuda.kernel_configs import WIDE, DeviceTuning, device_tuning, row_by_row
from services.executor.parallel.step_split import Chunk

H200 = split_room(device_tuning("NVIDIA H200").prefill, 8, 132)  # Llama-3.1-8B on it
QUERIES = 32  # tokens in a tile of 128 rows of it


def parts(*chunks: tuple[int, int]) -> list[int]:
    """In how many parts KV of each tile of `chunks` (start, count) is walked, those with much to do first."""
    rows = [Chunk(slot, 100 * slot, start, count) for slot, (start, count) in enumerate(chunks)]
    found = split_tiles(tiles_of(tuple(rows), QUERIES), H200)
    return [int(max(each, 1)) for each in found[5][found[4] == 0]] if len(found) == 7 else []


def test_room_is_for_two_rounds_of_what_the_device_runs_at_once() -> None:
    assert SplitRoom(64, 16, 32) == H200
    assert split_room(PrefillTuning(32, 32, 2, 4, per_sm=1), 3, 10) == SplitRoom(32, 3, 6)
    assert split_room(PrefillTuning(), 8, 2) == SplitRoom(64, 1, 2)


@pytest.mark.parametrize("tuning", [WIDE, device_tuning("NVIDIA H200"), device_tuning("another")])
def test_deterministic_mode_has_no_splits(tuning: DeviceTuning) -> None:
    room = split_room(row_by_row(tuning).prefill, 8, 132)
    assert room.entries == 0
    tiles = tiles_of((Chunk(0, 0, 4600, 16),), QUERIES)
    assert split_tiles(tiles, room) is tiles


def test_short_chunk_after_a_long_prefix_is_spread_over_the_device() -> None:
    assert parts((4600, 16)) == [11]  # 73 tiles of KV, seven to a program: 88 programs
    assert parts((4600, 64)) == [7, 7]
    assert parts((3400, 16), (3400, 90)) == [4] * 4


def test_steps_that_fill_the_device_or_have_little_to_walk_stay_whole() -> None:
    assert parts((2400, 1000)) == []
    assert parts((0, 1000)) == []
    assert parts((1024, 320)) == []
    assert parts((3400, 300)) == []  # ten tiles for 16 places
    assert parts(*[(3000, 64)] * 8) == []
    assert parts((120, 16)) == []  # three tiles: merging costs more than is won
    assert parts((0, 16)) == []


def test_only_long_tiles_of_a_step_are_split() -> None:
    found = split_tiles(tiles_of((Chunk(0, 0, 10, 6), Chunk(1, 6, 700, 2)), QUERIES), SplitRoom(64, 10, 20))
    assert found.tolist() == [
        [1, 1, 1, 0],
        [6, 6, 6, 0],
        [700, 700, 700, 10],
        [2, 2, 2, 6],
        [0, 1, 2, 0],
        [3, 3, 3, 0],
        [2, 0, 0, 0],
    ]


def test_parts_are_of_one_length_and_none_is_empty() -> None:
    tiles = np.array([[3], [0], [600], [3]], dtype=np.int32)  # ten tiles of KV
    assert in_parts(tiles, [10], 4)[4:6].tolist() == [[0, 1, 2], [3, 3, 3]]
    assert in_parts(tiles, [10], 3)[5].tolist() == [4] * 4  # 3, 3, 3 and 1
    assert in_parts(tiles, [6], 4)[5].tolist() == [2, 2]  # 3 and 3, not 4 and 2


def test_any_step_keeps_within_the_room_and_walks_all_once() -> None:
    draw, split = random.Random(3), 0
    for _ in range(300):
        room = SplitRoom(64, at_once := draw.choice((1, 4, 33, 88)), 2 * at_once)
        rows = [
            Chunk(slot, 0, draw.choice((0, 63, draw.randrange(9000))), draw.randrange(1, 90))
            for slot in range(draw.randrange(1, 12))
        ]
        tiles = tiles_of(tuple(rows), QUERIES)
        found = split_tiles(tiles, room)
        if len(found) == 4:
            assert found is tiles
            continue
        split += 1
        assert found.shape[1] <= room.entries
        assert_covers(found, tiles)
    assert split > 100


def assert_covers(found: Words, tiles: Words) -> None:
    """Each tile's parts are all there, in order, one after the other, and its last one is to be merged."""
    at, merges, seen = 0, [], []
    while at < found.shape[1]:
        of = max(int(found[5, at]), 1)
        assert of == 1 or (found[5, at : at + of] == of).all()
        assert (found[:4, at : at + of] == found[:4, at : at + 1]).all()
        assert found[4, at : at + of].tolist() == list(range(of))
        length = -(-int(found[2, at] + found[3, at]) // 64)
        assert (of - 1) * -(-length // of) < length  # the last part has something to walk
        seen.append(tuple(found[:4, at].tolist()))
        at += of
        if of > 1:
            merges.append(at - 1)
    assert sorted(seen) == sorted(map(tuple, tiles.T.tolist()))
    assert found[6].tolist() == merges + [0] * (found.shape[1] - len(merges))


def test_words_of_splits_lie_after_the_words_of_tiles() -> None:
    nothing = np.zeros((3, 0), dtype=np.int32)
    step = ArrangedStep(0, 0, nothing, (), nothing)
    layout = Layout(4, 16, 4, split=True)
    tiles = np.arange(1, 15, dtype=np.int32).reshape(7, 2)
    buffer = np.full(layout.words, -5, dtype=np.int32)
    fill(buffer, layout, step, tiles, 9)
    assert layout.words == layout.tile_at + 28
    assert buffer[layout.tile_at :].reshape(7, 4)[:, :2].tolist() == tiles.tolist()
    assert not buffer[layout.tile_at :].reshape(7, 4)[:, 2:].any()
    fill(buffer, layout, step, tiles[:4], 9)  # none is split
    assert buffer[layout.tile_at :].reshape(7, 4)[:4, :2].tolist() == tiles[:4].tolist()
    assert not buffer[layout.tile_at :].reshape(7, 4)[4:].any()
