"""The microkernels of block_weights.py: a few rows of `x` in integers by a panel of a matrix in 4 or 8 bits.

A register has a word of four columns for each of LANES rows of the matrix, so its product with broadcast
numbers of `x` needs no shuffle. With VNNI an instruction multiplies unsigned by signed bytes and adds up in
int32. Numbers of `x` in 16 bits are two bytes there, and the block is multiplied twice: first with the upper
bytes, whose sums are shifted by 8 bits, then with the lower ones. AVX2 multiplies pairs in int16 and adds
them up in int32; there the two bytes of a word that are a pair are the even or the odd ones, so the numbers
of `x` lie in that order. Matrices in 4 bits by `x` in 8 are multiplied in bytes, and a block is added up in
int16 (16 * 15 * 127 = 30,480). With AMX many rows are multiplied by block_tiles.py.

The sums of a block are exact integers, below 32 * 255 * 2^15 = 2^28; they become float32 block by block in
one order, so that the bits of a row do not depend on the tile that it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

import kernels.cpu_jit
from kernels.cpu_jit.vectors import call, loop, read_ahead

VNNI = kernels.cpu_jit.has("avx512vnni")
LANES = 16 if VNNI else 8
PARTS = 2  # registers of a panel
PANEL = PARTS * LANES  # rows of the matrix packed together
BLOCK = 32  # columns with a scale of `x`
# The words that a block of `x` has beside its numbers: its scale, the sum of its numbers times the scale, and
# where integer sums start, for an offset of 8, of 128, and of 128 in the first and the last 16 columns: that
# offset times the negative sum of the numbers.
SCALE, SHIFT, START_8, START_128, HALVES, FACTS = 0, 1, 2, 3, 4, 6
_STARTS = {8: START_8, 128: START_128}

_HALF = BLOCK // 2

_I8, _I16, _I32, _I64, _F32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_SCALES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS, _BYTES = ir.VectorType(_I16, 2 * LANES), ir.VectorType(_I8, 4 * LANES)
_FMA = f"llvm.fma.v{LANES}f32"


@dataclass(frozen=True, slots=True)
class Format:
    """How a block of a panel is stored: the numbers, then the scales, then the minima if it has them, float16
    by row of the panel. With `by_row` the scales, float32, follow the last block.

    value = scale * (number - offset) + minimum       number: unsigned, of `bits`; offset: of the format
    """

    bits: int  # 4, 8
    offset: int = 0
    minimum: bool = False
    columns: int = BLOCK  # that have a scale: 32, or 16 without minimum
    by_row: bool = False  # a scale for all columns

    @property
    def bytes(self) -> int:
        """The size of a block of a panel."""
        scales = 0 if self.by_row else BLOCK // self.columns + self.minimum
        return PANEL * (BLOCK * self.bits // 8 + 2 * scales)

    @property
    def stored_offset(self) -> int:
        """What is added to a number before it is stored. AVX2 widens signed bytes; VNNI needs unsigned
        ones."""
        return 0 if self.bits == 4 or VNNI else -self.offset


def x_bytes(terms: int) -> int:
    """The size of a block of `x`, whose numbers have `terms` bytes."""
    return BLOCK * (terms if VNNI else 4 - terms)


def in_bytes(format_: Format, terms: int) -> bool:
    """Whether AVX2 multiplies bytes, which follow the int16 of a block of `x`."""
    return not VNNI and format_.bits == 4 and terms == 1


_NIBBLES = Format(4)
_Tile = list[list[Any]]  # by row of `x` and part of the panel, registers


def tile(rows: int, format_: Format, terms: int, *, unpacked: bool = False) -> Any:
    """See the function in it. `terms`: bytes of a number of `x`. `unpacked`, on AVX2: the numbers of the
    panel are at `wide`, by `unpack`."""

    @intrinsic
    def multiply(
        typing: Any, x: Any, facts: Any, blocks: Any, panel: Any, out: Any, height: Any, wide: Any
    ) -> Any:
        """Store the product of `rows` rows of `blocks` blocks at `x` with a panel to `out`, float32 or
        bfloat16, with rows `height` apart. `facts`: FACTS words of each block of `x`."""
        signature = types.void(x, facts, blocks, panel, out, height, wide)
        return signature, _generator(rows, format_, terms, out.dtype, unpacked=unpacked)

    return multiply


WIDE_BYTES = 2 * BLOCK * PANEL  # of a block of an unpacked panel


def unpack(format_: Format) -> Any:
    """See the function in it."""

    @intrinsic
    def widen(typing: Any, blocks: Any, panel: Any, wide: Any) -> Any:
        """Store the numbers of `blocks` blocks of a panel at `wide`, as int16, on AVX2: many rows of `x` read
        them there."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            blocks, panel, wide = args

            def store(block: Any, sums: list[Any]) -> list[Any]:
                chunk = builder.gep(panel, [builder.mul(block, _index(format_.bytes))])
                to = builder.gep(wide, [builder.mul(block, _index(WIDE_BYTES))])
                read_ahead(builder, chunk, format_.bytes)
                for column, part, odd in product(range(0, BLOCK, 4), range(PARTS), range(2)):
                    found = _shorts(builder, format_, chunk, column, odd, part)
                    put(builder, found, to, _place(column, odd, part))
                return sums

            loop(builder, blocks, [], store)
            return context.get_dummy_value()

        return types.void(blocks, panel, wide), generate

    return widen


