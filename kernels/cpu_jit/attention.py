"""Attention on a CPU: pieces of work of one sequence, one KV head (or all, for one token), and up to ROWS
rows, a row being a query head of a token.

    for each panel of PANEL tokens of the context, read from the KV blocks by the sequence's table:
        keys    [dim][tokens]   transposed; with AMX pairs of bfloat16, as its tiles want them
        values  [tokens][dim]
        scores  = queries @ keys       the microkernels of matrix products: microkernel.py, or amx.py
        weights = softmax so far       a row's largest score and its sum of weights go on to the next panel
        sums    = sums * (what the new largest score makes of them) + weights @ values

With a window the panels before it are not read. A `Scoring` (kernels.attention.ref) has kernels of its own.

The rows of a prompt share what they read of a panel; a decode row has its query heads only. A row's bits do
not depend on the other rows or on the chunk in which its token comes: panels begin at multiples of PANEL,
each number of a product is added up in one order, and tokens after the row's own have weight zero. So a token
that is computed again after a preemption, in another chunk, has the same KV. See kernels.attention.ref.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels.cpu_jit
from kernels.attention.ref import PLAIN, Scoring
from kernels.cpu_jit import amx
from kernels.cpu_jit.llvm_intrinsics import (
    as_i32,
    bf16_at,
    exp,
    f16_at,
    f32_at,
    fast,
    fetch_add,
    float_of,
    i64_at,
    narrow,
    offset_by,
    on_stack,
    strict,
    widen,
)
from kernels.cpu_jit.microkernel import microkernel
from kernels.cpu_jit.thread_team import Call, Kernel, Number, bits_of, team_size
from kernels.cpu_jit.vectors import LANES, highest, prefetch, transpose, weigh

ROWS = 192  # of a piece of a prompt, about: they share the transposition of the keys
PANEL = 128  # tokens of the context at once
_FEW = 16  # rows for which values are not packed
_WHOLE = 4  # pieces for each thread from which on all KV heads of a decode row, side by side, are one
_MANY, _SOME = 6, 3  # rows of a product at once; with _WIDE vectors of columns the sums fit the registers
_WIDE = 4 if kernels.cpu_jit.has("avx512f") else 1
_ZERO, _ONE, _LOWEST, _LOG2E = (np.float32(each) for each in (0.0, 1.0, -3.0e38, 1.44269504))


@dataclass(frozen=True, slots=True)
class Sequences:
    """The token rows of a step: `counts` rows of each sequence, from row `firsts` on, after `starts` tokens
    of its context; `tables` `[sequences, blocks]`. All are int64."""

    tables: NDArray[np.int64]
    firsts: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    _pieces: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict)

    def pieces(self, shared: int, kv_heads: int) -> NDArray[np.int64]:
        """The work with `shared` query heads of a KV head, the longest first: `[pieces, 6]`, the sequence,
        the first token row, token rows, tokens before them, the first KV head, KV heads."""
        found = self._pieces.get((shared, kv_heads))
        if found is None and self.counts.max() == 1:
            found = self._pieces[shared, kv_heads] = self._decode_pieces(shared, kv_heads)
        elif found is None:
            size = max(1, ROWS // shared)
            parts = -(-self.counts // size)
            sequence = np.repeat(np.arange(len(parts)), parts)
            before = (np.arange(len(sequence)) - np.repeat(np.cumsum(parts) - parts, parts)) * size
            tokens = np.minimum(self.counts[sequence] - before, size)
            whole = _whole(len(tokens), shared)
            heads = np.where((tokens == 1) & whole, kv_heads, 1)
            each = kv_heads // heads
            first = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
            sequence, before, tokens, heads = (
                np.repeat(column, each) for column in (sequence, before, tokens, heads)
            )
            columns = (
                sequence, self.firsts[sequence] + before, tokens, self.starts[sequence] + before, first, heads
            )  # fmt: skip
            order = np.argsort(-(tokens * (columns[3] + tokens) * heads), kind="stable")
            found = self._pieces[shared, kv_heads] = np.ascontiguousarray(np.stack(columns, 1)[order])
        return found

    def _decode_pieces(self, shared: int, kv_heads: int) -> NDArray[np.int64]:
        """The same where each sequence has one row, in a quarter of the time."""
        heads = kv_heads if _whole(len(self.counts), shared) else 1
        order = np.argsort(-self.starts, kind="stable")
        found = np.ones((len(order), kv_heads // heads, 6), np.int64)
        for place, column in (0, order), (1, self.firsts[order]), (3, self.starts[order]):
            found[:, :, place] = column[:, None]
        found[:, :, 4], found[:, :, 5] = np.arange(kv_heads // heads), heads
        return found.reshape(-1, 6)


def _whole(rows: int, shared: int) -> bool:
    """Whether a thread takes all KV heads of a row at once: they lie side by side."""
    return rows >= _WHOLE * team_size() and shared <= _FEW


def _strip(parts: int, onto: bool) -> Any:
    """The product of float32 rows with `parts` vectors of columns."""
    many, some, one = (microkernel(rows, parts, onto=onto) for rows in (_MANY, _SOME, 1))

    @fast
    def multiply(
        x: Any, apart: int, width: int, matrix: Any, line: int, out: Any, rows: int, columns: int
    ) -> None:
        row = 0
        while row + _MANY <= rows:
            at = offset_by(out, row * columns)
            many(offset_by(x, row * apart), apart, width, matrix, line, at, columns)
            row += _MANY
        while row + _SOME <= rows:
            at = offset_by(out, row * columns)
            some(offset_by(x, row * apart), apart, width, matrix, line, at, columns)
            row += _SOME
        while row < rows:
            at = offset_by(out, row * columns)
            one(offset_by(x, row * apart), apart, width, matrix, line, at, columns)
            row += 1

    return multiply


def _by_vectors(onto: bool) -> Any:
    wide, single = _strip(_WIDE, onto), _strip(1, onto)

    @fast
    def multiply(
        x: Any, apart: int, width: int, matrix: Any, line: int, out: Any, rows: int, columns: int, tile: int
    ) -> None:
        """Multiply `x` `[rows, width]`, rows `apart`, by `matrix` `[width, columns]`, rows `line` apart, to
        `out` `[rows, columns]`, all float32."""
        column = 0
        while column + _WIDE * LANES <= columns:
            of, to = offset_by(matrix, column), offset_by(out, column)
            wide(x, apart, width, of, line, to, rows, columns)
            column += _WIDE * LANES
        while column < columns:
            of, to = offset_by(matrix, column), offset_by(out, column)
            single(x, apart, width, of, line, to, rows, columns)
            column += LANES

    return multiply


def _by_tiles(onto: bool) -> Any:
    two, one = (amx.tiles(number, 2, onto=onto) for number in (2, 1))

    @fast
    def multiply(
        x: Any, apart: int, width: int, matrix: Any, line: int, out: Any, rows: int, columns: int, tile: int
    ) -> None:
        """The same of bfloat16, in tiles of `tile` rows, summed in float32; `matrix` `[width / 2, columns,
        2]`. Computes whole tiles of rows."""
        for column in range(0, columns, amx.COLUMNS):
            of, row = offset_by(matrix, 2 * column), 0
            while row + tile < rows:
                at = offset_by(out, row * columns + column)
                two(offset_by(x, row * apart), apart, width, of, line, at, columns)
                row += 2 * tile
            if row < rows:
                at = offset_by(out, row * columns + column)
                one(offset_by(x, row * apart), apart, width, of, line, at, columns)

    return multiply


@fast
def _fetch(source: Any, offsets: Any, tokens: int, dim: int, line: int) -> None:
    """Start to read a panel's keys or values. `line`: numbers in a line of the cache."""
    for token in range(tokens):
        for i in range(0, dim, line):
            prefetch(offset_by(source, offsets[token] + i))


