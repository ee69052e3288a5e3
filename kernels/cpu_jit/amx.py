"""Tiles of AMX: 16 rows of `x` by 32 columns, times 32 columns of 16 rows of the matrix, in one instruction.
Both are bfloat16, sums are float32.

    panel [in / 2][panel rows][2]   as for microkernel.py
    tiles 0 to 5: the sums of up to two tiles of `x` by three parts of a panel; 6: `x`; 7: the matrix

A row's sum is added up in one order, so its bits do not depend on the other rows; and one row takes as long
as sixteen, less than the read of the matrix. Measured on 2 cores of an Intel Xeon with AMX, products of 576
columns with 3,072 rows, µs:

    rows of x                        1     8    16    32   128   512   1,024
    AVX512-BF16 (microkernel.py)    92   191   334   618 2,289 9,351  18,716
    oneDNN                         177   183   199   226   418   963   1,557
    tiles                           77    71    90   123   340 1,145   2,315
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

import kernels.cpu_jit
from kernels.cpu_jit.llvm_intrinsics import as_f32, fast, narrow, offset_by, on_stack
from kernels.cpu_jit.vectors import call, loop

COLUMNS = 32  # of a tile of `x`: the width of a matrix is a multiple
ROWS = 16  # of a tile of `x`, and rows of the matrix in a part of a panel
_TILES = 8
CONFIG_BYTES = 64
_X, _MATRIX = 6, 7
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # Linux gives a process the tiles when it asks

_I8, _I64, _VOID = ir.IntType(8), ir.IntType(64), ir.VoidType()


@cache
def usable() -> bool:
    """Whether kernels may use AMX with bfloat16: the CPU has it, Linux permits it, and ONEDNN_MAX_CPU_ISA,
    which oneDNN reads, too, does not name an older CPU."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    if most not in ("ALL", "DEFAULT") and "AMX" not in most:
        return False
    if platform.machine() != "x86_64" or not kernels.cpu_jit.has("amx-tile", "amx-bf16", "avx512bf16"):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def by_panel(panel_rows: int) -> Any:
    """See the function in it. `panel_rows`: a multiple of 16, at most 48."""
    two, one = (tiles(number, panel_rows // ROWS) for number in (2, 1))
    sums, config = on_stack(2 * ROWS * panel_rows * 4), on_stack(CONFIG_BYTES)

    @fast
    def store(found: Any, out: Any, rows: int, height: int) -> None:
        for row in range(rows):
            for column in range(panel_rows):
                out[row * height + column] = narrow(found[row * panel_rows + column], out[0])

    @fast
    def multiply(x: Any, panel: Any, out: Any, rows: int, width: int, height: int) -> None:
        """Store the product of `rows` rows of `x` with a panel to `out`, float32 or bfloat16, with rows
        `height` apart."""
        found, setting = as_f32(sums()), config()
        row, rest = 0, rows % ROWS
        if rows >= ROWS:
            configure(setting, ROWS)
        while row + 2 * ROWS <= rows:
            two(offset_by(x, row * width), width, panel, panel_rows, found, panel_rows)
            store(found, offset_by(out, row * height), 2 * ROWS, height)
            row += 2 * ROWS
        if row + ROWS <= rows:
            one(offset_by(x, row * width), width, panel, panel_rows, found, panel_rows)
            store(found, offset_by(out, row * height), ROWS, height)
            row += ROWS
        if rest:
            configure(setting, rest)
            one(offset_by(x, row * width), width, panel, panel_rows, found, panel_rows)
            store(found, offset_by(out, row * height), rest, height)
        release()

    return multiply


@intrinsic
def configure(typing: Any, config: Any, rows: Any) -> Any:
    """Prepare the tiles of this thread for so many rows of `x`. `config`: memory for the setting."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        config, rows = args
        setting = ir.VectorType(_I8, CONFIG_BYTES)
        numbers = [0] * CONFIG_BYTES
        numbers[0] = 1  # the palette
        for tile in range(_TILES):
            numbers[16 + 2 * tile] = 4 * ROWS  # bytes of a row
            numbers[48 + tile] = ROWS
        builder.store(ir.Constant(setting, numbers), builder.bitcast(config, setting.as_pointer()), align=1)
        for tile in range(_MATRIX):
            builder.store(builder.trunc(rows, _I8), _byte(builder, config, 48 + tile))
        call(builder, "llvm.x86.ldtilecfg", _VOID, config)
        return context.get_dummy_value()

    return types.void(config, types.int64), generate


@intrinsic
def release(typing: Any) -> Any:
    """Give the tiles of this thread back: Linux then saves less of it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", _VOID)
        return context.get_dummy_value()

    return types.void(), generate


def tiles(number: int, parts: int, *, onto: bool = False) -> Any:
    """See the function in it. `onto`: the product is added to what is at `out`."""

    @intrinsic
    def multiply(typing: Any, x: Any, width: Any, panel: Any, line: Any, out: Any, apart: Any) -> Any:
        """Store the product of `number` tiles of `x` with `parts` parts of a panel to `out`, float32, rows
        `apart`. `line`: how many rows of the matrix are packed together."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            x, width, panel, line, out, apart = args
            x_bytes = builder.mul(width, _index(2))
            panel_bytes, out_bytes = (builder.mul(each, _index(4)) for each in (line, apart))
            places = [
                (builder.mul(apart, _index(tile * ROWS)), 4 * ROWS * part)
                for tile in range(number)
                for part in range(parts)
            ]
            targets = [_byte(builder, builder.gep(out, [row]), offset) for row, offset in places]
            for sums, target in enumerate(targets):
                if onto:
                    call(builder, "llvm.x86.tileloadd64", _VOID, _number(sums), target, out_bytes)
                else:
                    call(builder, "llvm.x86.tilezero", _VOID, _number(sums))

            def add(step: Any, sums: list[Any]) -> list[Any]:
                column = builder.mul(step, _index(COLUMNS))
                chunk = builder.gep(panel, [builder.mul(column, line)])
                for tile in range(number):
                    at = builder.add(builder.mul(width, _index(tile * ROWS)), column)
                    of_x = _byte(builder, builder.gep(x, [at]), 0)
                    call(builder, "llvm.x86.tileloadd64", _VOID, _number(_X), of_x, x_bytes)
                    for part in range(parts):
                        matrix = _byte(builder, chunk, 4 * ROWS * part)
                        call(builder, "llvm.x86.tileloadd64", _VOID, _number(_MATRIX), matrix, panel_bytes)
                        names = (_number(each) for each in (tile * parts + part, _X, _MATRIX))
                        call(builder, "llvm.x86.tdpbf16ps", _VOID, *names)
                return sums

            loop(builder, builder.sdiv(width, _index(COLUMNS)), [], add)
            for sums, target in enumerate(targets):
                call(builder, "llvm.x86.tilestored64", _VOID, _number(sums), target, out_bytes)
            return context.get_dummy_value()

        return types.void(x, types.int64, panel, types.int64, out, types.int64), generate

    return multiply


def _byte(builder: ir.IRBuilder, pointer: Any, offset: int) -> Any:
    """The pointer to the byte `offset` after `pointer`."""
    return builder.gep(builder.bitcast(pointer, _I8.as_pointer()), [_index(offset)])


def _number(tile: int) -> Any:
    return ir.Constant(_I8, tile)


def _index(value: int) -> Any:
    return ir.Constant(_I64, value)
