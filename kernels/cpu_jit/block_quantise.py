"""Quantises the input of block_weights.py: 32 columns of a row at a time, to integers with one scale.

Integers have 16 or 8 bits. They are stored so, 32 of them after the other:

    VNNI   the upper bytes, then the lower ones, both signed; or one byte
    AVX2   int16, each four in the order 0, 2, 1, 3; then, if they have 8 bits, bytes
    tiles  see block_tiles.py
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from kernels.cpu_jit.block_microkernel import (
    BLOCK,
    FACTS,
    HALVES,
    SCALE,
    SHIFT,
    START_8,
    START_128,
    VNNI,
    put,
)
from kernels.cpu_jit.block_tiles import TILE_ROWS
from kernels.cpu_jit.llvm_intrinsics import (
    bf16_at,
    f32_at,
    fast,
    fetch_add,
    float_of,
    i8_at,
    i32_at,
    offset_by,
)
from kernels.cpu_jit.thread_team import Kernel
from kernels.cpu_jit.vectors import LANES, broadcast, call, read_lanes

PIECE_ROWS = 4  # of `x`
PIECE_BLOCKS = 9  # of a tile of rows of `x`
# The largest number of `x`, by terms: the upper and the lower byte of 32,639 are 127, as signed ones.
_MOST = (np.float32(127), np.float32(127 * 256 + 127))
_LEAST, _ZERO = np.float32(1e-30), np.float32(0)  # a block of smaller numbers becomes zeros

_I8, _I16, _I32, _I64, _F32 = (*map(ir.IntType, (8, 16, 32, 64)), ir.FloatType())
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


@intrinsic
def _largest(typing: Any, x: Any) -> Any:
    """The bits of the largest absolute number of a block. Not as floats: NaN would be less than any number,
    and the result finite."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        both = [builder.bitcast(read_lanes(builder, args[0], at), _WORDS) for at in (0, LANES)]
        positive = [builder.and_(each, _words(0x7FFFFFFF)) for each in both]
        most = call(builder, "llvm.smax.v16i32", _WORDS, *positive)
        return call(builder, "llvm.vector.reduce.smax.v16i32", _I32, most)

    return types.int32(x), generate


def _stores(terms: int) -> Any:
    @intrinsic
    def numbers(typing: Any, x: Any, inverse: Any, start: Any, out: Any) -> Any:
        """Store half a block of integers, `x` times `inverse`, from `start` on, in the block at `out`;
        returns their sum."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, inverse, start, out = args
            whole = _integers(builder, x, inverse, start)
            first = 0
            for each in _split(builder, whole, terms):
                size = each.type.element.width // 8
                at = builder.mul(start, ir.Constant(_I64, size))
                put(builder, each, out, builder.add(at, ir.Constant(_I64, first)))
                first += size * BLOCK
            return call(builder, "llvm.vector.reduce.add.v16i32", _I32, whole)

        return types.int32(x, inverse, types.int64, out), generate

    return numbers


def _split(builder: ir.IRBuilder, whole: Any, terms: int) -> list[Any]:
    """Integers as they are stored."""
    parts, shorts = [whole], []
    if not VNNI:
        shorts = [_even_and_odd(builder, builder.trunc(whole, ir.VectorType(_I16, LANES)))]
        parts = parts[: 2 - terms]
    elif terms == 2:
        upper, lower = _two_bytes_of(builder, whole)
        parts = [builder.ashr(upper, _words(8)), lower]
    return shorts + [builder.trunc(each, ir.VectorType(_I8, LANES)) for each in parts]


def _two_bytes_of(builder: ir.IRBuilder, whole: Any) -> tuple[Any, Any]:
    """Integers as 256 times the upper byte, and the lower one, both signed."""
    upper = builder.and_(builder.add(whole, _words(128)), _words(-256))
    return upper, builder.sub(whole, upper)


def _even_and_odd(builder: ir.IRBuilder, shorts: Any) -> Any:
    """Each four numbers in the order 0, 2, 1, 3."""
    order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)]
    return builder.shuffle_vector(shorts, shorts, ir.Constant(_WORDS, order))


def _in_bfloat16(terms: int) -> Any:
    @intrinsic
    def numbers(typing: Any, x: Any, inverse: Any, out: Any) -> Any:
        """Store a block of a row for tiles at `out`: 256 times the upper bytes and, after those of all rows
        of the tile, the lower ones; or integers of one byte. Returns the sum of the integers."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, inverse, out = args
            halves = [_integers(builder, x, inverse, ir.Constant(_I64, first)) for first in (0, LANES)]
            for place, whole in enumerate(halves):
                parts = (whole,) if terms == 1 else _two_bytes_of(builder, whole)
                for term, each in enumerate(parts):
                    bits = builder.bitcast(builder.sitofp(each, _FLOATS), _WORDS)
                    shorts = builder.trunc(builder.lshr(bits, _words(16)), ir.VectorType(_I16, LANES))
                    at = 2 * (term * TILE_ROWS * BLOCK + place * LANES)
                    put(builder, _even_and_odd(builder, shorts), out, at)
            return call(builder, "llvm.vector.reduce.add.v16i32", _I32, builder.add(*halves))

        return types.int32(x, inverse, out), generate

    return numbers