@fast
def _pack_keys(keys: Any, offsets: Any, tokens: int, dim: int, out: Any, of_a_lane: int) -> None:
    """`of_a_lane`: 1, or 2 for pairs of bfloat16."""
    for token in range(0, tokens, LANES):
        for first in range(0, dim, LANES * of_a_lane):
            to = offset_by(out, first * tokens + token * of_a_lane)
            transpose(offset_by(keys, first), offset_by(offsets, token), to, tokens)


@fast
def _pack_values(values: Any, offsets: Any, tokens: int, dim: int, out: Any) -> None:
    """Widened, `[tokens][dim]`."""
    for token in range(tokens):
        own, to = offset_by(values, offsets[token]), offset_by(out, token * dim)
        for i in range(dim):
            to[i] = widen(own[i])


@fast
def _pack_value_pairs(values: Any, offsets: Any, tokens: int, dim: int, out: Any) -> None:
    """`[tokens / 2][dim][2]`."""
    words = as_i32(out)
    for token in range(0, tokens, 2):
        one, two = offset_by(values, offsets[token]), offset_by(values, offsets[token + 1])
        to = offset_by(words, token // 2 * dim)
        for i in range(dim):
            to[i] = np.int32(one[i]) | (np.int32(two[i]) << np.int32(16))


@fast
def _find(table: Any, at: int, tokens: int, padded: int, block: int, stride: int, line: int, to: Any) -> None:
    """The offset of each token of a panel; those after the last get the last one's."""
    number = at // block
    within, base = at - number * block, table[number] * stride
    for i in range(tokens):
        if within == block:
            number += 1
            within, base = 0, table[number] * stride
        to[i] = base + within * line
        within += 1
    for i in range(tokens, padded):
        to[i] = to[tokens - 1]


def _after_packing(pack: Any, add_product: Any) -> Any:
    @fast
    def add(
        weights: Any, values: Any, memory: Any, line: int, tokens: int, padded: int, dim: int, sums: Any,
        rows: int, tile: int,
    ) -> None:  # fmt: skip
        """Add the weighted values of a panel to `sums`."""
        pack(values, memory.offsets, padded, dim, memory.values)
        add_product(weights, padded, padded, memory.values, dim, sums, rows, dim, tile)

    return add


def _in_place(pack: Any, add_product: Any) -> Any:
    @fast
    def add(
        weights: Any, values: Any, memory: Any, line: int, tokens: int, padded: int, dim: int, sums: Any,
        rows: int, tile: int,
    ) -> None:  # fmt: skip
        """The same; the values of few rows are read where they are, a run of tokens at a time."""
        first, offsets = 0, memory.offsets
        if rows > _FEW:
            pack(values, offsets, padded, dim, memory.values)
            add_product(weights, padded, padded, memory.values, dim, sums, rows, dim, tile)
            return
        while first < tokens:
            end = first + 1
            while end < tokens and offsets[end] == offsets[end - 1] + line:
                end += 1
            own, of = offset_by(values, offsets[first]), offset_by(weights, first)
            add_product(of, padded, end - first, own, line, sums, rows, dim, tile)
            first = end

    return add


class _Memory(NamedTuple):
    """A thread's own. Pointers to what the products take, where no other type is named."""

    queries: Any  # [rows][dim]
    sums: Any  # [rows][dim] float32
    keys: Any  # [dim][tokens of a panel]
    values: Any  # [tokens of a panel][dim]
    scores: Any  # [rows][tokens of a panel] float32
    weights: Any  # the same; may be the memory of the scores
    states: Any  # [rows][2] float32, see _soften
    offsets: Any  # [tokens of a panel] int64
    setting: Any  # of the tiles


@fast
def _numbers(room: int, dim: int) -> int:
    """How many float32 a thread needs for `room` rows."""
    return 2 * room * dim + 2 * PANEL * dim + 2 * room * PANEL + 2 * room + 2 * PANEL


def _memory(own_at: Any, apart: bool) -> Any:
    """`own_at`: pointer to the type of what the products take. `apart`: weights do not replace scores."""
    tile_setting = on_stack(amx.CONFIG_BYTES)

    @fast
    def memory(address: int, room: int, dim: int) -> Any:
        sums = address + 4 * room * dim
        keys = sums + 4 * room * dim
        values = keys + 4 * PANEL * dim
        scores = values + 4 * PANEL * dim
        weights = scores + (4 * room * PANEL if apart else 0)
        states = scores + 8 * room * PANEL
        return _Memory(
            own_at(address),
            f32_at(sums),
            own_at(keys),
            own_at(values),
            f32_at(scores),
            own_at(weights),
            f32_at(states),
            i64_at(states + 8 * room),
            tile_setting(),
        )

    return memory


@fast
def _of_head(memory: Any, head: int, rows: int, dim: int) -> Any:
    """The memory of a KV head of a piece of several."""
    return _Memory(
        offset_by(memory.queries, head * rows * dim),
        offset_by(memory.sums, head * rows * dim),
        memory.keys,
        memory.values,
        memory.scores,
        memory.weights,
        offset_by(memory.states, head * 2 * rows),
        memory.offsets,
        memory.setting,
    )


@fast
def _start(query: Any, memory: Any, tokens: int, stride: int, shared: int, dim: int) -> None:
    """Copy the queries of a piece, and set its sums to zero."""
    width, sums, states = shared * dim, memory.sums, memory.states
    for token in range(tokens):
        source, to = offset_by(query, token * stride), offset_by(memory.queries, token * width)
        for i in range(width):
            to[i] = narrow(widen(source[i]), to[0])
    for row in range(tokens * shared):
        states[2 * row], states[2 * row + 1] = _LOWEST, _ZERO
    for i in range(tokens * width):
        sums[i] = _ZERO


@strict
def _soften(scores: Any, weights: Any, valid: int, padded: int, state: Any, scale: Any) -> Any:
    """Turn a row's scores of a panel into weights. `state`: its largest score and the sum of its weights so
    far. Returns by what the sums of before are to be multiplied."""
    most = highest(scores, valid, state[0])
    factor = exp((state[0] - most) * scale)
    state[0] = most
    state[1] = state[1] * factor + weigh(scores, valid, most, scale * _LOG2E, weights)
    for i in range((valid + LANES - 1) // LANES * LANES, padded):
        weights[i] = narrow(_ZERO, weights[0])
    return factor


@fast
def _soften_rows(
    memory: Any, first: int, tokens: int, seen: int, here: int, padded: int, shared: int, dim: int
) -> None:
    """The rows of the tokens from `first` on. Token `i` sees `seen + i` tokens of the panel, at most `here`;
    with those that products need the panel has `padded`."""
    scale, sums = _ONE / np.sqrt(np.float32(dim)), memory.sums
    for token in range(first, tokens):
        for row in range(token * shared, (token + 1) * shared):
            scores, weights = offset_by(memory.scores, row * padded), offset_by(memory.weights, row * padded)
            state = offset_by(memory.states, 2 * row)
            factor = _soften(scores, weights, min(here, seen + token), padded, state, scale)
            if factor != _ONE:
                for i in range(row * dim, (row + 1) * dim):
                    sums[i] *= factor


@strict
def _capped(score: Any, scale: Any, cap: Any) -> Any:
    """cap * tanh(score * scale / cap)."""
    return cap - (cap + cap) / (exp(np.float32(2.0) * score * scale / cap) + _ONE)


@strict
def _scored_row(scores: Any, weights: Any, first: int, end: int, padded: int, state: Any, by: Any) -> Any:
    """As _soften, for the tokens from `first` to `end` of a panel. Whole lanes are written: those before
    `first` and after `end` weigh nothing."""
    lane, scale = first // LANES * LANES, by.scale
    if by.cap > _ZERO:
        scale = _ONE
        for i in range(first, end):
            scores[i] = _capped(scores[i], by.scale, by.cap)
    for i in range(lane, first):
        scores[i] = _LOWEST
    of, to = offset_by(scores, lane), offset_by(weights, lane)
    factor = _soften(of, to, end - lane, padded - lane, state, scale)
    for i in range(first):
        weights[i] = narrow(_ZERO, weights[0])
    return factor


@fast
def _score_rows(
    memory: Any, first: int, tokens: int, seen: int, here: int, padded: int, shared: int, dim: int, by: Any
) -> None:
    """As _soften_rows, where a token sees `by.window` tokens at most, and perhaps none of the panel."""
    sums = memory.sums
    for token in range(first, tokens):
        begin, end = max(0, seen + token - by.window), min(here, seen + token)
        for row in range(token * shared, (token + 1) * shared):
            scores, weights = offset_by(memory.scores, row * padded), offset_by(memory.weights, row * padded)
            if begin >= end:
                for i in range(padded):
                    weights[i] = narrow(_ZERO, weights[0])
                continue
            factor = _scored_row(scores, weights, begin, end, padded, offset_by(memory.states, 2 * row), by)
            if factor != _ONE:
                for i in range(row * dim, (row + 1) * dim):
                    sums[i] *= factor


@fast
def _add_sinks(memory: Any, sinks: Any, tokens: int, shared: int, scale: Any) -> None:
    """Add what the sinks of `shared` heads weigh to the sums of weights."""
    for row in range(tokens * shared):
        state = offset_by(memory.states, 2 * row)
        state[1] += exp(sinks[row % shared] - state[0] * scale)


class _By(NamedTuple):
    """A Scoring in a kernel."""

    window: int
    scale: Any
    cap: Any


@fast
def _finish(memory: Any, out: Any, tokens: int, stride: int, shared: int, dim: int) -> None:
    sums, states = memory.sums, memory.states
    for token in range(tokens):
        to = offset_by(out, token * stride)
        for row in range(shared):
            at = token * shared + row
            for i in range(dim):
                to[row * dim + i] = narrow(sums[at * dim + i] / states[2 * at + 1], to[0])


@fast
def _no_tile(setting: Any, rows: int) -> int:
    return 1


@fast
def _nothing() -> None:
    return


@fast
def _set_tile(setting: Any, rows: int) -> int:
    tile = min(amx.ROWS, rows)
    amx.configure(setting, tile)
    return tile


@fast
def _clear_tiles() -> None:
    amx.release()


def _attention(
    memory_at: Any,
    multiply: Any,
    add_values: Any,
    of_a_lane: int,
    set_tile: Any,
    end: Any,
    stored_bytes: int,
    *,
    scored: bool = False,
) -> Any:
    """The work of a kernel: see the top. Each thread takes the next piece. `stored_bytes`: of a number of
    KV; `scored`: with a Scoring."""
    group = LANES * of_a_lane  # tokens of a panel are computed in such groups
    cache_line = 64 // stored_bytes

    @fast
    def attend(query: Any, kv: Any, out: Any, p: Any) -> None:
        tables, pieces, count, shared, kv_heads = i64_at(p[6]), i64_at(p[7]), p[8], p[9], p[10]
        query_stride, blocks, block_tokens, block_stride = p[11], p[12], p[13], p[14]
        layer, dim, room = p[15], p[16], p[17]
        line, width = kv_heads * dim, shared * dim
        memory = memory_at(p[5] + fetch_add(offset_by(p, 1)) * 4 * _numbers(room, dim), room, dim)
        while True:
            number = fetch_add(p)
            if number >= count:
                break
            piece = offset_by(pieces, number * 6)
            table, row, tokens, before = offset_by(tables, piece[0] * blocks), piece[1], piece[2], piece[3]
            head, heads, rows = piece[4], piece[5], tokens * shared
            tile = set_tile(memory.setting, rows)
            for i in range(heads):
                source = offset_by(query, row * query_stride + (head + i) * width)
                _start(source, _of_head(memory, i, rows, dim), tokens, query_stride, shared, dim)
            keys = offset_by(kv, layer + head * dim)
            values = offset_by(keys, block_tokens * line)
            start = 0
            if scored:
                by = _By(p[18], float_of(np.int32(p[19])), float_of(np.int32(p[20])))
                start = max(0, before + 1 - by.window) // PANEL * PANEL
            for at in range(start, before + tokens, PANEL):
                here = min(PANEL, before + tokens - at)
                padded = (here + group - 1) // group * group
                _find(table, at, here, padded, block_tokens, block_stride, line, memory.offsets)
                if tokens == 1:  # rows of a prompt compute for longer than they read
                    _fetch(keys, memory.offsets, here, heads * dim, cache_line)
                    _fetch(values, memory.offsets, here, heads * dim, cache_line)
                first = max(0, at - before)  # no token before sees this panel
                skip = first * shared
                for i in range(heads):
                    own = _of_head(memory, i, rows, dim)
                    _pack_keys(offset_by(keys, i * dim), own.offsets, padded, dim, own.keys, of_a_lane)
                    of, scores = offset_by(own.queries, skip * dim), offset_by(own.scores, skip * padded)
                    multiply(of, dim, dim, own.keys, padded, scores, rows - skip, padded, tile)
                    if scored:
                        _score_rows(own, first, tokens, before + 1 - at, here, padded, shared, dim, by)
                    else:
                        _soften_rows(own, first, tokens, before + 1 - at, here, padded, shared, dim)
                    weights, sums = offset_by(own.weights, skip * padded), offset_by(own.sums, skip * dim)
                    of_values = offset_by(values, i * dim)
                    add_values(weights, of_values, own, line, here, padded, dim, sums, rows - skip, tile)
            for i in range(heads):
                own = _of_head(memory, i, rows, dim)
                to = offset_by(out, (row * kv_heads + head + i) * width)
                if scored:  # noqa: SIM102 - what is known when this is compiled is a condition of its own
                    if p[21] != 0:
                        sinks = offset_by(f32_at(p[21]), (head + i) * shared)
                        _add_sinks(own, sinks, tokens, shared, _ONE if by.cap > _ZERO else by.scale)
                _finish(own, to, tokens, kv_heads * width, shared, dim)
        end()

    return attend


_multiply, _add_product = _by_vectors(False), _by_vectors(True)
_floats, _pairs = _memory(f32_at, apart=False), _memory(bf16_at, apart=True)
_add_floats, _add_widened = (wrap(_pack_values, _add_product) for wrap in (_in_place, _after_packing))
_add_pairs = _after_packing(_pack_value_pairs, _by_tiles(True))
_PARTS = {  # by the kernel: what _attention takes
    "floats": (_floats, _multiply, _add_floats, 1, _no_tile, _nothing, 4),
    "widening": (_floats, _multiply, _add_widened, 1, _no_tile, _nothing, 2),
    "halves": (_floats, _multiply, _add_floats, 1, _no_tile, _nothing, 2),
    "pairs": (_pairs, _by_tiles(False), _add_pairs, 2, _set_tile, _clear_tiles, 2),
}
_of_floats, _by_widening, _of_halves, _in_pairs = (_attention(*parts) for parts in _PARTS.values())
_scored_floats, _scored_widening, _scored_halves, _scored_pairs = (
    _attention(*parts, scored=True) for parts in _PARTS.values()
)


def _f32(p: Any) -> None:
    _of_floats(f32_at(p[2]), f32_at(p[3]), f32_at(p[4]), p)


def _bf16(p: Any) -> None:
    _by_widening(bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), p)


def _bf16_in_tiles(p: Any) -> None:
    _in_pairs(bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), p)


