"""Products with a bfloat16 matrix on a CPU that multiplies pairs of bfloat16 (AVX-512 BF16).

The matrix is kept in panels of 48 of its rows, as the instruction wants it: of two neighbouring columns, 16
rows in one register.

    panel [out / 48][in / 2][3][16][2]

A tile is 8 rows of `x` by a panel: 24 registers of sums, three of the matrix, and pairs of `x` that come from
memory as they are multiplied. A panel is a piece of work: it comes from memory once and stays in the second
cache for all tiles. With few rows that reading is all the time, with many the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu.machine import after, bf16_at, fast, take
from kernels.cpu.team import Kernel

PANEL = 48  # rows of the matrix
_LANES, _WIDE = 16, PANEL // 16
_TILE = 8  # rows of x


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(ir.FloatType(), _LANES)
_PAIRS = ir.VectorType(_BFloat(), 2 * _LANES)
_WORDS = ir.VectorType(_I32, _LANES)
_NARROW = ir.VectorType(_BFloat(), _LANES)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _tile(rows: int) -> Any:
    """`tile(x, width, panel, out, height)`: the product of `rows` rows at `x` with a panel, into `out`, where
    rows are `height` apart."""

    def typed(typing: Any, x: Any, width: Any, panel: Any, out: Any, height: Any) -> Any:
        return types.void(x, width, panel, out, height), _generator(rows)

    return intrinsic(typed)


def _generator(rows: int) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, width, panel, out, height = args
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        kind = ir.FunctionType(_SUMS, (_SUMS, _PAIRS, _PAIRS))
        multiply = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        lines = [builder.gep(x, [builder.mul(width, _number(row))]) for row in range(rows)]
        before, loop, behind = (
            builder.block,
            builder.append_basic_block("columns"),
            builder.append_basic_block("sums"),
        )
        builder.branch(loop)
        builder.position_at_end(loop)
        column = builder.phi(_I64)
        sums = [[builder.phi(_SUMS) for _ in range(_WIDE)] for _ in range(rows)]
        read = builder.gep(panel, [builder.mul(column, _number(PANEL))])
        matrix = []
        for part in range(_WIDE):
            words = builder.bitcast(builder.gep(read, [_number(part * 2 * _LANES)]), _PAIRS.as_pointer())
            matrix.append(builder.load(words, align=2))
        zeros = ir.Constant(_WORDS, [0] * _LANES)
        undefined = ir.Constant(_WORDS, ir.Undefined)
        found = []
        for row in range(rows):
            pair = builder.load(
                builder.bitcast(builder.gep(lines[row], [column]), _I32.as_pointer()), align=2
            )
            one = builder.insert_element(undefined, pair, ir.Constant(_I32, 0))
            pairs = builder.bitcast(builder.shuffle_vector(one, undefined, zeros), _PAIRS)
            found.append(
                [builder.call(multiply, (sums[row][part], matrix[part], pairs)) for part in range(_WIDE)]
            )
        following = builder.add(column, _number(2))
        builder.cbranch(builder.icmp_signed("<", following, width), loop, behind)
        column.add_incoming(_number(0), before)
        column.add_incoming(following, loop)
        for row in range(rows):
            for part in range(_WIDE):
                sums[row][part].add_incoming(ir.Constant(_SUMS, [0.0] * _LANES), before)
                sums[row][part].add_incoming(found[row][part], loop)
        builder.position_at_end(behind)
        for row in range(rows):
            for part in range(_WIDE):
                offset = builder.add(builder.mul(height, _number(row)), _number(part * _LANES))
                target = builder.bitcast(builder.gep(out, [offset]), _NARROW.as_pointer())
                builder.store(builder.fptrunc(found[row][part], _NARROW), target, align=2)
        return context.get_dummy_value()

    return generate


_eight, _four, _two, _one = (_tile(rows) for rows in (8, 4, 2, 1))


@fast
def _panels(x: Any, panels: Any, out: Any, rows: int, width: int, height: int, p: Any) -> None:
    while True:
        to = take(p) * PANEL
        if to >= height:
            return
        panel = after(panels, to * width)
        target = after(out, min(to, height - PANEL))  # the last panel may begin within the one before
        row = 0
        while row + _TILE <= rows:
            _eight(after(x, row * width), width, panel, after(target, row * height), height)
            row += _TILE
        if row + 4 <= rows:
            _four(after(x, row * width), width, panel, after(target, row * height), height)
            row += 4
        if row + 2 <= rows:
            _two(after(x, row * width), width, panel, after(target, row * height), height)
            row += 2
        if row < rows:
            _one(after(x, row * width), width, panel, after(target, row * height), height)


def _bf16(p: Any) -> None:
    _panels(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), p[4], p[5], p[6], p)


_KERNEL = Kernel(_bf16)


def can_multiply(weight: Tensor) -> bool:
    """True where this CPU has the instruction and `weight` `[out, in]` a shape for panels."""
    height, width = weight.shape
    fits = weight.dtype == torch.bfloat16 and height >= PANEL and width % 2 == 0
    return fits and bool(llvm.get_host_cpu_features().get("avx512bf16"))


def pack(weight: Tensor) -> Tensor:
    """`weight` `[out, in]` in panels: `[panels, in / 2, 3, 16, 2]`. The last one ends with the matrix."""
    height, width = weight.shape
    whole, rest = divmod(height, PANEL)
    panels = weight[: whole * PANEL].view(whole, PANEL, width)
    if rest:
        panels = torch.cat((panels, weight[-PANEL:][None]))
    return panels.view(-1, _WIDE, _LANES, width // 2, 2).permute(0, 3, 1, 2, 4).contiguous()


def multiply(x: Tensor, panels: Tensor, height: int) -> Tensor:
    """`x @ weight.T` of `x` `[rows, in]`, contiguous, and `panels` of a `weight` of `height` rows, added up
    in float32 and rounded once: `[rows, height]`."""
    rows, width = x.shape
    out = x.new_empty(rows, height)
    _KERNEL(len(panels), x.data_ptr(), panels.data_ptr(), out.data_ptr(), rows, width, height)
    return out