def _integers(builder: ir.IRBuilder, x: Any, inverse: Any, start: Any) -> Any:
    """Half a block of `x`, from `start` on, times `inverse`, rounded."""
    exact = builder.fmul(read_lanes(builder, builder.gep(x, [start]), 0), broadcast(builder, inverse))
    return builder.fptosi(call(builder, "llvm.rint.v16f32", _FLOATS, exact), _WORDS)


def _words(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * LANES)


_one_byte, _two_bytes = _stores(1), _stores(2)
_one_bfloat16, _two_bfloat16 = _in_bfloat16(1), _in_bfloat16(2)


@fast
def _numbers(x: Any, inverse: Any, start: int, out: Any, terms: int) -> Any:
    return _two_bytes(x, inverse, start, out) if terms == 2 else _one_byte(x, inverse, start, out)


@fast
def _range(x: Any, limit: Any) -> Any:
    """The largest number of a block, and the factor to integers up to `limit`."""
    most = float_of(_largest(x))
    return most, limit / most if most > _LEAST else _ZERO


@fast
def _quantise(x: Any, p: Any) -> None:
    out, facts, sums, rows, width, terms, size = (
        i8_at(p[2]),
        f32_at(p[3]),
        i32_at(p[3]),
        p[4],
        p[5],
        p[6],
        p[7],
    )
    blocks, limit = width // BLOCK, _MOST[terms - 1]
    while True:
        first = fetch_add(p) * PIECE_ROWS * blocks
        if first >= rows * blocks:
            return
        for block in range(first, min(first + PIECE_ROWS * blocks, rows * blocks)):
            own, to, at = offset_by(x, block * BLOCK), offset_by(out, block * size), block * FACTS
            most, inverse = _range(own, limit)
            half = _numbers(own, inverse, 0, to, terms)
            rest = _numbers(own, inverse, BLOCK // 2, to, terms)
            whole = half + rest
            sums[at + HALVES], sums[at + HALVES + 1] = -128 * half, -128 * rest
            sums[at + START_8], sums[at + START_128] = -8 * whole, -128 * whole
            scale = most / limit
            facts[at + SCALE], facts[at + SHIFT] = scale, scale * np.float32(whole)


@fast
def _quantise_for_tiles(p: Any) -> None:
    """A piece: PIECE_BLOCKS blocks of a tile of rows."""
    x, out, facts, rows, blocks, terms = f32_at(p[1]), i8_at(p[2]), f32_at(p[3]), p[4], p[5] // BLOCK, p[6]
    pieces, limit = (blocks + PIECE_BLOCKS - 1) // PIECE_BLOCKS, _MOST[terms - 1]  # pieces of a tile
    while True:
        piece = fetch_add(p)
        tile, first = piece // pieces, piece % pieces * PIECE_BLOCKS
        if tile * TILE_ROWS >= rows:
            return
        for row in range(TILE_ROWS):
            for block in range(first, min(first + PIECE_BLOCKS, blocks)):
                at, source = (tile * blocks + block) * TILE_ROWS, tile * TILE_ROWS + row
                scale, shift = _ZERO, _ZERO
                if source < rows:
                    own = offset_by(x, (source * blocks + block) * BLOCK)
                    to = offset_by(out, (at * terms + row) * 2 * BLOCK)
                    most, inverse = _range(own, limit)
                    whole = _two_bfloat16(own, inverse, to) if terms == 2 else _one_bfloat16(own, inverse, to)
                    scale = most / limit
                    shift = scale * np.float32(whole)
                facts[2 * at + row], facts[2 * at + TILE_ROWS + row] = scale, shift


def _of_bf16(p: Any) -> None:
    _quantise(bf16_at(p[1]), p)


def _of_f32(p: Any) -> None:
    _quantise(f32_at(p[1]), p)


def _for_tiles(p: Any) -> None:
    _quantise_for_tiles(p)


QUANTISE = {torch.bfloat16: Kernel(_of_bf16), torch.float32: Kernel(_of_f32)}  # by dtype of `x`
FOR_TILES = Kernel(_for_tiles)