def _f16(p: Any) -> None:
    _of_halves(f32_at(p[2]), f16_at(p[3]), f32_at(p[4]), p)


def _scored_f32(p: Any) -> None:
    _scored_floats(f32_at(p[2]), f32_at(p[3]), f32_at(p[4]), p)


def _scored_bf16(p: Any) -> None:
    _scored_widening(bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), p)


def _scored_bf16_in_tiles(p: Any) -> None:
    _scored_pairs(bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), p)


def _scored_f16(p: Any) -> None:
    _scored_halves(f32_at(p[2]), f16_at(p[3]), f32_at(p[4]), p)


_KERNELS = {torch.float32: Kernel(_f32), torch.bfloat16: Kernel(_bf16)}  # by the dtype of KV
_SCORED = {torch.float32: Kernel(_scored_f32), torch.bfloat16: Kernel(_scored_bf16)}
if kernels.cpu_jit.has("f16c"):
    _KERNELS[torch.float16], _SCORED[torch.float16] = Kernel(_f16), Kernel(_scored_f16)
_TILES, _SCORED_TILES = Kernel(_bf16_in_tiles), Kernel(_scored_bf16_in_tiles)
_EVERY = 1 << 40  # a window of more tokens than any sequence has


def can_attend(kv: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels exist for the dtype and the head size of `kv`, with queries of `dtype`."""
    wanted = torch.float32 if kv.dtype == torch.float16 else kv.dtype
    return kv.dtype in _KERNELS and dtype == wanted and kv.shape[-1] % LANES == 0


def attend(query: Tensor, kv: Tensor, layer: int, sequences: Sequences, scoring: Scoring = PLAIN) -> Tensor:
    """Each token row over its context, its own token included. `query` `[rows, heads, head_dim]` of the dtype
    of `kv`, or float32 over float16, with any stride between rows. Returns the shape of `query`."""
    out = query.new_empty(query.shape)
    numbers = scoring_numbers([scoring], query.shape[2]) if scoring != PLAIN else ()
    attention_call(query, kv, layer * kv.stride(1), sequences, out, [int(each[0]) for each in numbers]).run()
    return out


def scoring_numbers(scorings: Sequence[Scoring], dim: int) -> tuple[NDArray[np.int64], ...]:
    """What attention_call takes of a Scoring of each layer, which keeps the memory of its sinks."""
    columns = [
        (each.window or _EVERY, bits_of(each.scale or dim**-0.5), bits_of(each.cap),
         0 if each.sinks is None else each.sinks.data_ptr())
        for each in scorings
    ]  # fmt: skip
    return tuple(np.array(column, np.int64) for column in zip(*columns, strict=True))


def attention_call(
    query: Tensor,
    kv: Tensor,
    layer: Number,
    sequences: Sequences,
    out: Tensor,
    scoring: Iterable[Number] = (),
) -> Call:
    """See attend; `layer` is the layer's offset in a block, in numbers; `scoring`: of scoring_numbers, empty
    for PLAIN."""
    _, heads, dim = query.shape
    _, _, _, block_tokens, kv_heads, _ = kv.shape
    shared, tables = heads // kv_heads, sequences.tables
    pieces = sequences.pieces(shared, kv_heads)
    rows = int((pieces[:, 2] * pieces[:, 5]).max()) * shared
    room = -(-rows // amx.ROWS) * amx.ROWS + amx.ROWS  # tiles may compute more
    numbers_each = _numbers.py_func(room, dim)  # in Python: Numba would compile it at each start
    scratch = torch.empty(team_size() * numbers_each)
    addresses = [each.data_ptr() for each in (query, kv, out, scratch)]
    sizes = len(pieces), shared, kv_heads, query.stride(0), tables.shape[1], block_tokens, kv.stride(0)
    in_tiles = kv.dtype == torch.bfloat16 and dim % amx.COLUMNS == 0 and amx.usable()
    scoring = tuple(scoring)
    if scoring:
        kernel = _SCORED_TILES if in_tiles else _SCORED[kv.dtype]
    else:
        kernel = _TILES if in_tiles else _KERNELS[kv.dtype]
    numbers = (0, *addresses, tables.ctypes.data, pieces.ctypes.data, *sizes, layer, dim, room, *scoring)
    return Call(kernel, len(pieces), numbers, scratch, counters=1)
