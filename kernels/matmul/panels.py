"""Products with a matrix on a CPU with AVX-512, of which bfloat16 needs the part that multiplies its pairs.

The matrix is kept in panels of 48 of its rows, as instructions want it: 16 rows in one register, of bfloat16
two neighbouring columns of each.

    panel [out / 48][in / 2][48][2]    float32: [out / 48][in][48]

A tile is 8 rows of `x` by a panel: 24 registers of sums, three of the matrix, and numbers of `x` that come
from memory as they are multiplied. A panel is a piece of work: it comes from memory once and stays in the
second cache for all tiles. With few rows that reading is all the time, with many the arithmetic.
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

from kernels.cpu.machine import after, bf16_at, f32_at, fast, take
from kernels.cpu.team import Kernel

PANEL = 48  # rows of the matrix
_LANES, _WIDE = 16, PANEL // 16
_TILE = 8  # rows of x


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


_I32, _I64 = ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(ir.FloatType(), _LANES)
_WORDS = ir.VectorType(_I32, _LANES)
_PAIRS = ir.VectorType(_BFloat(), 2 * _LANES)
_NARROW = ir.VectorType(_BFloat(), _LANES)


class _Pairs:
    """bfloat16: two columns at once."""

    columns = 2
    matrix, kept = _PAIRS, _NARROW
    word = _I32

    @staticmethod
    def multiply(builder: ir.IRBuilder, sums: Any, matrix: Any, words: Any) -> Any:
        pairs = builder.bitcast(words, _PAIRS)
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, sums, matrix, pairs)

    @staticmethod
    def narrow(builder: ir.IRBuilder, sums: Any) -> Any:
        return builder.fptrunc(sums, _NARROW)


class _Floats:
    """float32."""

    columns = 1
    matrix = kept = _SUMS
    word = ir.FloatType()

    @staticmethod
    def multiply(builder: ir.IRBuilder, sums: Any, matrix: Any, words: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", _SUMS, matrix, words, sums)

    @staticmethod
    def narrow(builder: ir.IRBuilder, sums: Any) -> Any:
        return sums


def _call(builder: ir.IRBuilder, name: str, result: Any, *arguments: Any) -> Any:
    """A function that LLVM knows by its name."""
    kind = ir.FunctionType(result, [each.type for each in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _tile(rows: int) -> Any:
    """`tile(x, width, panel, out, height)`: the product of `rows` rows at `x` with a panel, into `out`, where
    rows are `height` apart."""

    def typed(typing: Any, x: Any, width: Any, panel: Any, out: Any, height: Any) -> Any:
        kind = _Floats if x.dtype == types.float32 else _Pairs
        return types.void(x, width, panel, out, height), _generator(rows, kind)

    return intrinsic(typed)


def _generator(rows: int, kind: type[_Pairs] | type[_Floats]) -> Callable[..., Any]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, width, panel, out, height = args
        lines = [builder.gep(x, [builder.mul(width, _number(row))]) for row in range(rows)]
        entry, loop = builder.block, builder.append_basic_block("columns")
        behind = builder.append_basic_block("sums")
        builder.branch(loop)
        builder.position_at_end(loop)
        column = builder.phi(_I64)
        sums = [[builder.phi(_SUMS) for _ in range(_WIDE)] for _ in range(rows)]
        read = builder.gep(panel, [builder.mul(column, _number(PANEL))])
        matrix = [_load(builder, read, part * _LANES * kind.columns, kind.matrix) for part in range(_WIDE)]
        found = []
        for line, own in zip(lines, sums, strict=True):
            words = _spread(builder, _load(builder, line, column, kind.word))
            found.append([kind.multiply(builder, *each, words) for each in zip(own, matrix, strict=True)])
        following = builder.add(column, _number(kind.columns))
        builder.cbranch(builder.icmp_signed("<", following, width), loop, behind)
        column.add_incoming(_number(0), entry)
        column.add_incoming(following, loop)
        for own, ends in zip(sums, found, strict=True):
            for each, end in zip(own, ends, strict=True):
                each.add_incoming(ir.Constant(_SUMS, [0.0] * _LANES), entry)
                each.add_incoming(end, loop)
        builder.position_at_end(behind)
        for row, ends in enumerate(found):
            for part, end in enumerate(ends):
                at = builder.add(builder.mul(height, _number(row)), _number(part * _LANES))
                target = builder.bitcast(builder.gep(out, [at]), kind.kept.as_pointer())
                builder.store(kind.narrow(builder, end), target, align=2)
        return context.get_dummy_value()

    return generate


def _load(builder: ir.IRBuilder, pointer: Any, offset: Any, kind: Any) -> Any:
    at = builder.gep(pointer, [_number(offset) if isinstance(offset, int) else offset])
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=2)


def _spread(builder: ir.IRBuilder, word: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(word.type, _LANES), ir.Undefined)
    one = builder.insert_element(undefined, word, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_WORDS, [0] * _LANES))


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


def _f32(p: Any) -> None:
    _panels(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), p[4], p[5], p[6], p)


_KERNELS = {torch.bfloat16: Kernel(_bf16), torch.float32: Kernel(_f32)}
_NEEDS = {torch.bfloat16: "avx512bf16", torch.float32: "avx512f"}


def can_multiply(weight: Tensor) -> bool:
    """True where this CPU has the instructions and `weight` `[out, in]` a shape for panels."""
    height, width = weight.shape
    has = llvm.get_host_cpu_features().get(_NEEDS.get(weight.dtype, ""), False)
    return bool(has) and height >= PANEL and width % 2 == 0


def pack(weight: Tensor) -> Tensor:
    """`weight` `[out, in]` in panels, as above. The last one ends with the matrix."""
    height, width = weight.shape
    whole, rest = divmod(height, PANEL)
    panels = weight[: whole * PANEL].view(whole, PANEL, width)
    if rest:
        panels = torch.cat((panels, weight[-PANEL:][None]))
    columns = 2 if weight.dtype == torch.bfloat16 else 1
    return panels.view(-1, PANEL, width // columns, columns).transpose(1, 2).contiguous()


def multiply(x: Tensor, panels: Tensor, height: int) -> Tensor:
    """`x @ weight.T` of `x` `[rows, in]`, contiguous, and `panels` of a `weight` of `height` rows, added up
    in float32 and rounded once: `[rows, height]`."""
    rows, width = x.shape
    out = x.new_empty(rows, height)
    kernel = _KERNELS[x.dtype]
    kernel(len(panels), x.data_ptr(), panels.data_ptr(), out.data_ptr(), rows, width, height)
    return out
