"""The products of block_weights.py with many rows of `x`, in AMX's tiles: 16 rows by two parts of a panel.

A tile multiplies bfloat16 and adds up in float32. A number of the matrix has 8 bits at most, and one of `x`
is 256 times its upper byte plus its lower one, so all are exact in bfloat16, and so are the sums of a block:

    4 bits   both bytes of `x` in one sum, below 32 * 15 * 2^15 < 2^24
    8 bits   a sum for each byte; that of the upper ones is a multiple of 256. Their sum is rounded once

So these are the integers of block_microkernel.py; what follows has its order, and a row its bits. The scales
of a block differ, so all sums pass through memory: that takes most of the time. While tiles multiply, the
blocks before are scaled, two rows after each few instructions of tiles, as a CPU does not look ahead far
enough to mix them itself.

    x        [tile of rows][block][upper, lower byte][TILE_ROWS][32] bfloat16, each four columns in the
             order 0, 2, 1, 3: the rows of a tile lie side by side, so that they find room in the first cache
    facts    [tile of rows][block][scale, scale times the sum][TILE_ROWS] float32, 0 after the last row
    wide     [block][part][pairs of columns][LANES][2] bfloat16: some blocks of a panel, unpacked
    factors  [block][scales, minima][part][LANES] float32: theirs
    sums     [2][block][scale][part][byte of `x`][TILE_ROWS][LANES] float32, of what is multiplied or scaled
    results  [tile of rows][TILE_ROWS][PANEL] float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

import kernels.cpu_jit
from kernels.cpu_jit import amx
from kernels.cpu_jit.amx import byte_after
from kernels.cpu_jit.block_microkernel import BLOCK, LANES, PANEL, PARTS, VNNI, Format, load, put, scales
from kernels.cpu_jit.llvm_intrinsics import as_f32, fast, i8_at, i64_at, offset_by, on_stack
from kernels.cpu_jit.vectors import broadcast, call, loop, read_ahead

TILE_ROWS = amx.ROWS
FACT_BYTES = 2 * 4  # of a row of a block
MOST_ROWS = 128  # at once: a panel is unpacked for them, _CHUNK blocks after the other, in the first cache
_CHUNK = 6
_WIDE_BYTES = 2 * BLOCK * PANEL  # of a block of a panel
_TILE, _LINE = 1024, 64  # bytes of a tile and of its row
_X, _MATRIX = 4, 6  # the tiles of the bytes of `x`, and of the parts of the matrix; those of sums come before
_LOAD, _STORE, _MULTIPLY = "llvm.x86.tileloadd64", "llvm.x86.tilestored64", "llvm.x86.tdpbf16ps"

_I64, _VOID = ir.IntType(64), ir.VoidType()
_WORDS, _FLOATS = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_FMA = f"llvm.fma.v{LANES}f32"
_ZERO = np.float32(0)
_Emit = Callable[[], Any]


def takes(kind: Format) -> bool:
    """Whether this CPU has the tiles and they multiply this format."""
    return VNNI and not kind.by_row and amx.usable() and kernels.cpu_jit.has("avx512bw")


def x_bytes(terms: int) -> int:
    """The size of a row of a block of `x`, whose numbers have `terms` bytes."""
    return terms * 2 * BLOCK


def by_a_panel(kind: Format, terms: int) -> Any:
    """See the function in it. `terms`: bytes of a number of `x`, one with a matrix in 4 bits alone."""
    widen, add_product, of_x = _unpack(kind), _product(kind, terms), x_bytes(terms)
    width, size = 2 * kind.columns, kind.bytes
    configure = amx.setting([_LINE] * 4 + [width] * 2 + [_LINE] * 2, [TILE_ROWS] * 6 + [width // 4] * 2)
    wide_at, factors_at = on_stack(_CHUNK * _WIDE_BYTES), on_stack(_CHUNK * _factor_bytes(kind))
    sums_at, results_at = on_stack(2 * _sums_bytes(kind)), on_stack(4 * MOST_ROWS * PANEL)
    config_at = on_stack(amx.CONFIG_BYTES)

    @fast
    def multiply(p: Any, work: Any, out: Any) -> None:
        """Multiply up to MOST_ROWS rows of `x` by a panel. `p`: the numbers of the call; `work`: the address
        of the panel's row of the table, the first row and the end."""
        blocks, height, table, first, end = p[7] // BLOCK, p[8], i64_at(work[0]), work[1], work[2]
        wide, factors, sums, results = wide_at(), factors_at(), sums_at(), as_f32(results_at())
        tiles = (end - first + TILE_ROWS - 1) // TILE_ROWS
        for i in range(tiles * TILE_ROWS * PANEL):
            results[i] = _ZERO
        configure(config_at(), TILE_ROWS)
        for block in range(0, blocks, _CHUNK):
            count = min(_CHUNK, blocks - block)
            widen(count, offset_by(i8_at(table[0]), block * size), wide, factors)
            before = first * blocks + block * TILE_ROWS
            x, facts = offset_by(i8_at(p[1]), before * of_x), offset_by(i8_at(p[2]), before * FACT_BYTES)
            add_product(x, facts, blocks, tiles, wide, factors, count, sums, results)
        amx.release()
        amx.store_panel(results, offset_by(out, table[2] + first * height), end - first, height)

    return multiply


