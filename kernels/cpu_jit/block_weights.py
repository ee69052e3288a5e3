"""Products with weights that stay quantised in blocks, as GGUF files have them, on a CPU with AVX-512 VNNI or
AVX2.

A block is 32 columns of a row, with a scale and, in some formats, a minimum:

    value = scale * (number - offset) + minimum
    y = sum over blocks of  scale * a * (sum of (number - offset) * xi)  +  minimum * a * (sum of xi)

where a block of `x` is `a * xi` with integers xi, quantised at the call. So each product is exact. xi has 16
bits, with which a model gives the answers of float32, or 8, with which many rows take half the time; always
8 with weights in int8.

    stored in 4 bits   Q4_0, Q4_1, Q4_K
    stored in 8 bits   Q5_0, Q5_1, Q5_K, Q6_K (16 columns a scale), Q8_0, and int8 (a scale for all columns)

The matrix is in panels of PANEL rows. A panel has its blocks one after the other (block_microkernel.py), and
its own format: so matrices of several formats can be joined, and all layers of a mixed file run in one
launch. The kernel of a format is compiled when its first matrix is packed. Scales are float16: those of
K-quants, products of two numbers, are rounded to it (2^-11, far below the step of 4 bits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernels.cpu_jit
from kernels.cpu_jit import block_tiles
from kernels.cpu_jit.block_microkernel import (
    BLOCK,
    FACTS,
    PANEL,
    VNNI,
    WIDE_BYTES,
    Format,
    in_bytes,
    tile,
    unpack,
    x_bytes,
)
from kernels.cpu_jit.block_quantise import FOR_TILES, PIECE_BLOCKS, PIECE_ROWS, QUANTISE
from kernels.cpu_jit.block_tiles import FACT_BYTES, MOST_ROWS, TILE_ROWS
from kernels.cpu_jit.llvm_intrinsics import (
    as_i64,
    bf16_at,
    call_with,
    f32_at,
    fast,
    fetch_add,
    i8_at,
    i32_at,
    i64_at,
    offset_by,
    on_stack,
)
from kernels.cpu_jit.thread_team import Call, Kernel, Number, shares, team_size

FORMATS = (
    Format(4, 8),
    Format(4, minimum=True),
    Format(8, 128),
    Format(8, minimum=True),
    Format(8, 128, columns=16),
    Format(8, 128, by_row=True),
)
NIBBLES, NIBBLES_MINIMUM, INT8 = FORMATS[0], FORMATS[1], FORMATS[5]
_TILE = 6 if VNNI else 3  # rows of `x`: their sums fill the registers
_NEVER = 1 << 62
# On AVX2 numbers become int16, which costs half as much as a tile's products: from _MANY rows on, a panel of
# up to 4,096 columns is unpacked once, to 256 KiB on the stack (the second cache holds them).
_MANY, _UNPACKED_BLOCKS = 12, 128
_TABLE_ROW = 4  # numbers of a panel: see BlockMatrix
# Rows from which on AMX is faster, by bytes of a number of `x` and bits of the matrix.
_IN_TILES = {(2, 4): 13, (2, 8): 28, (1, 4): 29, (1, 8): _NEVER}
_HALF = BLOCK // 2


def _by_a_panel(format_: Format, terms: int) -> Any:
    most, four, two, one = (tile(rows, format_, terms) for rows in (_TILE, min(4, _TILE), 2, 1))
    size, whole_tiles = x_bytes(terms), _by_an_unpacked_panel(format_, terms)

    @fast
    def multiply(p: Any, panel: Any, out: Any) -> None:
        """All rows of `x` by a panel. `p`: the numbers of the call; `panel`: a row of the table."""
        rows, blocks, height, numbers = p[6], p[7] // BLOCK, p[8], i8_at(panel[0])
        row = whole_tiles(p, panel, out)
        while row < rows:
            at, goal = offset_by(i8_at(p[1]), row * blocks * size), offset_by(out, row * height)
            of_x = offset_by(i32_at(p[2]), row * blocks * FACTS)
            if row + _TILE <= rows:
                most(at, of_x, blocks, numbers, goal, height, numbers)
                row += _TILE
            elif _TILE > 4 and row + 4 <= rows:
                four(at, of_x, blocks, numbers, goal, height, numbers)
                row += 4
            elif row + 2 <= rows:
                two(at, of_x, blocks, numbers, goal, height, numbers)
                row += 2
            else:
                one(at, of_x, blocks, numbers, goal, height, numbers)
                row += 1

    return multiply


def _by_an_unpacked_panel(format_: Format, terms: int) -> Any:
    """A function for the first rows of `x`, if they are many; it returns their number."""
    if VNNI or in_bytes(format_, terms):  # cheap to unpack, for the rows of a tile
        return fast(lambda p, panel, out: 0)
    widen, some, size = unpack(format_), tile(_TILE, format_, terms, unpacked=True), x_bytes(terms)
    scratch = on_stack(_UNPACKED_BLOCKS * WIDE_BYTES)

    @fast
    def multiply(p: Any, panel: Any, out: Any) -> Any:
        rows, blocks, height, numbers = p[6], p[7] // BLOCK, p[8], i8_at(panel[0])
        row = 0
        if rows < _MANY or blocks > _UNPACKED_BLOCKS:
            return row
        wide = scratch()
        widen(blocks, numbers, wide)
        while row + _TILE <= rows:
            at, goal = offset_by(i8_at(p[1]), row * blocks * size), offset_by(out, row * height)
            of_x = offset_by(i32_at(p[2]), row * blocks * FACTS)
            some(at, of_x, blocks, numbers, goal, height, wide)
            row += _TILE
        return row

    return multiply


@fast
def _f32(p: Any, panel: Any) -> Any:
    return offset_by(f32_at(p[5]), panel[2])


_nibbles, _nibbles_minimum, _bytes, _bytes_minimum, _bytes_16 = (
    _by_a_panel(each, 2) for each in FORMATS[:-1]
)
_nibbles_8, _nibbles_minimum_8, _bytes_8, _bytes_minimum_8, _bytes_16_8, _int8 = (
    _by_a_panel(each, 1) for each in FORMATS
)


# Each is a function with a name of its own, by which Numba finds its machine code in the cache.
def _nibbles_f32(p: Any, panel: Any) -> None:
    _nibbles(p, panel, _f32(p, panel))


def _nibbles_minimum_f32(p: Any, panel: Any) -> None:
    _nibbles_minimum(p, panel, _f32(p, panel))


def _bytes_f32(p: Any, panel: Any) -> None:
    _bytes(p, panel, _f32(p, panel))


def _bytes_minimum_f32(p: Any, panel: Any) -> None:
    _bytes_minimum(p, panel, _f32(p, panel))


def _bytes_16_f32(p: Any, panel: Any) -> None:
    _bytes_16(p, panel, _f32(p, panel))


def _nibbles_8_f32(p: Any, panel: Any) -> None:
    _nibbles_8(p, panel, _f32(p, panel))


def _nibbles_minimum_8_f32(p: Any, panel: Any) -> None:
    _nibbles_minimum_8(p, panel, _f32(p, panel))


def _bytes_8_f32(p: Any, panel: Any) -> None:
    _bytes_8(p, panel, _f32(p, panel))


def _bytes_minimum_8_f32(p: Any, panel: Any) -> None:
    _bytes_minimum_8(p, panel, _f32(p, panel))


def _bytes_16_8_f32(p: Any, panel: Any) -> None:
    _bytes_16_8(p, panel, _f32(p, panel))


def _int8_f32(p: Any, panel: Any) -> None:
    _int8(p, panel, _f32(p, panel))


def _int8_bf16(p: Any, panel: Any) -> None:
    _int8(p, panel, offset_by(bf16_at(p[5]), panel[2]))


(
    _nibbles_in_tiles,
    _nibbles_minimum_in_tiles,
    _bytes_in_tiles,
    _bytes_minimum_in_tiles,
    _bytes_16_in_tiles,
) = (block_tiles.by_a_panel(each, 2) for each in FORMATS[:-1])
_nibbles_8_in_tiles, _nibbles_minimum_8_in_tiles = (block_tiles.by_a_panel(each, 1) for each in FORMATS[:2])


def _nibbles_tiles(p: Any, work: Any) -> None:
    _nibbles_in_tiles(p, work, f32_at(p[5]))


def _nibbles_minimum_tiles(p: Any, work: Any) -> None:
    _nibbles_minimum_in_tiles(p, work, f32_at(p[5]))


def _bytes_tiles(p: Any, work: Any) -> None:
    _bytes_in_tiles(p, work, f32_at(p[5]))


def _bytes_minimum_tiles(p: Any, work: Any) -> None:
    _bytes_minimum_in_tiles(p, work, f32_at(p[5]))


def _bytes_16_tiles(p: Any, work: Any) -> None:
    _bytes_16_in_tiles(p, work, f32_at(p[5]))


def _nibbles_8_tiles(p: Any, work: Any) -> None:
    _nibbles_8_in_tiles(p, work, f32_at(p[5]))


def _nibbles_minimum_8_tiles(p: Any, work: Any) -> None:
    _nibbles_minimum_8_in_tiles(p, work, f32_at(p[5]))


def _kernels(*bodies: Callable[[Any, Any], None]) -> list[Kernel]:
    return [Kernel(each, 2) for each in bodies]


# Kernels of a panel, by bytes of a number of `x` and format.
_PANELS = {
    2: _kernels(_nibbles_f32, _nibbles_minimum_f32, _bytes_f32, _bytes_minimum_f32, _bytes_16_f32),
    1: _kernels(
        _nibbles_8_f32,
        _nibbles_minimum_8_f32,
        _bytes_8_f32,
        _bytes_minimum_8_f32,
        _bytes_16_8_f32,
        _int8_f32,
    ),
}
_PANELS_IN_TILES = {
    2: _kernels(_nibbles_tiles, _nibbles_minimum_tiles, _bytes_tiles, _bytes_minimum_tiles, _bytes_16_tiles),
    1: _kernels(_nibbles_8_tiles, _nibbles_minimum_8_tiles),
}
_INT8_BF16 = Kernel(_int8_bf16, 2)


def _all_panels(p: Any) -> None:
    table, starts = i64_at(p[3]), i64_at(p[9])
    while True:
        piece = fetch_add(p)
        if piece >= p[4]:
            return
        for number in range(starts[piece], starts[piece + 1]):
            panel = offset_by(table, _TABLE_ROW * number)
            call_with(panel[1], p, panel)


def _all_in_tiles(p: Any) -> None:
    table, starts, pieces, work = i64_at(p[3]), i64_at(p[9]), p[10], as_i64(_work())
    while True:
        piece = fetch_add(p)
        if piece >= p[4]:
            return
        work[1] = piece // pieces * MOST_ROWS
        work[2] = min(work[1] + MOST_ROWS, p[6])
        for number in range(starts[piece % pieces], starts[piece % pieces + 1]):
            work[0] = p[3] + 8 * _TABLE_ROW * number
            call_with(offset_by(table, _TABLE_ROW * number)[3], p, work)


_work = on_stack(24)
_MULTIPLY, _MULTIPLY_IN_TILES = Kernel(_all_panels), Kernel(_all_in_tiles)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix `[rows, columns]` in blocks, as a file has it: `numbers` `[rows, columns]` uint8, `scales`
    `[rows, columns / format.columns]` float16 (`[rows, 1]` float32 if by row), and the `minima` `[rows,
    columns / 32]` of a format with them."""

    format: Format
    numbers: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def values(self) -> Tensor:
        """`[rows, columns]` float32."""
        numbers = self.numbers.float() - self.format.offset
        rows, columns = numbers.shape
        found = numbers.view(rows, self.scales.shape[1], -1) * self.scales.float()[..., None]
        if self.minima is not None:
            found += self.minima.float()[..., None]
        return found.view(rows, columns)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A packed matrix `[height, in]`; see PackedMatrix. Results have `dtype`. `table` `[panels, 4]`: the
    address of each panel, that of its format's kernel, its first row, and that of the kernel for many rows in
    tiles. `segments`: the memory of each matrix, `[panels, bytes]`."""

    table: Tensor
    height: int
    segments: tuple[Tensor, ...]
    dtype: torch.dtype
    terms: int  # bytes of a number of `x`
    in_tiles: int  # rows from which on tiles multiply

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def calls(self, x: Tensor, out: Tensor, parts: Sequence[Number]) -> tuple[Call, ...]:
        """See PackedMatrix."""
        assert out.dtype == self.dtype, "packed for results of another dtype"
        rows, width = x.shape
        if rows >= self.in_tiles:
            return self._calls_in_tiles(x, out, parts)
        blocks, size = rows * width // BLOCK, x_bytes(self.terms)
        scratch = torch.empty(blocks * (4 * FACTS + size), dtype=torch.uint8)
        facts = scratch.data_ptr()
        quantised = (facts + 4 * FACTS * blocks, facts)
        (table,) = parts
        starts = shares(len(self.table), team_size())
        to = (table, len(starts) - 1, out.data_ptr(), rows, width, self.height, starts.ctypes.data)
        pieces, shape = -(-rows // PIECE_ROWS), (rows, width, self.terms, size)
        return (
            Call(QUANTISE[x.dtype], pieces, (x.data_ptr(), *quantised, *shape), scratch),
            Call(_MULTIPLY, len(starts) - 1, (*quantised, *to), scratch),
        )

    def _calls_in_tiles(self, x: Tensor, out: Tensor, parts: Sequence[Number]) -> tuple[Call, ...]:
        rows, width = x.shape
        blocks, tiles, size = width // BLOCK, -(-rows // TILE_ROWS), block_tiles.x_bytes(self.terms)
        padded = tiles * TILE_ROWS * blocks
        scratch = torch.empty(padded * (size + FACT_BYTES), dtype=torch.uint8)
        quantised = (scratch.data_ptr(), scratch.data_ptr() + padded * size)
        (table,) = parts
        starts = shares(len(self.table), team_size())
        pieces = len(starts) - 1  # for MOST_ROWS rows
        count = pieces * -(-rows // MOST_ROWS)
        to = (table, count, out.data_ptr(), rows, width, self.height, starts.ctypes.data, pieces)
        return (
            Call(
                FOR_TILES,
                tiles * -(-blocks // PIECE_BLOCKS),
                (x.data_ptr(), *quantised, rows, width, self.terms),
                scratch,
            ),
            Call(_MULTIPLY_IN_TILES, count, (*quantised, *to), scratch),
        )


def can_pack(height: int, width: int) -> bool:
    """Whether this CPU has the instructions and a matrix `[height, width]` a suitable shape."""
    return height >= PANEL and width % BLOCK == 0 and kernels.cpu_jit.has(*kernels.cpu_jit.BYTES)


def pack(matrices: Sequence[Blocks], dtype: torch.dtype, terms: int = 2) -> BlockMatrix:
    """The matrices, one below the other, in panels, for products in `dtype`: float32, or of int8 also rounded
    to bfloat16. A number of the input has `terms` bytes, or one with weights in int8. A last panel ends with
    its matrix: it may repeat rows."""
    segments, table, height = [], [], 0
    formats = {each.format for each in matrices}
    if INT8 in formats:
        terms = 1
    assert dtype == torch.float32 or formats == {INT8}, "packed weights have float32 between the products"
    with_amx = all(map(block_tiles.takes, formats))
    in_tiles = max(_IN_TILES[terms, each.bits] for each in formats) if with_amx else _NEVER
    for matrix in matrices:
        segment = _panels(matrix)
        starts = range(height, height + len(matrix.numbers), PANEL)
        height += len(matrix.numbers)
        kind, step = FORMATS.index(matrix.format), segment[0].numel()
        kernel = _INT8_BF16 if dtype == torch.bfloat16 else _PANELS[terms][kind]
        many = _PANELS_IN_TILES[terms][kind].address if in_tiles < _NEVER else 0
        for number, start in enumerate(starts):
            at = segment.data_ptr() + number * step
            table.append((at, kernel.address, min(start, height - PANEL), many))
        segments.append(segment)
    return BlockMatrix(torch.tensor(table), height, tuple(segments), dtype, terms, in_tiles)


def _panels(matrix: Blocks) -> Tensor:
    """`[panels, bytes]` uint8."""
    numbers, bits = matrix.numbers, matrix.format.bits
    if bits == 4:
        low, high = numbers.contiguous().view(torch.int32).unflatten(1, (-1, 2, _HALF // 4)).unbind(2)
        numbers = (low | high << 4).flatten(1).view(torch.uint8)
    else:
        numbers = numbers + (matrix.format.stored_offset & 0xFF)
    blocks = matrix.numbers.shape[1] // BLOCK
    words = _by_panel(numbers.contiguous().view(torch.int32))
    words = words.unflatten(2, (blocks, -1))  # [panels, PANEL, blocks, words]
    found = [words.permute(0, 2, 3, 1).flatten(2).view(torch.uint8)]
    if matrix.format.by_row:
        return torch.cat((found[0].flatten(1), _by_panel(matrix.scales).flatten(1).view(torch.uint8)), 1)
    for scales in (matrix.scales, matrix.minima):
        if scales is not None:
            by_block = _by_panel(scales).unflatten(2, (blocks, -1))  # [panels, PANEL, blocks, of a block]
            found.append(by_block.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8))
    return torch.cat(found, 2).flatten(1)


def in_int8(weight: Tensor) -> Blocks:
    """`weight` `[rows, columns]` in int8, each row scaled by its largest number."""
    scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return Blocks(INT8, ((weight.float() / scales).round() + INT8.offset).to(torch.uint8), scales)


def _by_panel(rows: Tensor) -> Tensor:
    """`[rows, ...]` to `[panels, PANEL, ...]`."""
    whole, rest = divmod(len(rows), PANEL)
    panels = rows[: whole * PANEL].unflatten(0, (whole, PANEL))
    return torch.cat((panels, rows[-PANEL:][None])) if rest else panels
