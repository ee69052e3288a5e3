"""Paged decode attention on a GPU, in Triton: one query token a row over its whole context.

The tiles of all rows form one sequence, and each of a fixed number of workers takes an equal run of it:

    row 0 ████████████ | row 1 ████ | row 2 ██████████████████ | ...
    worker 0 └──────┘ worker 1 └──────┘ worker 2 └──────┘ ...

So the grid does not depend on the lengths (a CUDA graph holds it), and all workers have equal work. If one
worker has a whole row, it writes the result; the parts of other rows are merged by a second kernel, with a
program for each border between workers. A worker is one program for each KV head, next to each other in the
grid, so that the heads of a token are read at about the same time. The query heads that share a KV head are
the rows of one matrix product; a row with drafts has several tokens, whose heads are rows there, too. Equal
runs of tiles: "Stream-K" (arXiv:2301.03598).

KV in fp8 is read in units of 16 bits, pairs of neighbouring dims, so that all tiles in shared memory have the
width that the loads of matrix operands transpose. Registers hold the two numbers of a pair in two float16
tiles, `even` and `odd`, and there is one matrix product for each:

    scores = q_even @ even.T + q_odd @ odd.T        out = interleave(weights @ even, weights @ odd)

With a window a row begins at the tile of the first token that its first query sees; sinks are added to a
row's mass once, where its result is written. (kernels.attention.ref.Scoring)

e4m3 in float16 is exact. Queries are scaled by a power of two for each head, so that float16 holds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.ref import FP8, PLAIN, Scoring
from kernels.gemm.gpu import begin, prefetch, ready

TILE_TOKENS = 64
_LOG2_E = 1.4426950408889634
_PARTS = 16  # parts of a row merged at a time
_LEAST_TOKENS, _LEAST_TILES = 128, 2  # of a worker, whichever is less: merges of smaller parts cost more
_LEAST_DIM = 32  # half of it is the least of a matrix product
_ROW_LIMIT = 1024  # of a step: one program plans it


@triton.jit
def first_tile(sees: tl.tensor, WINDOW: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The first tile with a token that a query sees, `sees` being its tokens without a window."""
    return tl.maximum(sees - WINDOW, 0) // TILE if WINDOW > 0 else sees * 0


@triton.jit
def capped(scores: tl.tensor, cap: tl.tensor | None) -> tl.tensor:
    """cap * tanh(score / cap)."""
    if cap is not None:
        scores = cap - 2 * cap / (tl.exp2(scores * (2.8853900817779268 / cap)) + 1)
    return scores


