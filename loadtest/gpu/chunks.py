"""Measures attention of prompt chunks alone: whole tiles, tiles in parts, layouts for long chunks, errors.

Launches of a graph go through the layers, so that KV comes from memory as between the layers of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from kernels.attention import ref
from kernels.attention.prefill import (
    PrefillSplit,
    PrefillTiles,
    PrefillTuning,
    attend_prefill,
    parts_room,
    tile_queries,
)
from loadtest.gpu.timing import graph_us
from services.executor.cuda.input_batch import (
    SPLIT_COLUMNS,
    SplitRoom,
    Words,
    in_parts,
    split_room,
    split_tiles,
    tiles_of,
)
from services.executor.parallel.step_split import Chunk

HEADS, KV_HEADS, DIM, BLOCK_TOKENS, LAYERS, LAUNCHES = 32, 8, 128, 16, 8, 16
CASES = {  # (tokens, prefix) of each chunk
    "16 @ 4600": [(16, 4600)], "64 @ 4600": [(64, 4600)], "300 @ 3400": [(300, 3400)],
    "320 @ 1024": [(320, 1024)], "1000 @ 2400": [(1000, 2400)], "1000 @ 0": [(1000, 0)],
    "8 x 64 @ 3000": [(64, 3000)] * 8,
}  # fmt: skip
LONG = ("300 @ 3400", "320 @ 1024", "1000 @ 2400", "1000 @ 0", "8 x 64 @ 3000")
LONG_CASES = {
    f"{tokens} @ {prefix}": (tokens, prefix)
    for tokens in (64, 1024, 2048)
    for prefix in (0, 8_192, 32_768, 98_304)
}
# KV behind a block table: stages 2 to 4 hold as many tiles in flight, 5 and 6 one more.
TMA = PrefillTuning(128, 128, 2, per_sm=1, tma=True)
WITHOUT_TMA = PrefillTuning(128, 64, 5, 8, per_sm=1)
SPLIT_LAYOUTS = (PrefillTuning(64, 64, 3, 4), PrefillTuning(64, 64, 5, 4), TMA)
LAYOUTS = (
    *SPLIT_LAYOUTS, PrefillTuning(64, 32, 7, 4), PrefillTuning(128, 64, 3, 8), PrefillTuning(128, 64, 5, 8),
    PrefillTuning(128, 128, 3, 8),
)  # fmt: skip
_TRIED_PARTS = (2, 3, 4, 8, 12, 16, 24, 33)  # beside what the host would choose
_ROOM = 132  # entries, for these: twice what serving has


@dataclass(frozen=True, slots=True)
class Case:
    """Chunks over a cache, with the result in float64 where it fits."""

    name: str
    chunks: tuple[Chunk, ...]
    query: torch.Tensor
    tables: torch.Tensor
    wanted: torch.Tensor | None
    tflop: float


@torch.inference_mode()
def chunks() -> list[dict[str, Any]]:
    """Times in µs of a layer's attention by case, layout and number of parts, merging included."""
    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    kv = torch.randn(
        1600, LAYERS, 2, BLOCK_TOKENS, KV_HEADS, DIM, dtype=torch.bfloat16, device=device
    )  # more than the second-level cache holds in a few layers
    found = []
    for name in CASES:
        case = _case(name, kv)
        for tuning in LAYOUTS if name in LONG else SPLIT_LAYOUTS:
            plain = tiles_of(case.chunks, tile_queries(HEADS, KV_HEADS, tuning))
            room = split_room(tuning, KV_HEADS, processors)
            chosen = split_tiles(plain, room)
            found.append(_row(case, kv, tuning, plain, "whole"))
            if tuning not in SPLIT_LAYOUTS:
                continue
            if len(chosen) == SPLIT_COLUMNS:
                found.append(_row(case, kv, tuning, chosen, "chosen"))
            found += [_row(case, kv, tuning, tiles, "tried") for tiles in _tried(plain, room)]
        best = min((row for row in found if row["case"] == name), key=lambda row: row.get("us", np.inf))
        print("chunks, best:", {key: best[key] for key in ("case", "plan", "layout", "us")}, flush=True)
    return found