def _together(kind: Format) -> int:
    """Blocks that are multiplied, then scaled, at once: as many as have tiles of their own."""
    return 2 // _apart(kind)


def _apart(kind: Format) -> int:
    """Sums of a row of a block: one, or one for each byte of `x`."""
    return 1 if kind.bits == 4 else 2


def _halves(kind: Format) -> range:
    """The columns of a block that have a scale."""
    return range(BLOCK // kind.columns)


def _sums_bytes(kind: Format) -> int:
    """The size of the sums of blocks that are multiplied at once."""
    return 2 * len(_halves(kind)) * PARTS * _TILE


def _factor_bytes(kind: Format) -> int:
    """The size of the factors of a block."""
    return (len(_halves(kind)) + kind.minimum) * 4 * PANEL


class _Place(NamedTuple):
    """A tile of rows and the first of some blocks."""

    tile: Any
    block: Any


def _product(kind: Format, terms: int) -> Any:
    """See the function in it."""
    together, size = _together(kind), _sums_bytes(kind)

    @intrinsic
    def multiply(
        typing: Any, x: Any, facts: Any, apart: Any, tiles: Any, wide: Any, factors: Any, blocks: Any,
        sums: Any, results: Any,
    ) -> Any:  # fmt: skip
        """Add the product of `tiles` tiles of rows of `x`, `apart` blocks apart, with `blocks` blocks of a
        panel to `results`."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, facts, apart, tiles, wide, factors, blocks, sums, results = args
            emitter = _Emitter(builder, kind, terms, x, facts, apart, wide, factors, results)

            def at(number: Any) -> Any:
                return byte_after(builder, sums, builder.mul(builder.and_(number, _index(1)), _index(size)))

            def add_groups(one: Any, none: list[Any]) -> list[Any]:
                emitter.run(emitter.products(_Place(_index(0), _index(0)), at(_index(0)), together))

                def add(number: Any, here: list[Any]) -> list[Any]:
                    place = _Place(*here)
                    following = builder.add(place.block, _index(together))
                    over = builder.icmp_signed(">=", following, whole)
                    tile = builder.add(place.tile, builder.zext(over, _I64))
                    next_place = _Place(tile, builder.select(over, _index(0), following))
                    products = emitter.products(next_place, at(builder.add(number, _index(1))), together)
                    emitter.scale(place, at(number), together, products)
                    return list(next_place)

                last = builder.sub(builder.mul(tiles, groups), _index(1))
                place = _Place(*loop(builder, last, [_index(0), _index(0)], add))
                emitter.scale(place, at(last), together, [])
                return none

            def add_one(tile: Any, none: list[Any]) -> list[Any]:
                emitter.run(emitter.products(_Place(tile, whole), sums, 1))
                emitter.scale(_Place(tile, whole), sums, 1, [])
                return none

            groups = builder.udiv(blocks, _index(together))
            whole = builder.mul(groups, _index(together))
            any_group = builder.zext(builder.icmp_signed(">", groups, _index(0)), _I64)
            loop(builder, any_group, [], add_groups)
            loop(builder, builder.mul(builder.sub(blocks, whole), tiles), [], add_one)
            return context.get_dummy_value()

        apart = tiles = blocks = types.int64
        return types.void(x, facts, apart, tiles, wide, factors, blocks, sums, results), generate

    return multiply


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Emits the instructions of a product of tiles. `terms`: bytes of a number of `x`; `apart`: blocks from
    one tile of rows to the next."""

    _builder: ir.IRBuilder
    _kind: Format
    _terms: int
    _x: Any
    _facts: Any
    _apart: Any
    _wide: Any
    _factors: Any
    _results: Any

    def run(self, emits: list[_Emit]) -> None:
        for emit in emits:
            emit()

    def products(self, place: _Place, sums: Any, count: int) -> list[_Emit]:
        """What multiplies `count` blocks, and stores their sums, one instruction each."""
        blocks = product(range(count), _halves(self._kind))
        return [emit for number, half in blocks for emit in self._of_a_scale(place, sums, number, half)]

    def _of_a_scale(self, place: _Place, sums: Any, number: int, half: int) -> list[_Emit]:
        builder, kind, apart = self._builder, self._kind, _apart(self._kind)
        emit = partial(partial, call, builder)
        first = 0 if apart > 1 else PARTS * number  # two blocks of 4 bits have tiles of their own
        tiles = [amx.tile_number(tile) for tile in range(first, first + PARTS * apart)]
        of_x, of_matrix = (
            [amx.tile_number(each + i) for i in range(count)]
            for each, count in ((_X, self._terms), (_MATRIX, PARTS))
        )
        x = self._of_rows(self._x, place, number, x_bytes(self._terms))
        matrix = self._of_block(self._wide, place, number, _WIDE_BYTES)

        def read(tile: Any, base: Any, offset: int) -> _Emit:
            return lambda: call(builder, _LOAD, _VOID, tile, byte_after(builder, base, offset), _index(_LINE))

        reads = [read(tile, x, i * _TILE + 2 * kind.columns * half) for i, tile in enumerate(of_x)]
        reads[1:1] = [read(tile, matrix, i * _TILE + half * _TILE // 2) for i, tile in enumerate(of_matrix)]
        clear = [emit("llvm.x86.tilezero", _VOID, tile) for tile in tiles]
        multiply = [
            emit(_MULTIPLY, _VOID, tiles[part * apart + term % apart], of_x[term], of_matrix[part])
            for term, part in product(range(self._terms), range(PARTS))
        ]
        start = (number * len(_halves(kind)) + half) * PARTS * apart
        places = [byte_after(builder, sums, (start + i) * _TILE) for i in range(len(tiles))]
        stores = [
            emit(_STORE, _VOID, tile, at, _index(_LINE)) for tile, at in zip(tiles, places, strict=True)
        ]
        return [*reads, *clear, *multiply, *stores]

    def scale(self, place: _Place, sums: Any, count: int, beside: list[_Emit]) -> None:
        """Add the sums of `count` blocks to the results, with some of `beside` after two rows each."""
        builder, kind = self._builder, self._kind
        facts, factors = [], []
        for number in range(count):
            at = self._of_block(self._factors, place, number, _factor_bytes(kind))
            vectors = range(0, _factor_bytes(kind), 4 * LANES)
            factors.append([load(builder, at, vector, _FLOATS) for vector in vectors])
            facts.append(self._of_rows(self._facts, place, number, FACT_BYTES))
        results = byte_after(builder, self._results, builder.mul(place.tile, _index(4 * TILE_ROWS * PANEL)))

        def scale_row(row: Any, none: list[Any]) -> list[Any]:
            own = [byte_after(builder, each, builder.mul(row, _index(4))) for each in facts]
            to = byte_after(builder, results, builder.mul(row, _index(4 * PANEL)))
            self._scale_row(byte_after(builder, sums, builder.mul(row, _index(_LINE))), own, factors, to)
            return none

        if not beside:
            loop(builder, _index(TILE_ROWS), [], scale_row)
        for row in range(TILE_ROWS if beside else 0):
            scale_row(_index(row), [])
            if row % 2:
                self.run(beside[(row - 1) * len(beside) // TILE_ROWS : (row + 1) * len(beside) // TILE_ROWS])

    def _scale_row(self, sums: Any, facts: list[Any], factors: list[list[Any]], to: Any) -> None:
        builder, kind, apart = self._builder, self._kind, _apart(self._kind)
        found = [load(builder, to, 4 * LANES * part, _FLOATS) for part in range(PARTS)]
        place = 0
        for of_x, of_matrix in zip(facts, factors, strict=True):
            scale = broadcast(builder, load(builder, of_x, 0, ir.FloatType()))
            for half, part in product(_halves(kind), range(PARTS)):
                terms = [load(builder, sums, (place + term) * _TILE, _FLOATS) for term in range(apart)]
                place += apart
                whole = builder.fmul(terms[0] if apart == 1 else builder.fadd(*terms), scale)
                found[part] = call(builder, _FMA, _FLOATS, whole, of_matrix[PARTS * half + part], found[part])
            if kind.minimum:
                shift = broadcast(builder, load(builder, of_x, 4 * TILE_ROWS, ir.FloatType()))
                minima = zip(of_matrix[-PARTS:], found, strict=True)
                found = [call(builder, _FMA, _FLOATS, minimum, shift, old) for minimum, old in minima]
        for part, each in enumerate(found):
            put(builder, each, to, 4 * LANES * part)

    def _of_rows(self, base: Any, place: _Place, number: int, size: int) -> Any:
        """What a tile of rows has of a block; `size`: bytes of a row."""
        builder = self._builder
        block = builder.add(builder.mul(place.tile, self._apart), builder.add(place.block, _index(number)))
        return byte_after(builder, base, builder.mul(block, _index(TILE_ROWS * size)))

    def _of_block(self, base: Any, place: _Place, number: int, size: int) -> Any:
        block = self._builder.add(place.block, _index(number))
        return byte_after(self._builder, base, self._builder.mul(block, _index(size)))


def _unpack(kind: Format) -> Any:
    """See the function in it."""

    @intrinsic
    def widen(typing: Any, blocks: Any, panel: Any, wide: Any, factors: Any) -> Any:
        """Store the numbers of `blocks` blocks of a panel at `wide`, and their `factors`."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            blocks, panel, wide, factors = args

            def store(block: Any, none: list[Any]) -> list[Any]:
                chunk = byte_after(builder, panel, builder.mul(block, _index(kind.bytes)))
                to = byte_after(builder, wide, builder.mul(block, _index(_WIDE_BYTES)))
                read_ahead(builder, chunk, kind.bytes)
                for column, odd, part in product(range(0, BLOCK, 4), range(2), range(PARTS)):
                    pairs = _bfloats(builder, kind, _pairs(builder, kind, chunk, column, odd, part))
                    put(builder, pairs, to, part * _TILE + (column // 2 + odd) * _LINE)
                to = byte_after(builder, factors, builder.mul(block, _index(_factor_bytes(kind))))
                for number in range(len(_halves(kind)) + kind.minimum):
                    at = BLOCK * PANEL * kind.bits // 8 + 2 * PANEL * number
                    for part, each in enumerate(scales(builder, chunk, at)):
                        put(builder, each, to, 4 * (number * PANEL + part * LANES))
                return none

            loop(builder, blocks, [], store)
            return context.get_dummy_value()

        return types.void(types.int64, panel, wide, factors), generate

    return widen


def _pairs(builder: ir.IRBuilder, kind: Format, chunk: Any, column: int, odd: int, part: int) -> Any:
    """The columns `column + odd` and `column + odd + 2` of the matrix, in the words of a register: as int16,
    or as the last 4 bits of one."""
    half = BLOCK // 2
    place = column if kind.bits == 8 else column % half
    shift = 8 * odd + 4 * (kind.bits == 4 and column >= half)
    words = load(builder, chunk, place * PANEL + part * 4 * LANES, _SHORTS)
    words = builder.lshr(words, ir.Constant(_SHORTS, [shift] * (2 * LANES)))
    return words if kind.bits == 4 else builder.and_(words, ir.Constant(_SHORTS, [255] * (2 * LANES)))


def _bfloats(builder: ir.IRBuilder, kind: Format, numbers: Any) -> Any:
    """`numbers` less the format's offset, in bfloat16."""
    if kind.bits == 4:  # by a table of twice 16 numbers
        values = np.arange(16, dtype=np.float32) - kind.offset
        table = ir.Constant(_SHORTS, [int(each) >> 16 for each in values.view(np.uint32)] * 2)
        return call(builder, "llvm.x86.avx512.permvar.hi.512", _SHORTS, table, numbers)
    sixteen, upper = ir.Constant(_WORDS, [16] * LANES), ir.Constant(_WORDS, [-65536] * LANES)
    words = builder.bitcast(builder.sub(numbers, ir.Constant(_SHORTS, [kind.offset] * (2 * LANES))), _WORDS)
    first, second = (
        builder.bitcast(builder.sitofp(builder.ashr(each, sixteen), _FLOATS), _WORDS)
        for each in (builder.shl(words, sixteen), words)
    )
    return builder.or_(builder.lshr(first, sixteen), builder.and_(second, upper))


def _index(value: int) -> Any:
    return ir.Constant(_I64, value)
