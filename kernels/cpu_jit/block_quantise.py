"""Quantises the input of block_weights.py: 32 columns of a row at a time, to integers with one scale.

Integers have 16 bits, or 8 for weights in int8. They are stored so, 32 of them after the other:

    VNNI   the upper bytes, then the lower ones, both signed; or one byte
    AVX2   int16, each four in the order 0, 2, 1, 3
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from kernels.cpu_jit.block_microkernel import BLOCK, FACTS, HALVES, SCALE, SHIFT, START_8, START_128, VNNI
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
            exact = builder.fmul(read_lanes(builder, builder.gep(x, [start]), 0), broadcast(builder, inverse))
            whole = builder.fptosi(call(builder, "llvm.rint.v16f32", _FLOATS, exact), _WORDS)
            for term, each in enumerate(_split(builder, whole, terms)):
                size = each.type.element.width // 8
                at = builder.mul(builder.add(start, ir.Constant(_I64, term * BLOCK)), ir.Constant(_I64, size))
                goal = builder.bitcast(builder.gep(out, [at]), each.type.as_pointer())
                builder.store(each, goal, align=1)
            return call(builder, "llvm.vector.reduce.add.v16i32", _I32, whole)

        return types.int32(x, inverse, types.int64, out), generate

    return numbers


def _split(builder: ir.IRBuilder, whole: Any, terms: int) -> list[Any]:
    """Integers as they are stored: one vector, or the upper bytes and the lower ones."""
    if not VNNI:
        shorts = builder.trunc(whole, ir.VectorType(_I16, LANES))
        order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)]
        return [builder.shuffle_vector(shorts, shorts, ir.Constant(_WORDS, order))]
    parts = [whole]
    if terms == 2:
        upper = builder.ashr(builder.add(whole, _words(128)), _words(8))
        parts = [upper, builder.sub(whole, builder.shl(upper, _words(8)))]
    return [builder.trunc(each, ir.VectorType(_I8, LANES)) for each in parts]


def _words(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * LANES)


_one_byte, _two_bytes = _stores(1), _stores(2)


@fast
def _numbers(x: Any, inverse: Any, start: int, out: Any, terms: int) -> Any:
    return _two_bytes(x, inverse, start, out) if terms == 2 else _one_byte(x, inverse, start, out)


@fast
def _quantise(x: Any, p: Any) -> None:
    out, facts, sums, rows, width, terms = i8_at(p[2]), f32_at(p[3]), i32_at(p[3]), p[4], p[5], p[6]
    blocks, limit = width // BLOCK, _MOST[terms - 1]
    size = BLOCK * (terms if VNNI else 2)
    while True:
        first = fetch_add(p) * PIECE_ROWS * blocks
        if first >= rows * blocks:
            return
        for block in range(first, min(first + PIECE_ROWS * blocks, rows * blocks)):
            own, to, at = offset_by(x, block * BLOCK), offset_by(out, block * size), block * FACTS
            most = float_of(_largest(own))
            inverse = limit / most if most > _LEAST else _ZERO
            half = _numbers(own, inverse, 0, to, terms)
            rest = _numbers(own, inverse, BLOCK // 2, to, terms)
            whole = half + rest
            sums[at + HALVES], sums[at + HALVES + 1] = -128 * half, -128 * rest
            sums[at + START_8], sums[at + START_128] = -8 * whole, -128 * whole
            scale = most / limit
            facts[at + SCALE], facts[at + SHIFT] = scale, scale * np.float32(whole)


def _of_bf16(p: Any) -> None:
    _quantise(bf16_at(p[1]), p)


def _of_f32(p: Any) -> None:
    _quantise(f32_at(p[1]), p)


QUANTISE = {torch.bfloat16: Kernel(_of_bf16), torch.float32: Kernel(_of_f32)}  # by dtype of `x`