@triton.jit
def with_sinks(
    mass: tl.tensor, top: tl.tensor, sinks: tl.tensor | None, head: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """The sum of weights over 2^top with what the sinks of the query heads `head` weigh."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=0.0) * 1.4426950408889634
        mass += tl.exp2(sink - top)
    return mass


@triton.jit
def weighed(
    scores: tl.tensor, top: tl.tensor, mass: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The weights of scores, what the sums before shrink by, and the largest score and the mass so far."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weights, shrink, new_top, mass * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["rows"])
def _plan(
    lengths: tl.tensor,
    drafts: tl.tensor | None,
    spans: tl.tensor | None,
    ends: tl.tensor,
    first_rows: tl.tensor,
    rows: tl.tensor,
    WORKERS: tl.constexpr,
    WORKERS_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    at = tl.arange(0, ROWS_PAD)
    length = tl.load(lengths + at, mask=at < rows, other=0)
    skipped = first_tile(length, WINDOW, TILE)
    if QUERIES > 1:
        q = tl.arange(0, QUERIES)
        is_draft = (at < rows)[:, None] & (q > 0)[None, :]
        ids = tl.load(drafts + at[:, None] * QUERIES + q[None, :], mask=is_draft, other=-1)
        length = tl.where(length > 0, length + tl.sum((ids >= 0).to(tl.int32), 1), 0)
        tl.store(spans + at, length, mask=at < rows)
    end = tl.cumsum((length + TILE - 1) // TILE - skipped, 0)
    tl.store(ends + at, end, mask=at < rows)
    each = tl.maximum((tl.max(end, 0) + WORKERS - 1) // WORKERS, LEAST)
    for i in range(0, WORKERS_PAD, 16):
        worker = i + tl.arange(0, 16)
        first = tl.sum((end[None, :] <= (worker * each)[:, None]).to(tl.int32), 1)  # rows that end before it
        tl.store(first_rows + worker, first, mask=worker < WORKERS_PAD)


@triton.jit
def _widen(pairs: tl.tensor, dtype: tl.constexpr, INTERPRETED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The first and the second number of pairs of e4m3, exactly; NaN stays NaN."""
    if INTERPRETED:  # there is no assembly. Moved to float16's places, the bits are the number * 2^-8
        even = (((pairs << 8) & 0x8000) | ((pairs << 7) & 0x3F80)).to(tl.float16, bitcast=True)
        odd = ((pairs & 0x8000) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
        even = tl.where((pairs & 0x7F) == 0x7F, float("nan"), even.to(tl.float32) * 256)
        odd = tl.where((pairs & 0x7F00) == 0x7F00, float("nan"), odd.to(tl.float32) * 256)
    else:  # three instructions for four numbers
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 evens, odds;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {evens, odds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, evens;
            cvt.rn.f16x2.e4m3x2 $1, odds;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _queries(
    at: tl.tensor, inside: tl.tensor, scale: tl.tensor, PAIRED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The rows at pointers `at` and the scale of their scores. If PAIRED the even and the odd dims, `at` has
    the even: in float16 over a power of two of each row, so that all are below 2."""
    even = tl.load(at, mask=inside, other=0.0)
    odd, scales = even, tl.full([even.shape[0]], scale, tl.float32)
    if PAIRED:
        odd = tl.load(at + 1, mask=inside, other=0.0)
        if even.dtype != tl.float32:
            even, odd = even.to(tl.float32), odd.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
            exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
            down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
            even, odd = (even * down).to(tl.float16), (odd * down).to(tl.float16)
            scales *= (exponent << 23).to(tl.float32, bitcast=True)
    return even, odd, scales


@triton.jit
def _scores(
    q: tl.tensor,
    q_odd: tl.tensor,
    k: tl.tensor,
    PRECISION: tl.constexpr,
    PAIRED: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    if PAIRED:
        even, odd = _widen(k, q.dtype, INTERPRETED)
        scores = tl.dot(q, tl.trans(even), input_precision=PRECISION)
        scores = tl.dot(q_odd, tl.trans(odd), scores, input_precision=PRECISION)
    else:
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    return scores


@triton.jit
def _sees(first: tl.tensor, query: tl.tensor, QUERIES: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """The number of tokens that each query sees without a window, where that is asked."""
    if QUERIES > 1 or WINDOW > 0:
        query += tl.load(first)
    return query


@triton.jit
def _masked(
    scores: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    sees: tl.tensor,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Scores without the tokens that a query does not see. With several queries, or a window, one may see
    none of a tile: its scores are finite then."""
    seen = inside[None, :]
    if QUERIES > 1:
        seen = seen & (at[None, :] < sees[:, None])
    if WINDOW > 0:
        seen = seen & (at[None, :] >= sees[:, None] - WINDOW)
    return tl.where(seen, scores, -float("inf") if QUERIES == 1 and WINDOW == 0 else -1.0e30)


@triton.jit
def _keep_part(
    partial: tl.tensor,
    sums: tl.tensor,
    part: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    in_out: tl.tensor,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    tl.store(partial + part * (GROUP_PAD * DIM_PAD) + g[:, None] * DIM_PAD + d[None, :], acc, mask=in_out)
    tl.store(sums + part * 2 * GROUP_PAD + g, top)
    tl.store(sums + part * 2 * GROUP_PAD + GROUP_PAD + g, mass)


@triton.jit
def _seen(
    acc: tl.tensor,
    acc_odd: tl.tensor,
    shrink: tl.tensor,
    weights: tl.tensor,
    v: tl.tensor,
    PRECISION: tl.constexpr,
    PAIRED: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    acc *= shrink[:, None]
    if PAIRED:
        even, odd = _widen(v, weights.dtype, INTERPRETED)
        acc += tl.dot(weights, even, input_precision=PRECISION)
        acc_odd = acc_odd * shrink[:, None] + tl.dot(weights, odd, input_precision=PRECISION)
    else:
        acc += tl.dot(weights, v.to(weights.dtype), input_precision=PRECISION)
    return acc, acc_odd


@triton.jit
def _places(
    table: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    block_stride: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
) -> tl.tensor:
    block = tl.load(table + at // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
    return block * block_stride + (at % BLOCK_TOKENS) * TOKEN_STRIDE


@triton.jit
def _ahead(first: tl.tensor, VALUES: tl.constexpr, UNITS: tl.constexpr) -> None:
    """Prefetch the keys that begin at `first` `[tokens]`, and their values, VALUES units after them."""
    line = first[:, None] + (tl.arange(0, (UNITS + 63) // 64) * 64)[None, :]
    prefetch(line)
    prefetch(line + VALUES)


@triton.jit(do_not_specialize=["rows", "table_blocks", "layer"])
def _attend(
    query: tl.tensor,
    kv: tl.tensor,
    tables: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    first_rows: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    table_blocks: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor | None,
    sinks: tl.tensor | None,
    WORKERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    LEAST: tl.constexpr,
    CHAINED: tl.constexpr,
    WINDOW: tl.constexpr,
    PAIRED: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    begin(CHAINED)
    EACH: tl.constexpr = 2 if PAIRED else 1
    UNITS: tl.constexpr = DIM // EACH
    UNITS_PAD: tl.constexpr = DIM_PAD // EACH
    head, worker = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    total = tl.load(ends + rows - 1)
    each = tl.maximum((total + WORKERS - 1) // WORKERS, LEAST)
    own, stop = worker * each, tl.minimum(worker * each + each, total)
    row = tl.load(first_rows + worker)
    g, n = tl.arange(0, GROUP_PAD), tl.arange(0, TILE)
    d, all_d = tl.arange(0, UNITS_PAD), tl.arange(0, DIM_PAD)
    heads = (g // GROUP) * (KV_HEADS * GROUP) + head * GROUP + g % GROUP
    in_query = (g < QUERIES * GROUP)[:, None] & (d < UNITS)[None, :]
    in_out = (g < QUERIES * GROUP)[:, None] & (all_d < DIM)[None, :]
    token_stride: tl.constexpr = KV_HEADS * UNITS
    plane = kv + layer * (2 * BLOCK_TOKENS * token_stride) + head * UNITS
    keys, values = plane + d[None, :], plane + BLOCK_TOKENS * token_stride + d[None, :]
    some = tl.minimum(row, rows - 1)
    length, row_end, slot = tl.load(lengths + some), tl.load(ends + some), tl.load(slots + some * QUERIES)
    skipped = first_tile(tl.load(firsts + some), WINDOW, TILE)
    if CHAINED:  # noqa: SIM102 - one is known when this is compiled, the other not
        if own < stop:  # the first tile is fetched while the kernels before compute the newest token
            at = (own - row_end + (length + TILE - 1) // TILE) * TILE + n  # skipped tiles are in both
            table = tables + slot.to(tl.int64) * table_blocks
            token = _places(table, at, at < length, block_stride, BLOCK_TOKENS, token_stride)
            _ahead(plane + token, BLOCK_TOKENS * token_stride, UNITS_PAD)
    ready(CHAINED)
    tile = own
    while tile < stop:
        row_begin = row_end - (length + TILE - 1) // TILE + skipped
        last = tl.minimum(stop, row_end)
        table = tables + slot.to(tl.int64) * table_blocks
        at_row = row.to(tl.int64) * (QUERIES * KV_HEADS * GROUP * DIM) + heads[:, None] * DIM
        q, q_odd, scales = _queries(query + at_row + d[None, :] * EACH, in_query, scale, PAIRED)
        acc = tl.zeros([GROUP_PAD, UNITS_PAD], tl.float32)
        acc_odd = acc
        top, mass = tl.full([GROUP_PAD], -float("inf"), tl.float32), tl.zeros([GROUP_PAD], tl.float32)
        sees = _sees(firsts + some, g // GROUP, QUERIES, WINDOW)
        for i in tl.range(tile - row_begin + skipped, last - row_begin + skipped, num_stages=STAGES):
            at = i * TILE + n
            inside = at < length
            token = _places(table, at, inside, block_stride, BLOCK_TOKENS, token_stride)[:, None]
            readable = inside[:, None] if DIM == DIM_PAD else inside[:, None] & (d < UNITS)[None, :]
            k = tl.load(keys + token, mask=readable, other=0)
            scores = _scores(q, q_odd, k, PRECISION, PAIRED, INTERPRETED)
            scores = capped(scores * scales[:, None], cap)
            scores = _masked(scores, at, inside, sees, QUERIES, WINDOW)
            weights, shrink, top, mass = weighed(scores, top, mass)
            v = tl.load(values + token, mask=readable, other=0)
            acc, acc_odd = _seen(acc, acc_odd, shrink, weights.to(q.dtype), v, PRECISION, PAIRED, INTERPRETED)
        if PAIRED:
            acc = tl.interleave(acc, acc_odd)
        if last > tile:
            if (tile == row_begin) & (last == row_end):
                mass = with_sinks(mass, top, sinks, head * GROUP + g % GROUP, g < QUERIES * GROUP)
                done = (acc / mass[:, None]).to(out.dtype.element_ty)
                tl.store(out + at_row + all_d[None, :], done, mask=in_out)
            else:
                part = (worker * 2 + (tile != own).to(tl.int32)) * KV_HEADS + head
                _keep_part(partial, sums, part, acc, top, mass, in_out, GROUP_PAD, DIM_PAD)
        tile, row = last, row + 1
        some = tl.minimum(row, rows - 1)
        length, row_end, slot = tl.load(lengths + some), tl.load(ends + some), tl.load(slots + some * QUERIES)
        skipped = first_tile(tl.load(firsts + some), WINDOW, TILE)


@triton.jit(do_not_specialize=["rows"])
def _merge(
    lengths: tl.tensor,
    firsts: tl.tensor,
    sinks: tl.tensor | None,
    ends: tl.tensor,
    first_rows: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    WORKERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    CHAINED: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    begin(CHAINED)
    worker, head = tl.program_id(0), tl.program_id(1) // GROUP % KV_HEADS
    query = tl.program_id(1) // (GROUP * KV_HEADS)
    g = query * GROUP + tl.program_id(1) % GROUP
    total = tl.load(ends + rows - 1)
    each = tl.maximum((total + WORKERS - 1) // WORKERS, LEAST)
    border = (worker + 1) * each
    row = tl.minimum(tl.load(first_rows + worker + 1), rows - 1)
    row_end = tl.load(ends + row)
    row_begin = row_end - (tl.load(lengths + row) + TILE - 1) // TILE
    row_begin += first_tile(tl.load(firsts + row), WINDOW, TILE)
    ready(CHAINED)
    if border < total:  # noqa: SIM102 - Triton has no conditions that end early
        if (row_begin < border) & (row_begin >= worker * each):  # the first border that this row crosses
            d = tl.arange(0, DIM_PAD)
            top = tl.full([], -float("inf"), tl.float32)
            mass = tl.full([], 0.0, tl.float32)
            acc = tl.zeros([DIM_PAD], tl.float32)
            begins_inside = (row_begin != worker * each).to(tl.int32)
            last = (row_end - 1) // each
            for first in range(worker, last + 1, PARTS):
                i = first + tl.arange(0, PARTS)
                part = (i * 2 + tl.where(i == worker, begins_inside, 0)) * KV_HEADS + head
                tops = tl.load(sums + part * 2 * GROUP_PAD + g, mask=i <= last, other=-float("inf"))
                masses = tl.load(sums + part * 2 * GROUP_PAD + GROUP_PAD + g, mask=i <= last, other=0.0)
                at = ((part * GROUP_PAD + g) * DIM_PAD)[:, None] + d[None, :]
                parts = tl.load(partial + at, mask=(i <= last)[:, None], other=0.0)
                new_top = tl.maximum(top, tl.max(tops, 0))
                shrinks, shrink = tl.exp2(tops - new_top), tl.exp2(top - new_top)
                acc = acc * shrink + tl.sum(parts * shrinks[:, None], 0)
                mass = mass * shrink + tl.sum(masses * shrinks, 0)
                top = new_top
            mass = with_sinks(mass, top, sinks, head * GROUP + g % GROUP, g >= 0)
            at_out = (row.to(tl.int64) * QUERIES + query) * (KV_HEADS * GROUP * DIM)
            at_out += (head * GROUP + g % GROUP) * DIM + d
            tl.store(out + at_out, (acc / mass).to(out.dtype.element_ty), mask=d < DIM)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The layout of the kernel on a device. `per_sm`: programs that one multiprocessor holds at once."""

    tile_tokens: int = TILE_TOKENS
    per_sm: int = 2
    stages: int = 5
    warps: int = 4
    chained: bool = False  # see kernels.gemm.gpu


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Memory of one engine's kernels: the division of the work, and the parts of rows to merge."""

    tuning: Tuning
    workers: int
    ends: Tensor  # [rows], number of tiles up to the end of each row
    spans: Tensor  # [rows], tokens that the last query of each row sees
    first_rows: Tensor  # [workers + 1]
    partial: Tensor  # [workers * 2, kv_heads, most queries * group, head_dim], float32
    sums: Tensor  # [workers * 2, kv_heads, 2, most queries * group]: maximum and mass


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of a step: `slots` `[rows * queries]` and `lengths` `[rows]` int32, `tables` `[slots, blocks]`
    int32. The result of a row of length 0 is undefined.

    A row has `queries` tokens of one slot, and each sees one token more than the one before, the first one
    `lengths[row]`. `ids` `[rows * queries]` int32: a negative number, from the second token of a row on, is
    no token, nor are those after it; their results are undefined."""

    slots: Tensor
    lengths: Tensor
    tables: Tensor
    queries: int = 1
    ids: Tensor | None = None


def decode_work(
    kv: Tensor, heads: int, rows: int, processors: int, tuning: Tuning | None = None, queries: int = 1
) -> DecodeWork:
    """Memory for steps of up to `rows` rows of up to `queries` tokens over the cache `kv`, on a GPU of so
    many multiprocessors. Raises ValueError for too many rows."""
    chosen, kv_heads = tuning or Tuning(), kv.shape[4]
    if rows > _ROW_LIMIT:
        raise ValueError(f"{rows} rows in a step; at most {_ROW_LIMIT}")
    workers = max(1, processors * chosen.per_sm // kv_heads)
    group, dim = _padded(queries * (heads // kv_heads)), _padded(kv.shape[5], _LEAST_DIM)

    def room(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=kv.device)

    return DecodeWork(
        tuning=chosen,
        workers=workers,
        ends=room(rows, dtype=torch.int32),
        spans=room(rows, dtype=torch.int32),
        first_rows=room(workers + 1, dtype=torch.int32),
        partial=room(workers * 2, kv_heads, group, dim, dtype=torch.float32),
        sums=room(workers * 2, kv_heads, 2, group, dtype=torch.float32),
    )


def windowed(work: DecodeWork) -> DecodeWork:
    """The same memory with a division of its own, for the layers with a window."""
    ends, spans, rows = (torch.zeros_like(each) for each in (work.ends, work.spans, work.first_rows))
    return replace(work, ends=ends, spans=spans, first_rows=rows)


def plan_decode(work: DecodeWork, step: DecodeRows, window: int = 0) -> None:
    """Divide the rows of a step among the workers: once a step, for all layers with this window."""
    rows = len(step.lengths)
    _plan[(1,)](
        step.lengths, step.ids, work.spans, work.ends, work.first_rows, rows, WORKERS=work.workers,
        WORKERS_PAD=work.workers + 1, ROWS_PAD=max(16, triton.next_power_of_2(rows)),
        TILE=work.tuning.tile_tokens, LEAST=_least(work.tuning), QUERIES=step.queries,
        WINDOW=window, num_warps=4,
    )  # fmt: skip


def attend_decode(
    query: Tensor,
    kv: Tensor,
    layer: int,
    rows: DecodeRows,
    work: DecodeWork,
    out: Tensor,
    by: Scoring = PLAIN,
) -> None:
    """Attention of each of `rows` with its queries `[rows * queries, heads, head_dim]` into `out`, of the
    same shape. Call `plan_decode` with the same rows and window before."""
    count, heads, dim = query.shape[0] // rows.queries, query.shape[1], query.shape[2]
    kv_heads, block_tokens = kv.shape[4], kv.shape[3]
    group, paired = heads // kv_heads, kv.dtype == FP8
    spans = rows.lengths if rows.queries == 1 else work.spans
    if paired:
        kv = kv.view(torch.uint16)
    sizes = {
        "WORKERS": work.workers, "KV_HEADS": kv_heads, "GROUP": group, "QUERIES": rows.queries,
        "GROUP_PAD": _padded(rows.queries * group),
        "DIM": dim, "DIM_PAD": _padded(dim, _LEAST_DIM), "TILE": work.tuning.tile_tokens,
        "LEAST": _least(work.tuning), "CHAINED": work.tuning.chained, "launch_pdl": work.tuning.chained,
        "WINDOW": by.window,
    }  # fmt: skip
    _attend[(work.workers * kv_heads,)](
        query, kv, rows.tables, rows.slots, spans, rows.lengths, work.ends, work.first_rows, out,
        work.partial, work.sums, count, rows.tables.shape[1], layer, kv.stride(0),
        (by.scale or dim**-0.5) * _LOG2_E, by.cap * _LOG2_E if by.cap else None, by.sinks, **sizes,
        PAIRED=paired, INTERPRETED=not kv.is_cuda, BLOCK_TOKENS=block_tokens,
        STAGES=work.tuning.stages,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=work.tuning.warps,
    )  # fmt: skip
    if work.workers > 1:
        _merge[(work.workers - 1, rows.queries * heads)](
            spans, rows.lengths, by.sinks, work.ends, work.first_rows, out, work.partial, work.sums, count,
            **sizes, PARTS=_PARTS, num_warps=2,
        )  # fmt: skip


def _least(tuning: Tuning) -> int:
    return min(_LEAST_TILES, max(1, _LEAST_TOKENS // tuning.tile_tokens))


def _padded(size: int, least: int = 16) -> int:
    return max(least, int(triton.next_power_of_2(size)))