@torch.inference_mode()
def long_chunks(kept: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """Times of a chunk after a long prefix over KV in dtype `kept`, with the kernel that fetches it by TMA
    and without. Blocks are those of an 8B model: in bf16 a layer has 64 KiB of 2 MiB."""
    device = torch.device("cuda")
    kv = torch.empty(6400, 32, 2, BLOCK_TOKENS, KV_HEADS, DIM, dtype=kept, device=device)
    for blocks in kv.split(256):
        blocks.copy_(torch.randn(blocks.shape, device=device))
    room = {tuning: split_room(tuning, KV_HEADS, 132) for tuning in (WITHOUT_TMA, TMA)}
    found = []
    for name, (count, start) in LONG_CASES.items():
        query = torch.randn(count, HEADS, DIM, dtype=torch.bfloat16, device=device)
        table = torch.randperm(len(kv), device=device).int()[None]
        pairs = count * start + count * (count + 1) // 2
        case = Case(name, (Chunk(0, 0, start, count),), query, table, None, 4e-12 * HEADS * DIM * pairs)
        for tuning in (WITHOUT_TMA, TMA):
            plain = tiles_of(case.chunks, tile_queries(HEADS, KV_HEADS, tuning))
            found.append(_row(case, kv, tuning, split_tiles(plain, room[tuning]), "chosen"))
    return found


def _case(name: str, kv: torch.Tensor) -> Case:
    asked, device = CASES[name], kv.device
    order, rows = torch.randperm(len(kv), device=device).int(), sum(count for count, _ in asked)
    query = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device=device)
    each = max(-(-(count + start) // BLOCK_TOKENS) for count, start in asked)
    tables = order[: len(asked) * each].view(len(asked), each).contiguous()
    made, wanted, first, pairs = [], [], 0, 0
    for slot, (count, start) in enumerate(asked):
        at = torch.arange(start + count, device=device)
        later = at[None] > at[start:, None]
        mask = torch.zeros(later.shape, dtype=torch.float64, device=device).masked_fill_(later, -torch.inf)
        own = kv[:, 1:2][tables[slot].long()].double()
        blocks = torch.arange(each, device=device)
        wanted.append(ref.attend_prefill(query[first : first + count].double(), own, 0, blocks, mask))
        made.append(Chunk(slot, first, start, count))
        first, pairs = first + count, pairs + count * start + count * (count + 1) // 2
    return Case(name, tuple(made), query, tables, torch.cat(wanted), 4e-12 * HEADS * DIM * pairs)


def _tried(plain: Words, room: SplitRoom) -> list[Words]:
    lengths = (-(-(plain[2] + plain[3]) // room.tile_tokens)).tolist()
    sizes = {-(-max(lengths) // parts) for parts in _TRIED_PARTS}
    made = [in_parts(plain, lengths, size) for size in sorted(sizes) if 1 < size < max(lengths)]
    return [tiles for tiles in made if tiles.shape[1] <= _ROOM]


def _row(case: Case, kv: torch.Tensor, tuning: PrefillTuning, tiles: Words, plan: str) -> dict[str, Any]:
    columns = torch.zeros(len(tiles), -(-tiles.shape[1] // 4) * 4, dtype=torch.int32)
    columns[:, : tiles.shape[1]] = torch.from_numpy(np.ascontiguousarray(tiles))
    c = columns.to(kv.device)
    split = None
    if len(tiles) == SPLIT_COLUMNS:
        split = PrefillSplit(c[4], c[5], c[6], parts_room(_ROOM, KV_HEADS, tuning.rows, DIM, kv.device))
    named = PrefillTiles(c[0], c[1], c[2], c[3], case.tables, split)
    out = torch.full_like(case.query, torch.nan)
    row: dict[str, Any] = {
        "case": case.name, "plan": plan, "entries": tiles.shape[1],
        "parts": int(max(tiles[5].max(), 1)) if split else 1,
        "layout": f"{tuning.rows} x {tuning.tile_tokens}, {tuning.stages} stages, "
        + ("TMA" if tuning.tma else f"{tuning.warps} warps"),
    }  # fmt: skip
    try:
        attend_prefill(case.query, kv, 1, named, tuning, out)
        if case.wanted is not None:
            row["error"] = ((out.double() - case.wanted).norm() / case.wanted.norm()).item()
        layers = kv.shape[1]
        us = graph_us(lambda i: attend_prefill(case.query, kv, i % layers, named, tuning, out), LAUNCHES)
        row |= {"us": us, "tflop_s": 1e6 * case.tflop / us}
    except OutOfResources as error:
        row["refused"] = str(error)
    print("chunks", {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row
