"""Attention with windows, caps, sinks and scales on a GPU, in parts and whole, against torch in float64.

Runs on a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.executor.gpu_side import (
    BLOCK,
    BLOCKS,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    far,
    normal,
    shuffled,
    words,
)

from kernels.attention import ref
from kernels.attention.decode import DecodeRows, Tuning, attend_decode, decode_work, plan_decode, windowed
from kernels.attention.prefill import (
    PrefillSplit,
    PrefillTiles,
    PrefillTuning,
    attend_prefill,
    parts_room,
    tile_queries,
)
from kernels.attention.ref import Scoring
from services.executor.cuda.input_batch import in_parts, tiles_of
from services.executor.parallel.step_split import Chunk

CLOSE = 1e-5
SINKS = torch.linspace(-2.0, 3.0, HEADS, device=DEVICE)
SCORINGS = {
    "window": Scoring(window=37),
    "window below a tile": Scoring(window=5),
    "cap": Scoring(cap=1.5, scale=0.5),
    "sinks": Scoring(sinks=SINKS),
    "all": Scoring(window=33, cap=2.0, scale=0.4, sinks=SINKS),
}


def seen(starts: torch.Tensor, end: int) -> torch.Tensor:
    """The mask of queries at `starts` without windows: `[queries, end]`."""
    later = torch.arange(end, device=DEVICE) > starts[:, None]
    return torch.zeros(later.shape, dtype=torch.float64, device=DEVICE).masked_fill_(later, -torch.inf)


def wide(by: Scoring) -> Scoring:
    return replace(by, sinks=None if by.sinks is None else by.sinks.double())


@pytest.mark.parametrize(
    ("name", "processors", "queries"),
    [
        ("window", 1, 1),
        ("window below a tile", 9, 4),
        ("cap", 1, 1),
        ("sinks", 9, 1),
        ("all", 9, 1),
        ("all", 1, 4),
    ],
)
def test_scored_decode_rows_of_any_length(name: str, processors: int, queries: int) -> None:
    """One worker for all, and more than there are rows: a row is then merged from several."""
    by, kv = SCORINGS[name], normal(BLOCKS, 2, 2, BLOCK, KV_HEADS, DIM)
    lengths, of_slots, tables = [1, 38, 77, 20], [2, 0, 1, 3], shuffled(4)
    query = normal(len(lengths) * queries, HEADS, DIM, seed=2)
    tuning = Tuning(tile_tokens=16, per_sm=1)
    work = windowed(decode_work(kv, HEADS, 8, processors, tuning, queries))
    slots = words(*(slot for slot in of_slots for _ in range(queries)))
    ids = None if queries == 1 else words(*[5] * (queries * len(lengths)))
    rows = DecodeRows(slots, words(*lengths), tables, queries, ids)
    out = torch.full_like(query, torch.nan)
    plan_decode(work, rows, by.window)
    attend_decode(query, kv, 1, rows, work, out, by)
    for row, (length, slot) in enumerate(zip(lengths, of_slots, strict=True)):
        for nth in range(queries):
            end, at = length + nth, row * queries + nth
            table, mask = tables[slot, : -(-end // BLOCK)].long()[None], seen(words(end - 1), end)
            one = query[at : at + 1].double()
            wanted = ref.attend_decode(one, kv.double(), 1, table, mask[None, None], wide(by))
            assert far(out[at], wanted[0]) < CLOSE


@pytest.mark.parametrize(
    ("name", "longest", "one_loop"),
    [
        ("window", 2, False), ("window below a tile", 1, False), ("cap", 0, False), ("sinks", 2, False),
        ("all", 0, True), ("all", 2, False),
    ],
)  # fmt: skip
def test_scored_chunks_whole_and_in_parts(name: str, longest: int, one_loop: bool) -> None:
    """`longest`: tiles of KV that a program reads; 0: all."""
    by, kv, tables = SCORINGS[name], normal(BLOCKS, 2, 2, BLOCK, KV_HEADS, DIM), shuffled(4)
    tuning = PrefillTuning(32, 16, 1, 4, one_loop=one_loop)
    chunks = (Chunk(0, 0, 0, 13), Chunk(2, 13, 30, 44), Chunk(1, 57, 60, 4))
    tiles = tiles_of(chunks, tile_queries(HEADS, KV_HEADS, tuning))
    query, split = normal(61, HEADS, DIM, seed=2), None
    if longest:
        tiles = in_parts(tiles, (-(-(tiles[2] + tiles[3]) // tuning.tile_tokens)).tolist(), longest)
    columns = torch.from_numpy(np.ascontiguousarray(tiles)).to(DEVICE)
    if longest:
        room = parts_room(columns.shape[1], KV_HEADS, tuning.rows, DIM, torch.device(DEVICE))
        room.partial.fill_(torch.nan)
        split = PrefillSplit(columns[4], columns[5], columns[6], room)
    out = torch.full_like(query, torch.nan)
    attend_prefill(query, kv, 1, PrefillTiles(*columns[:4], tables, split), tuning, out, by)
    for chunk in chunks:
        end = chunk.start + chunk.count
        rows = slice(chunk.first, chunk.first + chunk.count)
        table = tables[chunk.slot, : -(-end // BLOCK)].long()
        mask = seen(torch.arange(chunk.start, end, device=DEVICE), end)
        wanted = ref.attend_prefill(query[rows].double(), kv.double(), 1, table, mask, wide(by))
        assert far(out[rows], wanted) < CLOSE
