"""The microkernels of block_weights.py: a few rows of `x` in int8 by a panel of a matrix in 4 or 8 bits.

A register has a word of four columns for each of LANES rows of the matrix, so its product with four
broadcast numbers of `x` needs no shuffle. With VNNI an instruction multiplies unsigned by signed bytes and
adds up in int32. AVX2 adds up pairs in int16, which saturates: sums of 4 bits stay below it over a block (8 *
2 * 15 * 127 = 30,480), and so do pairs of 8 bits (2 * 128 * 127 = 32,512), which become int32 at once.

The sums of a block are exact integers; they become float32 block by block in one order, so that the bits of a
row do not depend on the tile that it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

import kernels.cpu_jit
from kernels.cpu_jit.vectors import call, loop

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

_I8, _I16, _I32, _I64, _F32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_SCALES = ir.VectorType(ir.HalfType(), LANES)
_BYTES, _SHORTS = ir.VectorType(_I8, 4 * LANES), ir.VectorType(_I16, 2 * LANES)
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
        """What is added to a number before it is stored. AVX2 multiplies signed bytes; VNNI needs unsigned
        ones."""
        return 0 if self.bits == 4 or VNNI else -self.offset


_Tile = list[list[Any]]  # by row of `x` and part of the panel, registers


def tile(rows: int, format_: Format) -> Any:
    """See the function in it."""

    @intrinsic
    def multiply(typing: Any, x: Any, facts: Any, blocks: Any, panel: Any, out: Any, height: Any) -> Any:
        """Store the product of `rows` int8 rows of `blocks` blocks at `x` with a panel to `out`, float32 or
        bfloat16, with rows `height` apart. `facts`: FACTS words of each block of `x`."""
        signature = types.void(x, facts, blocks, panel, out, height)
        return signature, _generator(rows, format_, out.dtype)

    return multiply


def _generator(rows: int, kind: Format, stored: Any) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, facts, blocks, panel, out, height = args

        def add(block: Any, sums: list[Any]) -> list[Any]:
            chunk = builder.gep(panel, [builder.mul(block, _index(kind.bytes))])
            places = [builder.add(builder.mul(blocks, _index(row)), block) for row in range(rows)]
            of_x = [builder.gep(facts, [builder.mul(place, _index(FACTS))]) for place in places]
            lines = [builder.gep(x, [builder.mul(place, _index(BLOCK))]) for place in places]
            at = BLOCK * PANEL * kind.bits // 8
            for first in range(0, BLOCK, kind.columns):
                whole = _integers(builder, kind, lines, of_x, chunk, first)
                factors = None if kind.by_row else _scales(builder, chunk, at)
                at += 2 * PANEL
                sums = _scaled(builder, sums, whole, of_x, factors)
            if kind.minimum:
                minima = _scales(builder, chunk, at)
                added = [_broadcast(builder, _load(builder, each, SHIFT, _F32)) for each in of_x]
                sums = [
                    call(builder, _FMA, _FLOATS, minima[i % PARTS], added[i // PARTS], old)
                    for i, old in enumerate(sums)
                ]
            return sums

        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        for i, end in enumerate(loop(builder, blocks, [zero] * (rows * PARTS), add)):
            row, part = divmod(i, PARTS)
            target = builder.add(builder.mul(height, _index(row)), _index(part * LANES))
            if kind.by_row:
                at = builder.add(builder.mul(blocks, _index(kind.bytes)), _index(4 * part * LANES))
                end = builder.fmul(end, _load(builder, panel, at, _FLOATS))
            _store(builder, end, builder.gep(out, [target]), stored)
        return context.get_dummy_value()

    return generate


def _scaled(
    builder: ir.IRBuilder, sums: list[Any], whole: _Tile, of_x: list[Any], factors: list[Any] | None
) -> list[Any]:
    """`sums`, with the integers of a block times the scale of `x` and, if given, those of the matrix."""
    found = []
    for row, own in enumerate(whole):
        scale = _broadcast(builder, _load(builder, of_x[row], SCALE, _F32))
        for part, integers in enumerate(own):
            first, second, old = builder.sitofp(integers, _FLOATS), scale, sums[row * PARTS + part]
            if factors is not None:
                first, second = builder.fmul(first, scale), factors[part]
            found.append(call(builder, _FMA, _FLOATS, first, second, old))
    return found


def _integers(
    builder: ir.IRBuilder, kind: Format, lines: list[Any], of_x: list[Any], chunk: Any, first: int
) -> _Tile:
    """The sums of products of the columns from `first` on that share a scale, by row and part."""
    add = _Vnni(builder) if VNNI else _Avx2(builder, kind.bits)
    starts: list[Any] = [ir.Constant(_WORDS, None)] * len(lines)
    if offset := kind.offset + kind.stored_offset:
        fact = _STARTS[offset] if kind.columns == BLOCK else HALVES + first // kind.columns
        starts = [_broadcast(builder, _load(builder, each, fact, _I32)) for each in of_x]
    found = [[add.start(start) for _ in range(PARTS)] for start in starts]
    for column in range(first, first + kind.columns, 4):
        matrix = [_numbers(builder, kind, chunk, column, part) for part in range(PARTS)]
        for row, line in enumerate(lines):
            four = _broadcast(builder, _load(builder, line, column, _I32))
            found[row] = [add(old, read, four) for old, read in zip(found[row], matrix, strict=True)]
    return [[add.end(each, start) for each in own] for own, start in zip(found, starts, strict=True)]


def _numbers(builder: ir.IRBuilder, kind: Format, chunk: Any, column: int, part: int) -> Any:
    """Four columns of the matrix from `column` on, in the words of a register."""
    if kind.bits == 8:
        return _load(builder, chunk, column * PANEL + part * 4 * LANES, _WORDS)
    words = _load(builder, chunk, (column % 16) * PANEL + part * 4 * LANES, _WORDS)
    if column >= 16:  # the upper halves of the bytes
        words = builder.lshr(words, ir.Constant(_WORDS, [4] * LANES))
    return builder.and_(words, ir.Constant(_WORDS, [0x0F0F0F0F] * LANES))


class _Vnni:
    """Adds up in int32."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder = builder

    def start(self, start: Any) -> Any:
        return start

    def __call__(self, old: Any, matrix: Any, four: Any) -> Any:
        # A word is four bytes: the signature before LLVM 22, which still accepts it.
        return call(self._builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, old, matrix, four)

    def end(self, sums: Any, start: Any) -> Any:
        return sums


