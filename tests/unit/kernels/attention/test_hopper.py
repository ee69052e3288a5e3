"""The kernel that fetches KV by TMA against the torch reference in float64: odd lengths, several sequences,
cuts of KV, old contents that are NaN.

On an H100 or H200 in bf16: pytest of this file. Elsewhere its code runs in threads, see
support.executor.gluon_threads, and is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.executor.gluon_threads import run_in_threads

from kernels.attention import FP8, as_stored, ref
from kernels.attention.prefill import (
    PrefillSplit,
    PrefillTiles,
    PrefillTuning,
    attend_prefill,
    parts_room,
    tile_queries,
)
from services.executor.cuda.input_batch import SPLIT_COLUMNS, in_parts, tiles_of
from services.executor.parallel.step_split import Chunk

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE, DTYPE, CLOSE = ("cuda", torch.bfloat16, 1e-2) if HERE else ("cpu", torch.float32, 1e-5)
TESTS = Path(__file__).parents[3]
BLOCK, BLOCKS, LAYERS, DIM = 16, 160, 2, 64
TUNING = PrefillTuning(128, 128, 2, tma=True)
LONGEST = 99

# Position and count of the chunk of each sequence; the longest part, in tiles of 128 tokens of KV.
CASES = {
    "a token": ([(0, 1)], LONGEST),
    "a prompt that ends inside a block": ([(0, 77)], LONGEST),
    "a prefix of one block": ([(16, 33)], LONGEST),
    "a prefix of whole tiles": ([(256, 128)], LONGEST),
    "a tile of queries across a border of KV": ([(120, 20)], LONGEST),
    "several sequences": ([(300, 40), (0, 130), (127, 1), (5, 3)], LONGEST),
    "KV in parts, beside a whole tile": ([(500, 20), (60, 40), (250, 10)], 2),
    "parts of one tile of KV": ([(380, 37), (513, 5)], 1),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HERE:
        run_in_threads(monkeypatch)


def attended(
    heads: int, kv_heads: int, dim: int, asked: list[tuple[int, int]], each: int, kept: torch.dtype
) -> float:
    """The largest error of a case over KV in dtype `kept`, relative to the largest result."""
    draw = torch.Generator().manual_seed(heads)
    kv = torch.randn(BLOCKS, LAYERS, 2, BLOCK, kv_heads, dim, generator=draw).to(DTYPE).to(DEVICE)
    order = torch.randperm(BLOCKS, generator=draw).int().to(DEVICE)
    tables = order.view(4, -1)[: len(asked)].contiguous()
    chunks, first = [], 1
    for slot, (start, count) in enumerate(asked):
        chunks.append(Chunk(slot, first, start, count))
        first += count
    query = torch.randn(first + 2, heads, dim, generator=draw).to(DTYPE).to(DEVICE)
    kv = as_stored(kv, kept).to(DTYPE)
    held = kv.double()
    for chunk in chunks:
        used, inside = divmod(chunk.start + chunk.count, BLOCK)
        table = tables[chunk.slot].long()
        kv[table[used], :, :, inside:] = torch.nan
        kv[table[used + 1 :]] = torch.nan
    kv = kv.to(kept)
    tiles = tiles_of(tuple(chunks), tile_queries(heads, kv_heads, TUNING))
    lengths = (-(-(tiles[2] + tiles[3]) // TUNING.tile_tokens)).tolist()
    if each < LONGEST:
        tiles = in_parts(tiles, lengths, each)
    spare = np.zeros((len(tiles), 4 + -tiles.shape[1] % 4), dtype=np.int32)
    columns = torch.from_numpy(np.concatenate((tiles, spare), 1)).to(DEVICE)
    split = None
    if len(tiles) == SPLIT_COLUMNS:
        room = parts_room(columns.shape[1], kv_heads, TUNING.rows, dim, torch.device(DEVICE))
        split = PrefillSplit(columns[4], columns[5], columns[6], room)
    out = torch.full_like(query, torch.nan)
    attend_prefill(query, kv, 1, PrefillTiles(*columns[:4], tables, split), TUNING, out)
    worst = 0.0
    for chunk in chunks:
        end = chunk.start + chunk.count
        later = torch.arange(end)[None] > torch.arange(chunk.start, end)[:, None]
        mask = torch.zeros(chunk.count, end, dtype=torch.float64).masked_fill_(later, -torch.inf).to(DEVICE)
        rows = slice(chunk.first, chunk.first + chunk.count)
        table = tables[chunk.slot][: -(-end // BLOCK)].long()
        wanted = ref.attend_prefill(query[rows].double(), held, 1, table, mask)
        worst = max(worst, ((out[rows].double() - wanted).abs().max() / wanted.abs().max()).item())
        assert not out[rows].isnan().any()
    assert out[0].isnan().all()  # rows of no chunk are left alone
    assert out[first:].isnan().all()
    return worst


over = pytest.mark.parametrize("kept", [DTYPE, FP8], ids=str)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("case", "kept"),
    [*((case, DTYPE) for case in CASES), *((case, FP8) for case in list(CASES)[-3:])],
    ids=str,
)
def test_chunks_see_what_the_reference_sees(case: str, kept: torch.dtype) -> None:
    assert attended(8, 2, DIM, *CASES[case], kept) < CLOSE


@pytest.mark.usefixtures("threads")
@over
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 128), (8, 1, 128)], ids=str)
def test_any_group_of_query_heads(shape: tuple[int, int, int], kept: torch.dtype) -> None:
    assert attended(*shape, [(130, 50), (40, 9)], LONGEST, kept) < CLOSE


def test_a_program_fits_a_multiprocessor() -> None:
    """The layouts of an H100 compile, on any machine."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "support.executor.compiled_hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=TESTS)
    assert done.returncode == 0, done.stderr[-2000:]
    for kept, spilled in (("bf16", 16), ("fp8e4nv", 112)):
        made = json.loads(done.stdout)[kept]
        assert made["shared"] <= 227 << 10
        assert made["warps"] == 12
        assert made["spilled_bytes"] <= spilled
