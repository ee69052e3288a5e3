"""Paged prefill attention on a GPU, in Triton: a chunk attends causally to the tokens before it and to
itself.

One program computes a tile of a chunk's tokens with all query heads of one KV head. The rows of its matrix
are (token, query head), so that K and V are read once for the group. Chunks of any length and prefix share
one launch. Columns describe the tiles, and a tile without tokens ends at once, so a graph may have more tiles
than a step. A chunk of one token is a decode.

If a step has too few tiles to fill the device (a short chunk after a long prefix), several programs share a
tile's KV. The host, which has all lengths, chooses the number of parts and adds entries to the list of tiles.
A part stores its sum, maximum and mass, as in decode, and a second kernel merges the parts of a tile in
order: the same plan gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode import capped, first_tile, weighed, with_sinks
from kernels.attention.ref import PLAIN, Scoring

_ROWS = 4  # rows of a tile merged by one program; divides the rows of every layout
_PARTS = 16  # parts of a row merged at a time
_LOG2_E = 1.4426950408889634


@triton.jit
def part_of(
    part: tl.tensor, parts: tl.tensor, tokens: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The first token of part `part` of `tokens` of KV and its end, in whole tiles: the last part may end
    later."""
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
    """Store a part's results in PartsRoom, at entry * kv_heads + kv head."""
    m, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    tl.store(partial + (place * ROWS + m)[:, None] * DIM_PAD + d[None, :], acc)
    tl.store(sums + place * (2 * ROWS) + m, top)
    tl.store(sums + place * (2 * ROWS) + ROWS + m, mass)


