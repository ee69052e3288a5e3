"""Attention of prompt chunks whose KV several programs read, a part each: against torch in float64.

Runs on a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.executor.gpu_side import BLOCK, BLOCKS, DEVICE, LAYERS, far, normal, shuffled

from kernels.attention import ref as attention
from kernels.attention.prefill import (
    PartsRoom,
    PrefillSplit,
    PrefillTiles,
    PrefillTuning,
    attend_prefill,
    parts_room,
    tile_queries,
)
from services.executor.cuda.input_batch import in_parts, tiles_of
from services.executor.parallel.step_split import Chunk

TUNING = PrefillTuning(32, 16, 1, 4)
ENTRIES, SPARE_ENTRIES = 30, 3
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16

# Slot, start and count of each chunk; the longest part, in tiles of 16 tokens of KV.
CUTS = {
    "the chunk begins at a border": ([(1, 32, 5)], 1),
    "the last part is one token": ([(0, 30, 3), (3, 48, 1)], 2),
    "rows that see nothing of the last part": ([(2, 30, 12)], 1),
    "parts that the chunk itself lies across": ([(2, 14, 40)], 2),
    "whole tiles beside tiles in parts": ([(0, 0, 13), (1, 60, 4), (2, 1, 2), (3, 17, 1)], 2),
    "a part of each length": ([(0, 70, 10), (1, 63, 1), (2, 64, 1), (3, 15, 2)], 3),
}


def room_of(kv_heads: int, dim: int) -> PartsRoom:
    """Room full of NaN: what is read without having been written shows."""
    room = parts_room(ENTRIES, kv_heads, TUNING.rows, dim, torch.device(DEVICE))
    room.partial.fill_(torch.nan)
    room.sums.fill_(torch.nan)
    return room


def attended(
    query: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, chunks: list[Chunk], longest: int
) -> torch.Tensor:
    """Attention of `chunks`, their KV in parts of up to `longest` tiles, with spare entries as in a graph."""
    heads, kv_heads, dim = query.shape[1], kv.shape[4], query.shape[2]
    tiles = tiles_of(tuple(chunks), tile_queries(heads, kv_heads, TUNING))
    lengths = (-(-(tiles[2] + tiles[3]) // TUNING.tile_tokens)).tolist()
    found = in_parts(tiles, lengths, longest)
    assert found.shape[1] <= ENTRIES
    spare = np.zeros((7, SPARE_ENTRIES), dtype=np.int32)
    columns = torch.from_numpy(np.concatenate((found, spare), axis=1)).to(DEVICE)
    out = torch.full_like(query, torch.nan)
    split = PrefillSplit(columns[4], columns[5], columns[6], room_of(kv_heads, dim))
    split_tiles = PrefillTiles(columns[0], columns[1], columns[2], columns[3], tables, split)
    attend_prefill(query, kv, 1, split_tiles, TUNING, out)
    return out


def assert_near(
    found: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, start: int
) -> None:
    end = start + len(query)
    later = torch.arange(end)[None] > torch.arange(start, end)[:, None]
    mask = torch.zeros(len(query), end, dtype=torch.float64).masked_fill_(later, -torch.inf).to(DEVICE)
    blocks = table[: -(-end // BLOCK)].long()
    wanted = attention.attend_prefill(query.double(), kv.double(), 1, blocks, mask)
    assert far(found, wanted) < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[query.dtype]


def chunks_of(cut: str) -> tuple[list[Chunk], int]:
    """The chunks of `cut`, one after the other from token row 1 on, and the longest part."""
    rows, first = [], 1
    for slot, start, count in CUTS[cut][0]:
        rows.append(Chunk(slot, first, start, count))
        first += count
    return rows, CUTS[cut][1]


@pytest.mark.parametrize(
    ("cut", "shape"), zip(CUTS, [(9, 3, 24), (8, 2, 16)] * (len(CUTS) // 2), strict=True), ids=str
)
def test_prefill_in_parts_equals_the_reference_wherever_kv_is_cut(
    cut: str, shape: tuple[int, int, int]
) -> None:
    heads, kv_heads, dim = shape
    chunks, longest = chunks_of(cut)
    last = chunks[-1].first + chunks[-1].count
    kv, tables = normal(BLOCKS, LAYERS, 2, BLOCK, kv_heads, dim), shuffled(4)
    query = normal(last + 2, heads, dim, seed=2)
    found = attended(query, kv, tables, chunks, longest)
    for chunk in chunks:
        rows = slice(chunk.first, chunk.first + chunk.count)
        assert_near(found[rows], query[rows], kv, tables[chunk.slot], chunk.start)
    assert found[0].isnan().all()  # rows of no chunk are left alone
    assert found[last:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_prefill_equals_the_reference_with_more_parts_than_are_merged_at_a_time(dtype: torch.dtype) -> None:
    """SmolLM2's heads; 19 parts, of which 16 are merged at a time."""
    kv = normal(BLOCKS, LAYERS, 2, BLOCK, 3, 64).to(dtype)
    query, table = normal(3, 9, 64, seed=2).to(dtype), shuffled(1)
    found = attended(query, kv, table, [Chunk(0, 0, 297, 3)], 1)
    assert_near(found, query, kv, table[0], 297)


def test_prefill_in_parts_repeats_its_bits_and_whole_tiles_equal_tiles_without_splits() -> None:
    kv, tables = normal(BLOCKS, LAYERS, 2, BLOCK, 3, 24), shuffled(4)
    query = normal(16, 9, 24, seed=2)
    chunks = [Chunk(0, 0, 60, 4), Chunk(2, 4, 3, 12)]
    found = attended(query, kv, tables, chunks, 1)
    assert torch.equal(attended(query, kv, tables, chunks, 1), found)
    plain = torch.full_like(query, torch.nan)
    columns = torch.from_numpy(np.ascontiguousarray(tiles_of(tuple(chunks), 10))).to(DEVICE)
    tiles = PrefillTiles(columns[0], columns[1], columns[2], columns[3], tables)
    attend_prefill(query, kv, 1, tiles, TUNING, plain)
    assert torch.equal(attended(query, kv, tables, chunks, 5), plain)
    assert far(found, plain) < 1e-5


def test_layout_with_one_loop_refuses_split_tiles() -> None:
    none = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    split = PrefillSplit(none, none, none, room_of(3, 24))
    query, kv = normal(1, 9, 24), normal(BLOCKS, LAYERS, 2, BLOCK, 3, 24)
    tiles = PrefillTiles(none, none, none, none, shuffled(4), split)
    with pytest.raises(ValueError, match="takes no split tiles"):
        attend_prefill(query, kv, 1, tiles, replace(TUNING, one_loop=True), query)