def put(builder: ir.IRBuilder, found: Any, to: Any, offset: Any = 0) -> None:
    at = builder.gep(to, [_index(offset) if isinstance(offset, int) else offset])
    builder.store(found, builder.bitcast(at, found.type.as_pointer()), align=1)


def _plus_minima(builder: ir.IRBuilder, sums: list[Any], of_x: list[Any], minima: list[Any]) -> list[Any]:
    added = [_broadcast(builder, load(builder, each, SHIFT, _F32)) for each in of_x]
    return [
        call(builder, _FMA, _FLOATS, minima[i % PARTS], added[i // PARTS], old) for i, old in enumerate(sums)
    ]


def _place(column: int, odd: int, part: int) -> int:
    """Where an unpacked block has the columns `column + odd` and `column + odd + 2`."""
    return 2 * PANEL * (column + 2 * odd) + part * 4 * LANES


def _generator(rows: int, kind: Format, terms: int, stored: Any, *, unpacked: bool) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, facts, blocks, panel, out, height, wide = args

        def add(block: Any, sums: list[Any]) -> list[Any]:
            chunk = builder.gep(panel, [builder.mul(block, _index(kind.bytes))])
            places = [builder.add(builder.mul(blocks, _index(row)), block) for row in range(rows)]
            of_x = [builder.gep(facts, [builder.mul(place, _index(FACTS))]) for place in places]
            lines = [builder.gep(x, [builder.mul(place, _index(x_bytes(terms)))]) for place in places]
            apart = builder.gep(wide, [builder.mul(block, _index(WIDE_BYTES))]) if unpacked else None
            if not unpacked:
                read_ahead(builder, chunk, kind.bytes)
            at = BLOCK * PANEL * kind.bits // 8
            for first in range(0, BLOCK, kind.columns):
                whole = _integers(builder, kind, terms, lines, of_x, chunk, first, apart)
                factors = None if kind.by_row else scales(builder, chunk, at)
                at += 2 * PANEL
                sums = _scaled(builder, sums, whole, of_x, factors)
            if kind.minimum:
                sums = _plus_minima(builder, sums, of_x, scales(builder, chunk, at))
            return sums

        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        for i, end in enumerate(loop(builder, blocks, [zero] * (rows * PARTS), add)):
            row, part = divmod(i, PARTS)
            target = builder.add(builder.mul(height, _index(row)), _index(part * LANES))
            if kind.by_row:
                at = builder.add(builder.mul(blocks, _index(kind.bytes)), _index(4 * part * LANES))
                end = builder.fmul(end, load(builder, panel, at, _FLOATS))
            _store(builder, end, builder.gep(out, [target]), stored)
        return context.get_dummy_value()

    return generate


def _scaled(
    builder: ir.IRBuilder, sums: list[Any], whole: _Tile, of_x: list[Any], factors: list[Any] | None
) -> list[Any]:
    """`sums`, with the integers of a block times the scale of `x` and, if given, those of the matrix."""
    found = []
    for row, own in enumerate(whole):
        scale = _broadcast(builder, load(builder, of_x[row], SCALE, _F32))
        for part, integers in enumerate(own):
            first, second, old = builder.sitofp(integers, _FLOATS), scale, sums[row * PARTS + part]
            if factors is not None:
                first, second = builder.fmul(first, scale), factors[part]
            found.append(call(builder, _FMA, _FLOATS, first, second, old))
    return found


def _integers(
    builder: ir.IRBuilder,
    kind: Format,
    terms: int,
    lines: list[Any],
    of_x: list[Any],
    chunk: Any,
    first: int,
    wide: Any = None,
) -> _Tile:
    """The sums of products of the columns from `first` on that share a scale, by row and part."""
    starts: list[Any] = [ir.Constant(_WORDS, None)] * len(lines)
    if offset := kind.offset + kind.stored_offset:
        fact = _STARTS[offset] if kind.columns == BLOCK else HALVES + first // kind.columns
        starts = [_broadcast(builder, load(builder, each, fact, _I32)) for each in of_x]
    columns = [*range(first, first + kind.columns, 4)]
    if kind.bits == 4:  # the halves of a byte one after the other
        columns.sort(key=lambda column: column % _HALF)
    if in_bytes(kind, terms):
        return _by_bytes(builder, lines, starts, chunk)
    if not VNNI:
        return _by_pairs(builder, kind, lines, starts, chunk, first, wide)
    found = [[ir.Constant(_WORDS, None)] * PARTS for _ in lines]
    for term in range(terms):
        if term:
            found = [[builder.shl(each, ir.Constant(_WORDS, [8] * LANES)) for each in own] for own in found]
        if term + 1 == terms:
            found = [
                [builder.add(each, start) for each in own] for own, start in zip(found, starts, strict=True)
            ]
        for column in columns:
            matrix = [_numbers(builder, kind, chunk, column, part) for part in range(PARTS)]
            for row, line in enumerate(lines):
                four = _broadcast(builder, load(builder, line, term * BLOCK + column, _I32))
                # A word is four bytes: the signature before LLVM 22, which still accepts it.
                name = "llvm.x86.avx512.vpdpbusd.512"
                found[row] = [
                    call(builder, name, _WORDS, old, read, four)
                    for old, read in zip(found[row], matrix, strict=True)
                ]
    return found


def _by_pairs(
    builder: ir.IRBuilder,
    kind: Format,
    lines: list[Any],
    starts: list[Any],
    chunk: Any,
    first: int,
    wide: Any,
) -> _Tile:
    """See _integers: on AVX2. A loop, since LLVM would order unrolled steps part by part, and keep all
    numbers of `x` on the stack."""

    def add(step: Any, sums: list[Any]) -> list[Any]:
        source, stride = (chunk, 4 * PANEL) if wide is None else (wide, 8 * PANEL)
        word = builder.gep(source, [builder.mul(step, _index(stride))])
        of_x = [builder.gep(line, [builder.mul(step, _index(8))]) for line in lines]
        found = list(sums)
        for column in range(first, first + kind.columns, _HALF):
            for odd in range(2):
                matrix = [
                    _shorts(builder, kind, word, column, odd, part)
                    if wide is None
                    else load(builder, word, _place(column, odd, part), _SHORTS)
                    for part in range(PARTS)
                ]
                for row, at in enumerate(of_x):
                    two = _broadcast(builder, load(builder, at, 2 * column + 4 * odd, _I32))
                    for part, read in enumerate(matrix):
                        pairs = builder.bitcast(two, _SHORTS)
                        pairs = call(builder, "llvm.x86.avx2.pmadd.wd", _WORDS, read, pairs)
                        found[row * PARTS + part] = builder.add(found[row * PARTS + part], pairs)
        return found

    before = [start for start in starts for _ in range(PARTS)]
    found = loop(builder, _index(_HALF // 4), before, add)
    return [found[row * PARTS : (row + 1) * PARTS] for row in range(len(lines))]


def _by_bytes(builder: ir.IRBuilder, lines: list[Any], starts: list[Any], chunk: Any) -> _Tile:
    """See _integers: on AVX2, of 4 bits by bytes of `x`."""

    def add(step: Any, sums: list[Any]) -> list[Any]:
        word = builder.gep(chunk, [builder.mul(step, _index(4 * PANEL))])
        of_x = [builder.gep(line, [builder.mul(step, _index(4))]) for line in lines]
        found = list(sums)
        for column in (0, _HALF):
            matrix = [_numbers(builder, _NIBBLES, word, column, part) for part in range(PARTS)]
            for row, at in enumerate(of_x):
                four = _broadcast(builder, load(builder, at, 2 * BLOCK + column, _I32))
                for part, read in enumerate(matrix):
                    both = (builder.bitcast(each, _BYTES) for each in (read, four))
                    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, *both)
                    found[row * PARTS + part] = builder.add(found[row * PARTS + part], pairs)
        return found

    none = [ir.Constant(_SHORTS, None)] * (len(lines) * PARTS)
    ones = ir.Constant(_SHORTS, [1] * (2 * LANES))
    whole = [
        call(builder, "llvm.x86.avx2.pmadd.wd", _WORDS, pairs, ones)
        for pairs in loop(builder, _index(_HALF // 4), none, add)
    ]
    return [
        [builder.add(start, each) for each in whole[row * PARTS : (row + 1) * PARTS]]
        for row, start in enumerate(starts)
    ]


def _numbers(builder: ir.IRBuilder, kind: Format, chunk: Any, column: int, part: int) -> Any:
    """Four columns of the matrix from `column` on, as bytes in the words of a register."""
    if kind.bits == 8:
        return load(builder, chunk, column * PANEL + part * 4 * LANES, _WORDS)
    words = load(builder, chunk, (column % _HALF) * PANEL + part * 4 * LANES, _WORDS)
    if column >= _HALF:  # the upper halves of the bytes
        words = builder.lshr(words, ir.Constant(_WORDS, [4] * LANES))
    return builder.and_(words, ir.Constant(_WORDS, [0x0F0F0F0F] * LANES))


def _shorts(builder: ir.IRBuilder, kind: Format, chunk: Any, column: int, odd: int, part: int) -> Any:
    """The columns `column + odd` and `column + odd + 2` of the matrix, as int16 in the words of a
    register."""
    place = column if kind.bits == 8 else column % _HALF
    pairs = builder.bitcast(load(builder, chunk, place * PANEL + part * 4 * LANES, _WORDS), _SHORTS)
    if kind.bits == 8:
        by = ir.Constant(_SHORTS, [8] * (2 * LANES))
        return builder.ashr(pairs if odd else builder.shl(pairs, by), by)
    shift = 8 * odd + 4 * (column >= _HALF)
    pairs = builder.lshr(pairs, ir.Constant(_SHORTS, [shift] * (2 * LANES)))
    return builder.and_(pairs, ir.Constant(_SHORTS, [15] * (2 * LANES)))


def scales(builder: ir.IRBuilder, chunk: Any, at: int) -> list[Any]:
    """float16 of the rows of a panel, widened, by part."""
    reads = (load(builder, chunk, at + part * 2 * LANES, _SCALES) for part in range(PARTS))
    return [builder.fpext(each, _FLOATS) for each in reads]


def _store(builder: ir.IRBuilder, sums: Any, out: Any, dtype: Any) -> None:
    """Store LANES sums, as float32 or rounded to bfloat16 (ties to even)."""
    if dtype == types.float32:
        builder.store(sums, builder.bitcast(out, _FLOATS.as_pointer()), align=4)
        return
    shorts = ir.VectorType(_I16, LANES)
    bits = builder.bitcast(sums, _WORDS)
    sixteen, one, half = (ir.Constant(_WORDS, [number] * LANES) for number in (16, 1, 0x7FFF))
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.lshr(builder.add(bits, builder.add(odd, half)), sixteen)
    builder.store(builder.trunc(rounded, shorts), builder.bitcast(out, shorts.as_pointer()), align=2)


def _broadcast(builder: ir.IRBuilder, number: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    one = builder.insert_element(undefined, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_WORDS, [0] * LANES))


def _index(value: int) -> Any:
    return ir.Constant(_I64, value)


def load(builder: ir.IRBuilder, pointer: Any, offset: Any, kind: Any) -> Any:
    at = builder.gep(pointer, [_index(offset) if isinstance(offset, int) else offset])
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=1)