@triton.jit(do_not_specialize=["table_blocks", "layer"])
def _attend(
    query: tl.tensor,
    kv: tl.tensor,
    tables: tl.tensor,
    tile_slots: tl.tensor,
    tile_rows: tl.tensor,
    tile_starts: tl.tensor,
    tile_counts: tl.tensor,
    tile_part: tl.tensor | None,
    tile_parts: tl.tensor | None,
    partial: tl.tensor | None,
    sums: tl.tensor | None,
    out: tl.tensor,
    table_blocks: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor | None,
    sinks: tl.tensor | None,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    tile, head = tl.program_id(1), tl.program_id(0)
    count = tl.load(tile_counts + tile)
    if count > 0:
        start = tl.load(tile_starts + tile)
        first_row = tl.load(tile_rows + tile).to(tl.int64)
        table = tables + tl.load(tile_slots + tile).to(tl.int64) * table_blocks
        m, d, n = tl.arange(0, ROWS), tl.arange(0, DIM_PAD), tl.arange(0, TILE)
        token = m // GROUP
        in_query = (token < count)[:, None] & (d < DIM)[None, :]
        at_query = (first_row + token)[:, None] * (KV_HEADS * GROUP * DIM)
        at_query += (head * GROUP + m % GROUP)[:, None] * DIM + d[None, :]
        q = tl.load(query + at_query, mask=in_query, other=0.0)
        token_stride: tl.constexpr = KV_HEADS * DIM
        keys = kv + layer * (2 * BLOCK_TOKENS * token_stride) + head * DIM + d[None, :]
        values = keys + BLOCK_TOKENS * token_stride
        top = tl.full([ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        whole = (start + 1) // TILE * TILE  # tokens that every query of the tile sees
        begin, end = first_tile(start + 1, WINDOW, TILE) * TILE, start + count
        if SPLIT:
            part, parts = tl.load(tile_part + tile), tl.maximum(tl.load(tile_parts + tile), 1)
            first, stop = part_of(part, parts, end - begin, TILE)
            begin, stop = begin + first, begin + stop
            whole, end = tl.maximum(begin, tl.minimum(whole, stop)), tl.minimum(end, stop)
        if ONE_LOOP or WINDOW > 0:
            whole = begin
        else:
            for at_first in tl.range(begin, whole, TILE, num_stages=STAGES):
                at = at_first + n
                block = tl.load(table + at // BLOCK_TOKENS).to(tl.int64)
                place = (block * block_stride + (at % BLOCK_TOKENS) * token_stride)[:, None]
                if DIM == DIM_PAD:
                    k = tl.load(keys + place)
                    v = tl.load(values + place)
                else:
                    k = tl.load(keys + place, mask=(d < DIM)[None, :], other=0.0)
                    v = tl.load(values + place, mask=(d < DIM)[None, :], other=0.0)
                scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
                scores = capped(scores, cap)
                weights, shrink, top, mass = weighed(scores, top, mass)
                acc = acc * shrink[:, None]
                acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        for at_first in tl.range(whole, end, TILE, num_stages=TAIL_STAGES):
            at = at_first + n
            inside = at < end
            block = tl.load(table + at // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
            place = (block * block_stride + (at % BLOCK_TOKENS) * token_stride)[:, None]
            readable = inside[:, None] & (d < DIM)[None, :]
            k = tl.load(keys + place, mask=readable, other=0.0)
            v = tl.load(values + place, mask=readable, other=0.0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
            scores = capped(scores, cap)
            seen = at[None, :] <= (start + token)[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > (start + token - WINDOW)[:, None])
            scores = tl.where(seen & inside[None, :], scores, -1.0e30)  # finite: a row may see none of a tile
            weights, shrink, top, mass = weighed(scores, top, mass)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        if SPLIT:
            if parts > 1:
                keep_part(partial, sums, tile * KV_HEADS + head, acc, top, mass, ROWS, DIM_PAD)
            in_query = in_query & (parts == 1)
        mass = with_sinks(mass, top, sinks, head * GROUP + m % GROUP, token < count)
        done = (acc / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + at_query, done, mask=in_query)


@triton.jit
def _merge(
    tile_rows: tl.tensor,
    tile_counts: tl.tensor,
    tile_parts: tl.tensor,
    merges: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor | None,
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
            mass = with_sinks(mass, top, sinks, head * GROUP + r % GROUP, r >= 0)
            token = r // GROUP
            at_out = (tl.load(tile_rows + entry).to(tl.int64) + token)[:, None] * (KV_HEADS * GROUP * DIM)
            at_out += (head * GROUP + r % GROUP)[:, None] * DIM + d[None, :]
            merged = (acc / mass[:, None]).to(out.dtype.element_ty)
            tl.store(out + at_out, merged, mask=(token < count)[:, None] & (d < DIM)[None, :])


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """The layout of the kernel on a device. `rows`: of a program, tokens times query heads of a KV head.

    `one_loop`: all tiles of KV go through one loop, with a mask. Then the bits of a query's result do not
    depend on its chunk: its tiles from position 0 on are the same, the same instructions compute each, and
    masked tokens have a weight of exactly zero (`exp2(-1e30 - top)`) and a `shrink` of exactly one. Two loops
    may round `dot * scale - top` differently. Such a layout has no split tiles: the cuts of a sum would
    depend on the rest of the step.

    `per_sm`: programs that one multiprocessor holds at once, for the host's plan of the splits.

    `tma`: the kernel of kernels.attention.hopper, which has its own number of warps."""

    rows: int = 64
    tile_tokens: int = 64
    stages: int = 3
    warps: int = 4
    one_loop: bool = False
    per_sm: int = 2
    tma: bool = False


GLUON_RELEASES = ("3.6", "3.7")  # of Triton: another one may not have what the kernel imports
GLUON = {
    "attend": "kernels.attention.hopper:attend",
}
_resolved = cache(resolve_name)


def why_not_tma(head_dim: int, block_tokens: int) -> str:
    """Why kernels.attention.hopper cannot take heads and blocks of these sizes, or this release of Triton
    does not compile it (Gluon is experimental, and names in it change); empty if it can."""
    if not GLUON:
        return "it is not in this installation"
    if ".".join(triton.__version__.split(".")[:2]) not in GLUON_RELEASES:
        return (
            f"it is written for Triton {' and '.join(GLUON_RELEASES)}, and {triton.__version__} is installed"
        )
    if head_dim not in (64, 128):
        return f"it takes heads of 64 or 128, and the model's are {head_dim} wide"
    if block_tokens not in (8, 16, 32, 64, 128):
        return f"it takes blocks of 8, 16, 32, 64 or 128 tokens, and --block-tokens is {block_tokens}"
    return ""


@dataclass(frozen=True, slots=True)
class PartsRoom:
    """Memory for the parts of a layer's results before the merge. Entry i of the list uses index i."""

    partial: Tensor  # [entries, kv_heads, rows, head_dim padded], float32
    sums: Tensor  # [entries, kv_heads, 2, rows], float32: maximum and mass


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """The part of its tile's KV that each entry of a list of tiles reads, `[entries]` int32 each.

    The entries of a split tile are consecutive, in the order of the parts. A list with a split tile has at
    most as many entries as `room`, and at most half of them are the last of their tile."""

    part: Tensor
    parts: Tensor  # of the entry's tile; 0: the entry reads all KV and writes the result itself
    merges: Tensor  # the last entry of each split tile, then zeros
    room: PartsRoom


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tiles of chunks, `[tiles]` int32 each; `tables` `[slots, blocks]` int32. A tile has at most
    `tile_queries` tokens. With `split` a tile may have several entries; None: each has one."""

    slots: Tensor
    rows: Tensor  # the token row of its first token
    starts: Tensor  # the position of its first token
    counts: Tensor  # 0: no tile
    tables: Tensor
    split: PrefillSplit | None = None


def tile_queries(heads: int, kv_heads: int, tuning: PrefillTuning) -> int:
    """Tokens in a tile of queries."""
    return tuning.rows // (heads // kv_heads)


def parts_room(entries: int, kv_heads: int, rows: int, dim: int, device: torch.device) -> PartsRoom:
    """Memory for so many entries of tiles of `rows` rows (see PrefillTuning) with heads of `dim`."""
    padded = max(16, int(triton.next_power_of_2(dim)))
    partial = torch.zeros(entries, kv_heads, rows, padded, dtype=torch.float32, device=device)
    return PartsRoom(partial, torch.zeros(entries, kv_heads, 2, rows, dtype=torch.float32, device=device))


def attend_prefill(
    query: Tensor,
    kv: Tensor,
    layer: int,
    tiles: PrefillTiles,
    tuning: PrefillTuning,
    out: Tensor,
    by: Scoring = PLAIN,
) -> None:
    """Attention of the tokens of `tiles` with their queries `[tokens, heads, head_dim]` into `out`, of the
    same shape; other rows of `out` stay unchanged. KV of the chunks must be in the cache already. Raises
    ValueError for `split` with a layout of one loop, and for a Scoring with `tma`."""
    _, heads, dim = query.shape
    kv_heads, block_tokens = kv.shape[4], kv.shape[3]
    split = tiles.split
    if split is not None and tuning.one_loop:
        raise ValueError("a layout of one loop takes no split tiles: its bits depend on the query alone")
    parts: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None)
    if split is not None:
        parts = (split.part, split.parts, split.room.partial, split.room.sums)
    if tuning.tma and by is not PLAIN:
        raise ValueError("the kernel for Hopper knows no windows, caps or sinks")
    columns = (tiles.tables, tiles.slots, tiles.rows, tiles.starts, tiles.counts)
    if tuning.tma:
        attend = _resolved(GLUON["attend"])
        attend(query, kv, layer, columns, parts, out, tuning.tile_tokens, tuning.stages)
    else:
        _attend[(kv_heads, len(tiles.counts))](
            query, kv, *columns, *parts, out,
            tiles.tables.shape[1], layer, kv.stride(0), (by.scale or dim**-0.5) * _LOG2_E,
            by.cap * _LOG2_E if by.cap else None, by.sinks,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
            BLOCK_TOKENS=block_tokens, ROWS=tuning.rows, TILE=tuning.tile_tokens, STAGES=tuning.stages,
            TAIL_STAGES=tuning.stages if tuning.one_loop or by.window else 1, ONE_LOOP=tuning.one_loop,
            WINDOW=by.window, SPLIT=split is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=tuning.warps,
        )  # fmt: skip
    if split is not None:
        merge_parts(tiles.rows, tiles.counts, split, out, by.sinks)


def merge_parts(
    rows: Tensor, counts: Tensor, split: PrefillSplit, out: Tensor, sinks: Tensor | None = None
) -> None:
    """Merge the parts of split tiles into `out` `[tokens, heads, head_dim]`. `rows` and `counts` of the
    entries as in PrefillTiles."""
    entries, kv_heads, tile_rows, padded = split.room.partial.shape
    _, heads, dim = out.shape
    _merge[(tile_rows // _ROWS, kv_heads, min(len(split.merges), entries // 2))](
        rows, counts, split.parts, split.merges, out, split.room.partial, split.room.sums,
        sinks, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, DIM_PAD=padded,
        TILE_ROWS=tile_rows, ROWS=_ROWS, PARTS=_PARTS, num_warps=4,
    )  # fmt: skip
