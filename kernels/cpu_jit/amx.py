"""Tiles of AMX: 16 rows of `x` by 32 columns, times 32 columns of 16 rows of the matrix, in one instruction.
Both are bfloat16, sums are float32.

    panel [in / 2][32][2]   as for packed_weights.py
    tiles: the sums of one or two tiles of `x` by two parts of a panel, then those of `x`, then the matrix

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
from collections.abc import Sequence
from functools import cache
from typing import Any

import llvmlite.ir as ir
from numba import int64, void

import kernels.cpu_jit
from kernels.cpu_jit.llvm_intrinsics import as_f32, emitted, fast, offset_by, on_stack
from kernels.cpu_jit.vectors import LANES, call, copy_lanes, loop, read_ahead

COLUMNS = 32  # of a tile of `x`: the width of a matrix is a multiple
PANEL = 32  # rows of the matrix packed together: a panel stays in the first cache, two tiles by two use all
GROUP = 8  # panels at once, if the second cache has room: they share a read of `x`
WIDTH = 288  # columns at once: two tiles of `x` and one panel stay in the first cache
_SECOND_CACHE = 600 * 1024  # bytes of it for panels
ROWS = 16  # of a tile of `x`, and rows of the matrix in a part of a panel
_TILES, _X = 8, 4  # _X: the first one of `x`, after the sums
CONFIG_BYTES = 64
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


@fast
def store_panel(found: Any, out: Any, rows: int, height: int) -> None:
    """Store `found` `[rows][PANEL]`, float32, to `out`, float32 or bfloat16, with rows `height` apart."""
    for row in range(rows):
        for column in range(0, PANEL, LANES):
            copy_lanes(offset_by(found, row * PANEL + column), offset_by(out, row * height + column))


def product() -> Any:
    """See the function in it."""
    first_two, first_two_onto, one, one_onto = (
        tiles(number, PANEL // ROWS, onto=onto, ahead=True) for number in (2, 1) for onto in (False, True)
    )
    two, two_onto = (tiles(2, PANEL // ROWS, onto=onto) for onto in (False, True))  # of a matrix in a cache
    pair, pair_onto = (tiles(1, PANEL // ROWS, panels=2, onto=onto, ahead=True) for onto in (False, True))
    sums, config = on_stack(4 * 2 * ROWS * PANEL * GROUP), on_stack(CONFIG_BYTES)

    @fast
    def multiply(
        x: Any, panels: Any, out: Any, rows: int, width: int, height: int, first: int, end: int
    ) -> None:
        """Store the product of `rows` rows of `x` with the panels `first` to `end`, at most GROUP, to `out`,
        float32 or bfloat16, with rows `height` apart. The last panel may begin within the one before."""
        all_found, setting, row = as_f32(sums()), config(), 0
        most = WIDTH if rows > 2 * ROWS else width  # few rows read the matrix once
        if rows >= ROWS:
            configure(setting, ROWS)
        while row < rows:
            here = min(2 * ROWS, rows - row)
            if here < ROWS:
                configure(setting, here)
            elif here < 2 * ROWS:
                here = ROWS
            for column in range(0, width, most):
                of, columns = offset_by(x, row * width + column), min(most, width - column)
                number = first
                while number < end:
                    panel = offset_by(panels, (number * width + column) * PANEL)
                    found = offset_by(all_found, (number - first) * 2 * ROWS * PANEL)
                    if here == 2 * ROWS and row == 0 and column == 0:
                        first_two(of, width, columns, panel, PANEL, found, PANEL)
                    elif here == 2 * ROWS and row == 0:
                        first_two_onto(of, width, columns, panel, PANEL, found, PANEL)
                    elif here == 2 * ROWS and column == 0:
                        two(of, width, columns, panel, PANEL, found, PANEL)
                    elif here == 2 * ROWS:
                        two_onto(of, width, columns, panel, PANEL, found, PANEL)
                    elif number + 1 < end and column == 0:
                        pair(of, width, columns, panel, PANEL, found, PANEL)
                        number += 1
                    elif number + 1 < end:
                        pair_onto(of, width, columns, panel, PANEL, found, PANEL)
                        number += 1
                    elif column == 0:
                        one(of, width, columns, panel, PANEL, found, PANEL)
                    else:
                        one_onto(of, width, columns, panel, PANEL, found, PANEL)
                    number += 1
            for number in range(first, end):
                to = row * height + min(number * PANEL, height - PANEL)
                found = offset_by(all_found, (number - first) * 2 * ROWS * PANEL)
                store_panel(found, offset_by(out, to), here, height)
            row += here
        release()

    return multiply


def together(rows: int, width: int) -> int:
    """How many panels are multiplied at once by `x` `[rows, width]`."""
    return max(2, min(GROUP, _SECOND_CACHE // (2 * PANEL * width))) if rows > 2 * ROWS else 2


def setting(widths: Sequence[int], heights: Sequence[int]) -> Any:
    """See the function in it. The bytes of a row of each tile, and its rows; 0: as many as of `x`."""

    @emitted(lambda config, rows: void(config, int64))
    def configure(builder: ir.IRBuilder, config: Any, rows: Any) -> None:
        """Prepare the tiles of this thread for so many rows of `x`. `config`: memory for the setting."""
        kind = ir.VectorType(_I8, CONFIG_BYTES)
        numbers = [0] * CONFIG_BYTES
        numbers[0] = 1  # the palette
        for tile, (width, height) in enumerate(zip(widths, heights, strict=True)):
            numbers[16 + 2 * tile], numbers[48 + tile] = width, height
        builder.store(ir.Constant(kind, numbers), builder.bitcast(config, kind.as_pointer()), align=1)
        for tile, height in enumerate(heights):
            if not height:
                builder.store(builder.trunc(rows, _I8), byte_after(builder, config, 48 + tile))
        call(builder, "llvm.x86.ldtilecfg", _VOID, config)

    return configure


configure = setting([4 * ROWS] * _TILES, [0] * (_X + 1) + [ROWS] * (_TILES - _X - 1))


@emitted(void)
def release(builder: ir.IRBuilder) -> None:
    """Give the tiles of this thread back: Linux then saves less of it."""
    call(builder, "llvm.x86.tilerelease", _VOID)


def tiles(number: int, parts: int, *, panels: int = 1, onto: bool = False, ahead: bool = False) -> Any:
    """See the function in it. `onto`: the product is added to what is at `out`. `panels`: neighbours of whole
    rows of the matrix, whose sums are 2 * ROWS * PANEL apart: with few sums a product waits for the one
    before, 52 cycles. `ahead`: the matrix comes from memory."""
    first = _X + number  # of the matrix
    assert number * parts * panels <= _X

    @emitted(
        lambda x, x_apart, width, panel, line, out, apart: void(x, int64, int64, panel, int64, out, int64)
    )
    def multiply(
        builder: ir.IRBuilder, x: Any, x_apart: Any, width: Any, panel: Any, line: Any, out: Any, apart: Any
    ) -> None:
        """Store the product of `number` tiles of `x`, rows `x_apart`, of `width` columns, with `parts` parts
        of a panel to `out`, float32, rows `apart`. `line`: rows of the matrix packed together."""
        x_bytes = builder.mul(x_apart, _index(2))
        panel_bytes, out_bytes = (builder.mul(each, _index(4)) for each in (line, apart))
        places = [
            (builder.mul(apart, _index(tile * ROWS)), 4 * ROWS * part + 4 * 2 * ROWS * PANEL * own)
            for tile in range(number)
            for own in range(panels)
            for part in range(parts)
        ]
        targets = [byte_after(builder, builder.gep(out, [row]), offset) for row, offset in places]
        for sums, target in enumerate(targets):
            if onto:
                call(builder, "llvm.x86.tileloadd64", _VOID, tile_number(sums), target, out_bytes)
            else:
                call(builder, "llvm.x86.tilezero", _VOID, tile_number(sums))

        def add(step: Any, sums: list[Any]) -> list[Any]:
            column = builder.mul(step, _index(COLUMNS))
            chunk = builder.gep(panel, [builder.mul(column, line)])
            for tile in range(number):
                at = builder.add(builder.mul(x_apart, _index(tile * ROWS)), column)
                of_x = byte_after(builder, builder.gep(x, [at]), 0)
                call(builder, "llvm.x86.tileloadd64", _VOID, tile_number(_X + tile), of_x, x_bytes)
            for place in range(panels * parts):
                away = builder.mul(x_apart, _index(place // parts * PANEL))
                matrix = byte_after(builder, builder.gep(chunk, [away]), 4 * ROWS * (place % parts))
                if ahead and place % parts == 0:
                    read_ahead(builder, matrix, 2 * COLUMNS * PANEL)
                own = first + place % (_TILES - first)
                call(builder, "llvm.x86.tileloadd64", _VOID, tile_number(own), matrix, panel_bytes)
                for tile in range(number):
                    names = (tile_number(each) for each in (tile * parts * panels + place, _X + tile, own))
                    call(builder, "llvm.x86.tdpbf16ps", _VOID, *names)
            return sums

        loop(builder, builder.sdiv(width, _index(COLUMNS)), [], add)
        for sums, target in enumerate(targets):
            call(builder, "llvm.x86.tilestored64", _VOID, tile_number(sums), target, out_bytes)

    return multiply


def byte_after(builder: ir.IRBuilder, pointer: Any, offset: Any) -> Any:
    """The pointer to the byte `offset` after `pointer`."""
    offset = _index(offset) if isinstance(offset, int) else offset
    return builder.gep(builder.bitcast(pointer, _I8.as_pointer()), [offset])


def tile_number(tile: int) -> Any:
    return ir.Constant(_I8, tile)


def _index(value: int) -> Any:
    return ir.Constant(_I64, value)
