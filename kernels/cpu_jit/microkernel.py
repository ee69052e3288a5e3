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

from kernels.cpu_jit.vectors import LANES, broadcast, call

PANEL = 48  # rows of the matrix packed together
_WIDE = PANEL // LANES

_Sums = list[list[Any]]  # by row and part of the panel, registers


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS = ir.VectorType(_F32, LANES)
_PAIRS, _NARROW = ir.VectorType(_BFloat(), 2 * LANES), ir.VectorType(_BFloat(), LANES)
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
    """`x` and panel in float32."""

    columns = 1

    def read(self, builder: ir.IRBuilder, panel: Any, part: int) -> Any:
        return _load(builder, panel, part * LANES, _SUMS)

    def broadcast(self, builder: ir.IRBuilder, x: Any, column: Any) -> Any:
        return broadcast(builder, _load(builder, x, column, _F32))

    def multiply(self, builder: ir.IRBuilder, sums: Any, matrix: Any, x: Any) -> Any:
        return call(builder, _FMA, _SUMS, matrix, x, sums)


_KINDS: dict[Any, _Pairs | _Floats] = {types.float32: _Floats(), types.uint16: _Pairs()}  # by elements


def microkernel(rows: int) -> Any:
    """See the function in it."""

    @intrinsic
    def tile(typing: Any, x: Any, width: Any, panel: Any, out: Any, height: Any) -> Any:
        """Store the product of `rows` rows at `x` with a panel to `out`, float32 or bfloat16, with rows
        `height` apart."""
        return types.void(x, width, panel, out, height), _generator(rows, _KINDS[panel.dtype], out.dtype)

    return tile


def _generator(rows: int, kind: _Pairs | _Floats, stored: Any) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, width, panel, out, height = args
        lines = [builder.gep(x, [builder.mul(width, _number(row))]) for row in range(rows)]

        def add(column: Any, sums: _Sums) -> _Sums:
            at = builder.gep(panel, [builder.mul(column, _number(PANEL))])
            matrix = [kind.read(builder, at, part) for part in range(_WIDE)]
            found = []
            for line, own in zip(lines, sums, strict=True):
                own_x = kind.broadcast(builder, line, column)
                found.append([kind.multiply(builder, *each, own_x) for each in zip(own, matrix, strict=True)])
            return found

        for row, ends in enumerate(_sum_up(builder, rows, width, kind.columns, add)):
            for part, end in enumerate(ends):
                target = builder.add(builder.mul(height, _number(row)), _number(part * LANES))
                _store(builder, end, builder.gep(out, [target]), stored)
        return context.get_dummy_value()

    return generate


def _sum_up(
    builder: ir.IRBuilder, rows: int, count: Any, step: int, add: Callable[[Any, _Sums], _Sums]
) -> _Sums:
    """The sums of a tile after a loop from 0 to `count`, starting at zero: `add` returns the sums after an
    index."""
    entry, loop = builder.block, builder.append_basic_block("loop")
    behind = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    sums = [[builder.phi(_SUMS) for _ in range(_WIDE)] for _ in range(rows)]
    found = add(at, sums)
    following = builder.add(at, _number(step))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, behind)
    at.add_incoming(_number(0), entry)
    at.add_incoming(following, loop)
    for own, ends in zip(sums, found, strict=True):
        for each, end in zip(own, ends, strict=True):
            each.add_incoming(ir.Constant(_SUMS, [0.0] * LANES), entry)
            each.add_incoming(end, loop)
    builder.position_at_end(behind)
    return found


def _store(builder: ir.IRBuilder, sums: Any, out: Any, dtype: Any) -> None:
    """Store LANES sums, as float32 or rounded to bfloat16."""
    if dtype == types.float32:
        builder.store(sums, builder.bitcast(out, _SUMS.as_pointer()), align=4)
    else:
        builder.store(builder.fptrunc(sums, _NARROW), builder.bitcast(out, _NARROW.as_pointer()), align=2)


def _number(value: int) -> Any:
    """An index."""
    return ir.Constant(_I64, value)


def _load(builder: ir.IRBuilder, pointer: Any, offset: Any, kind: Any) -> Any:
    """Load a `kind` from `offset` elements after `pointer`."""
    at = builder.gep(pointer, [_number(offset) if isinstance(offset, int) else offset])
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=1)
