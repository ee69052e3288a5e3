"""Tiles of prompt chunks whose KV several programs walk, each a part of it, and the merging of their results.

A short chunk behind a long prefix has few tiles, and each would walk all of the prefix while most of the
device idles. The host says in how many parts each tile's KV is walked (it knows all lengths), as more entries
in the list of tiles. A part leaves its sum, its maximum and its mass, as in decode, and a second kernel
merges the parts of a tile, in their order: the same plan gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 4  # of a tile, merged by one program; divides the rows of every layout
_PARTS = 16  # of a row, merged at a time


@triton.jit
def part_of(
    part: tl.tensor, parts: tl.tensor, tokens: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """From where to where part `part` of `tokens` of KV goes, in whole tiles: the last may end past them."""
    each = ((tokens + TILE - 1) // TILE + parts - 1) // parts * TILE
    return part * each, part * each + each


@triton.jit
def keep_part(
    partial: tl.tensor,
    sums: tl.tensor,
    place: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    ROWS: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    """Leave what a part has found of its rows in PartsRoom, at entry * kv_heads + kv head."""
    m, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    tl.store(partial + (place * ROWS + m)[:, None] * DIM_PAD + d[None, :], acc)
    tl.store(sums + place * (2 * ROWS) + m, top)
    tl.store(sums + place * (2 * ROWS) + ROWS + m, mass)


@triton.jit
def _merge(
    tile_rows: tl.tensor,
    tile_counts: tl.tensor,
    tile_parts: tl.tensor,
    merges: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    head, first_row = tl.program_id(1), tl.program_id(0) * ROWS
    entry = tl.load(merges + tl.program_id(2))
    if entry > 0:
        count = tl.load(tile_counts + entry)
        if first_row < count * GROUP:
            parts = tl.load(tile_parts + entry)
            r, d = first_row + tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
            top = tl.full([ROWS], -float("inf"), tl.float32)
            mass = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
            for done in range(0, parts, PARTS):
                i = done + tl.arange(0, PARTS)
                part = (entry - parts + 1 + i) * KV_HEADS + head
                at_sum = (part * (2 * TILE_ROWS))[:, None] + r[None, :]
                inside = (i < parts)[:, None] & (r < TILE_ROWS)[None, :]
                tops = tl.load(sums + at_sum, mask=inside, other=-float("inf"))
                masses = tl.load(sums + at_sum + TILE_ROWS, mask=inside, other=0.0)
                at = (part[:, None] * TILE_ROWS + r[None, :])[:, :, None] * DIM_PAD + d[None, None, :]
                found = tl.load(partial + at, mask=inside[:, :, None], other=0.0)
                new_top = tl.maximum(top, tl.max(tops, 0))
                shrinks, shrink = tl.exp2(tops - new_top[None, :]), tl.exp2(top - new_top)
                acc = acc * shrink[:, None] + tl.sum(found * shrinks[:, :, None], 0)
                mass = mass * shrink + tl.sum(masses * shrinks, 0)
                top = new_top
            token = r // GROUP
            at_out = (tl.load(tile_rows + entry).to(tl.int64) + token)[:, None] * (KV_HEADS * GROUP * DIM)
            at_out += (head * GROUP + r % GROUP)[:, None] * DIM + d[None, :]
            merged = (acc / mass[:, None]).to(out.dtype.element_ty)
            tl.store(out + at_out, merged, mask=(token < count)[:, None] & (d < DIM)[None, :])


@dataclass(frozen=True, slots=True)
class PartsRoom:
    """Where the parts of a layer's results lie until they are merged. Entry i of the list has place i."""

    partial: Tensor  # [entries, kv_heads, rows, head_dim padded], float32
    sums: Tensor  # [entries, kv_heads, 2, rows], float32: maximum and mass


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """Which part of its tile's KV each entry of a list of tiles walks, `[entries]` int32 each.

    The entries of a tile in parts lie one behind the other, in order. A list with such a tile has at most as
    many entries as there is room for; at most half of them are the last of their tile."""

    part: Tensor
    parts: Tensor  # of the entry's tile; 0: the entry walks all of it and writes the result itself
    merges: Tensor  # the last entry of each tile in parts, then zeros
    room: PartsRoom


def parts_room(entries: int, kv_heads: int, rows: int, dim: int, device: torch.device) -> PartsRoom:
    """Room for so many entries of tiles of `rows` rows (see PrefillTuning) with heads of `dim`."""
    padded = max(16, int(triton.next_power_of_2(dim)))
    partial = torch.zeros(entries, kv_heads, rows, padded, dtype=torch.float32, device=device)
    return PartsRoom(partial, torch.zeros(entries, kv_heads, 2, rows, dtype=torch.float32, device=device))


def merge_parts(rows: Tensor, counts: Tensor, split: PrefillSplit, out: Tensor) -> None:
    """Merge what the entries of tiles in parts have left into `out` `[tokens, heads, head_dim]`. `rows` and
    `counts`: of the entries, as in PrefillTiles."""
    entries, kv_heads, tile_rows, padded = split.room.partial.shape
    _, heads, dim = out.shape
    _merge[(tile_rows // _ROWS, kv_heads, min(len(split.merges), entries // 2))](
        rows, counts, split.parts, split.merges, out, split.room.partial, split.room.sums,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, DIM_PAD=padded, TILE_ROWS=tile_rows, ROWS=_ROWS,
        PARTS=_PARTS, num_warps=4,
    )  # fmt: skip
