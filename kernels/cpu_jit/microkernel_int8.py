"""The microkernel of int8: a tile of up to 4 rows of `x` by 48 rows of the matrix. See
kernels.cpu_jit.microkernel.

The instruction adds up four products of an unsigned and a signed byte. So bytes of the matrix are stored with
128 added, and the sums of a block start at -128 times the sum of `x`. The sums are exact; at the end of a
block of columns, which has its own scale in each row of `x`, they become float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu_jit.microkernel import PANEL, Sums, load, number, store, sum_up
from kernels.cpu_jit.vectors import LANES, broadcast, call

BLOCK = 32  # columns
_AT_ONCE = 4  # columns of an instruction
_WIDE = PANEL // LANES
_I32, _F32 = ir.IntType(32), ir.FloatType()
_WORDS, _SUMS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
# A word is four bytes: the signature before LLVM 22, which still accepts it.
_MULTIPLY, _FMA = "llvm.x86.avx512.vpdpbusd.512", "llvm.fma.v16f32"


def microkernel_int8(rows: int) -> Any:
    """See the function in it."""

    @intrinsic
    def tile(
        typing: Any,
        x: Any,
        of_x: Any,
        starts: Any,
        blocks: Any,
        panel: Any,
        scales: Any,
        out: Any,
        height: Any,
    ) -> Any:
        """Store the product of `rows` int8 rows of `blocks` blocks at `x` with a panel to `out`, float32 or
        bfloat16, with rows `height` apart. `of_x` has the scale of each block, `starts` the start of its
        sums, `scales` the scales of the panel's rows."""
        return types.void(x, of_x, starts, blocks, panel, scales, out, height), _generator(rows, out.dtype)

    return tile


def _generator(rows: int, stored: Any) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, of_x, starts, blocks, panel, scales, out, height = args

        def add(block: Any, sums: Sums) -> Sums:
            at = builder.gep(panel, [builder.mul(block, number(BLOCK * PANEL))])
            places = [builder.add(builder.mul(blocks, number(row)), block) for row in range(rows)]
            found = []
            for own, place, whole in zip(sums, places, _block(builder, x, starts, places, at), strict=True):
                scale = broadcast(builder, load(builder, of_x, place, _F32))
                floats = [builder.sitofp(each, _SUMS) for each in whole]
                pairs = zip(floats, own, strict=True)
                found.append([call(builder, _FMA, _SUMS, each, scale, old) for each, old in pairs])
            return found

        for row, ends in enumerate(sum_up(builder, rows, blocks, 1, add)):
            for part, end in enumerate(ends):
                target = builder.add(builder.mul(height, number(row)), number(part * LANES))
                scaled = builder.fmul(end, load(builder, scales, part * LANES, _SUMS))
                store(builder, scaled, builder.gep(out, [target]), stored)
        return context.get_dummy_value()

    return generate


def _block(builder: ir.IRBuilder, x: Any, starts: Any, places: list[Any], panel: Any) -> list[list[Any]]:
    """The integer sums of a block, by row and part of the panel."""
    found = [[broadcast(builder, load(builder, starts, place, _I32))] * _WIDE for place in places]
    lines = [builder.gep(x, [builder.mul(place, number(BLOCK))]) for place in places]
    for column in range(0, BLOCK, _AT_ONCE):
        parts = [(column * PANEL) + part * _AT_ONCE * LANES for part in range(_WIDE)]
        matrix = [load(builder, panel, part, _WORDS) for part in parts]
        for row, line in enumerate(lines):
            four = broadcast(builder, load(builder, line, column, _I32))
            found[row] = [
                call(builder, _MULTIPLY, _WORDS, old, read, four)
                for old, read in zip(found[row], matrix, strict=True)
            ]
    return found
