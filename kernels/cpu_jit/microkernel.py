"""The microkernels: a tile of a matrix product in vector registers, up to 8 rows of `x` by 48 rows of the
matrix.

24 registers hold sums, three the matrix, and numbers of `x` are read when they are multiplied. Compilers do
not generate this from loops: pairs of bfloat16 have their own instruction, and 24 sums must stay in registers
between two columns. So it is written instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu_jit.llvm_intrinsics import float16
from kernels.cpu_jit.vectors import LANES, NARROW, BFloat, broadcast, call, read_ahead, read_lanes

PANEL = 48  # rows of the matrix packed together

_Sums = list[list[Any]]  # by row and part of the panel, registers


_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS = ir.VectorType(_F32, LANES)
_PAIRS = ir.VectorType(BFloat(), 2 * LANES)
_FMA = "llvm.fma.v16f32"


class _Pairs:
    """`x` and panel in bfloat16."""

    columns = 2

    def read(self, builder: ir.IRBuilder, panel: Any, part: int) -> Any:
        return _load(builder, panel, part * 2 * LANES, _PAIRS)

    def broadcast(self, builder: ir.IRBuilder, x: Any, column: Any) -> Any:
        return builder.bitcast(broadcast(builder, _load(builder, x, column, _I32)), _PAIRS)

    def multiply(self, builder: ir.IRBuilder, sums: Any, matrix: Any, x: Any) -> Any:
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, sums, matrix, x)


class _Floats:
    """`x` in float32, the panel in float32 or float16."""

    columns = 1

    def read(self, builder: ir.IRBuilder, panel: Any, part: int) -> Any:
        return read_lanes(builder, panel, part * LANES)

    def broadcast(self, builder: ir.IRBuilder, x: Any, column: Any) -> Any:
        return broadcast(builder, _load(builder, x, column, _F32))

    def multiply(self, builder: ir.IRBuilder, sums: Any, matrix: Any, x: Any) -> Any:
        return call(builder, _FMA, _SUMS, matrix, x, sums)


_KINDS: dict[Any, _Pairs | _Floats] = {  # by elements of the panel
    types.float32: _Floats(),
    float16: _Floats(),
    types.uint16: _Pairs(),
}


def microkernel(rows: int, parts: int = PANEL // LANES, *, onto: bool = False, ahead: bool = False) -> Any:
    """See the function in it. `parts` of LANES columns of the product at once. `onto`: the product is added
    to what is at `out`, float32. `ahead`: the panel comes from memory."""

    @intrinsic
    def tile(
        typing: Any, x: Any, apart: Any, width: Any, panel: Any, line: Any, out: Any, height: Any
    ) -> Any:
        """Store the product of `rows` rows at `x`, `apart`, of `width` columns, with a panel to `out`,
        float32 or bfloat16, with rows `height` apart. `line`: rows of the matrix packed together."""
        generate = _generator(rows, parts, onto, ahead, _KINDS[panel.dtype], out.dtype)
        return types.void(x, apart, width, panel, line, out, height), generate

    return tile


def _generator(
    rows: int, parts: int, onto: bool, ahead: bool, kind: _Pairs | _Floats, stored: Any
) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, apart, width, panel, line, out, height = args
        lines = [builder.gep(x, [builder.mul(apart, _number(row))]) for row in range(rows)]
        targets = [
            [
                builder.gep(out, [builder.add(builder.mul(height, _number(row)), _number(part * LANES))])
                for part in range(parts)
            ]
            for row in range(rows)
        ]

        def before(target: Any) -> Any:
            return _load(builder, target, 0, _SUMS) if onto else ir.Constant(_SUMS, [0.0] * LANES)

        def add(column: Any, sums: _Sums) -> _Sums:
            at = builder.gep(panel, [builder.mul(column, line)])
            matrix = [kind.read(builder, at, part) for part in range(parts)]
            if ahead:
                read_ahead(builder, at, 64 * parts)
            found = []
            for source, own in zip(lines, sums, strict=True):
                own_x = kind.broadcast(builder, source, column)
                found.append([kind.multiply(builder, *each, own_x) for each in zip(own, matrix, strict=True)])
            return found

        start = [[before(target) for target in own] for own in targets]
        for own, ends in zip(targets, _sum_up(builder, start, width, kind.columns, add), strict=True):
            for target, end in zip(own, ends, strict=True):
                _store(builder, end, target, stored)
        return context.get_dummy_value()

    return generate


def _sum_up(
    builder: ir.IRBuilder, start: _Sums, count: Any, step: int, add: Callable[[Any, _Sums], _Sums]
) -> _Sums:
    """The sums of a tile after a loop from 0 to `count`, from `start` on: `add` returns the sums after an
    index."""
    entry, loop = builder.block, builder.append_basic_block("loop")
    behind = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    sums = [[builder.phi(_SUMS) for _ in own] for own in start]
    found = add(at, sums)
    following = builder.add(at, _number(step))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, behind)
    at.add_incoming(_number(0), entry)
    at.add_incoming(following, loop)
    for before, own, ends in zip(start, sums, found, strict=True):
        for first, each, end in zip(before, own, ends, strict=True):
            each.add_incoming(first, entry)
            each.add_incoming(end, loop)
    builder.position_at_end(behind)
    return found


def _store(builder: ir.IRBuilder, sums: Any, out: Any, dtype: Any) -> None:
    """Store LANES sums, as float32 or rounded to bfloat16."""
    if dtype == types.float32:
        builder.store(sums, builder.bitcast(out, _SUMS.as_pointer()), align=4)
    else:
        builder.store(builder.fptrunc(sums, NARROW), builder.bitcast(out, NARROW.as_pointer()), align=2)


def _number(value: int) -> Any:
    """An index."""
    return ir.Constant(_I64, value)


def _load(builder: ir.IRBuilder, pointer: Any, offset: Any, kind: Any) -> Any:
    """Load a `kind` from `offset` elements after `pointer`."""
    at = builder.gep(pointer, [_number(offset) if isinstance(offset, int) else offset])
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=1)