class _Avx2:
    """Adds up pairs in int16, and these in int32: at the end for 4 bits, at once for 8 bits, whose numbers
    are signed: their absolute values are multiplied with `x` times their signs."""

    def __init__(self, builder: ir.IRBuilder, bits: int) -> None:
        self._builder, self._bits = builder, bits

    def start(self, start: Any) -> Any:
        return ir.Constant(_SHORTS if self._bits == 4 else _WORDS, None)

    def __call__(self, old: Any, matrix: Any, four: Any) -> Any:
        builder = self._builder
        unsigned, signed = builder.bitcast(matrix, _BYTES), builder.bitcast(four, _BYTES)
        if self._bits == 8:
            sign = "llvm.x86.avx2.psign.b"
            signed = call(builder, sign, _BYTES, signed, unsigned)
            unsigned = call(builder, sign, _BYTES, unsigned, unsigned)
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, unsigned, signed)
        return builder.add(old, pairs if self._bits == 4 else self._wide(pairs))

    def end(self, sums: Any, start: Any) -> Any:
        wide = self._wide(sums) if self._bits == 4 else sums
        return self._builder.add(wide, start)

    def _wide(self, pairs: Any) -> Any:
        ones = ir.Constant(_SHORTS, [1] * (2 * LANES))
        return call(self._builder, "llvm.x86.avx2.pmadd.wd", _WORDS, pairs, ones)


def _scales(builder: ir.IRBuilder, chunk: Any, at: int) -> list[Any]:
    """float16 of the rows of a panel, widened, by part."""
    reads = (_load(builder, chunk, at + part * 2 * LANES, _SCALES) for part in range(PARTS))
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


def _load(builder: ir.IRBuilder, pointer: Any, offset: Any, kind: Any) -> Any:
    at = builder.gep(pointer, [_index(offset) if isinstance(offset, int) else offset])
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=1)
