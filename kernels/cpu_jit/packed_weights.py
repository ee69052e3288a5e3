"""Products with packed weights on a CPU with AVX-512 (bfloat16: AVX512-BF16, or AMX where it is usable).

The matrix is stored in panels of 48 rows, in the order of the instructions: a register has 16 rows, for
bfloat16 two neighbouring columns of each. Tiles of AMX: amx.py. Bytes and half bytes: block_weights.py.

    panel [out / 48][in / 2][48][2]    float32: [out / 48][in][48]; for AMX 32 rows instead of 48

A panel is a piece of work: it is read once and stays in the second-level cache for all tiles of 8 rows of
`x`. With few rows the read takes the time, with many rows the arithmetic.

On 2 Zen 4 cores products of up to 8 rows take 0.5 to 0.8 of oneDNN's time, those of 256 nearly the same
(docs/benchmarks/cpu.md). Their bits do not depend on the other rows: every tile adds up a row's sum in the
same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import kernels.cpu_jit
from kernels.cpu_jit import amx
from kernels.cpu_jit.llvm_intrinsics import bf16_at, f32_at, fast, fetch_add, i64_at, offset_by
from kernels.cpu_jit.microkernel import PANEL, microkernel
from kernels.cpu_jit.thread_team import Call, Kernel, Number, shares, team_size

_TILE = 8  # rows of x

_eight, _four, _two, _one = (microkernel(rows, ahead=True) for rows in (8, 4, 2, 1))


@fast
def _all(x: Any, panel: Any, out: Any, rows: int, width: int, height: int) -> None:
    row = 0
    while row + _TILE <= rows:
        _eight(offset_by(x, row * width), width, width, panel, PANEL, offset_by(out, row * height), height)
        row += _TILE
    if row + 4 <= rows:
        _four(offset_by(x, row * width), width, width, panel, PANEL, offset_by(out, row * height), height)
        row += 4
    if row + 2 <= rows:
        _two(offset_by(x, row * width), width, width, panel, PANEL, offset_by(out, row * height), height)
        row += 2
    if row < rows:
        _one(offset_by(x, row * width), width, width, panel, PANEL, offset_by(out, row * height), height)


@fast
def _multiply(x: Any, panels: Any, out: Any, rows: int, width: int, height: int, p: Any) -> None:
    """Multiply all rows of `x` by the panels that this thread gets."""
    starts = i64_at(p[8])
    while True:
        piece = fetch_add(p)
        if piece >= p[7]:
            return
        for number in range(starts[piece], starts[piece + 1]):
            to = number * PANEL
            target = offset_by(out, min(to, height - PANEL))  # the last panel may begin within the one before
            _all(x, offset_by(panels, to * width), target, rows, width, height)


_multiply_panels = amx.product()


@fast
def _multiply_in_tiles(x: Any, panels: Any, out: Any, rows: int, width: int, height: int, p: Any) -> None:
    """The same; `p[9]` panels at once read a row of `x` from the first cache."""
    starts, together = i64_at(p[8]), p[9]
    while True:
        piece = fetch_add(p)
        if piece >= p[7]:
            return
        first, end = starts[piece], starts[piece + 1]
        while first < end:
            _multiply_panels(x, panels, out, rows, width, height, first, min(first + together, end))
            first += together


def _bf16(p: Any) -> None:
    _multiply(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), p[4], p[5], p[6], p)


def _bf16_to_f32(p: Any) -> None:
    _multiply(bf16_at(p[1]), bf16_at(p[2]), f32_at(p[3]), p[4], p[5], p[6], p)


def _tiles(p: Any) -> None:
    _multiply_in_tiles(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), p[4], p[5], p[6], p)


def _tiles_to_f32(p: Any) -> None:
    _multiply_in_tiles(bf16_at(p[1]), bf16_at(p[2]), f32_at(p[3]), p[4], p[5], p[6], p)


def _f32(p: Any) -> None:
    _multiply(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), p[4], p[5], p[6], p)


_KERNELS = {  # by dtype of the operands and of the result
    (torch.bfloat16, torch.bfloat16): Kernel(_bf16),
    (torch.bfloat16, torch.float32): Kernel(_bf16_to_f32),
    (torch.float32, torch.float32): Kernel(_f32),
}
_IN_TILES = {torch.bfloat16: Kernel(_tiles), torch.float32: Kernel(_tiles_to_f32)}  # by dtype of the result
_NEEDS = {torch.bfloat16: "avx512bf16", torch.float32: "avx512f"}


class PackedMatrix(Protocol):
    """A packed matrix `[height, in]`. `parts`: its memory, with which `calls` of an equal matrix compute this
    one's product."""

    @property
    def height(self) -> int: ...

    @property
    def parts(self) -> tuple[Tensor, ...]: ...

    def calls(self, x: Tensor, out: Tensor, parts: Sequence[Number]) -> tuple[Call, ...]:
        """The calls, in order, that store `x @ matrix.T` to `out`, float32 or the dtype of `x`. `parts` are
        addresses."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A float32 or bfloat16 matrix in panels."""

    data: Tensor
    height: int

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.data,)

    def calls(self, x: Tensor, out: Tensor, parts: Sequence[Number]) -> tuple[Call, ...]:
        in_tiles = self.data.shape[2] == amx.PANEL
        kernel = _IN_TILES[out.dtype] if in_tiles else _KERNELS[x.dtype, out.dtype]
        starts = shares(len(self.data), team_size())
        numbers = (x.data_ptr(), *parts, out.data_ptr(), *x.shape, self.height)
        pieces = len(starts) - 1
        return (Call(kernel, pieces, (*numbers, pieces, starts.ctypes.data, amx.together(*x.shape))),)


def can_multiply(weight: Tensor) -> bool:
    """Whether this CPU has the instructions and `weight` `[out, in]` a suitable shape."""
    height, width = weight.shape
    fits = weight.dtype in _NEEDS and height >= PANEL and width % 2 == 0
    return fits and kernels.cpu_jit.has(_NEEDS[weight.dtype])


def pack(weight: Tensor) -> PackedWeights:
    """`weight` `[out, in]` in panels. The last panel ends with the matrix, so it may repeat rows."""
    narrow = weight.dtype == torch.bfloat16
    in_tiles = narrow and weight.shape[1] % amx.COLUMNS == 0 and amx.usable()
    panels = packed_layout(weight, amx.PANEL if in_tiles else PANEL, 2 if narrow else 1)
    return PackedWeights(panels, len(weight))


def packed_layout(weight: Tensor, panel: int, columns: int) -> Tensor:
    """`weight` `[out, in]` in panels, with `columns` next to each other: `[panels, in / columns, panel,
    columns]`."""
    height, width = weight.shape
    whole, rest = divmod(height, panel)
    panels = weight[: whole * panel].view(whole, panel, width)
    if rest:
        panels = torch.cat((panels, weight[-panel:][None]))
    return panels.view(-1, panel, width // columns, columns).transpose(1, 2).contiguous()


def multiply(x: Tensor, matrix: PackedMatrix, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ matrix.T` of a contiguous `x` `[rows, in]`, with float32 sums rounded once to `dtype` (float32 or
    that of `x`): `[rows, out]`."""
    out = x.new_empty(len(x), matrix.height, dtype=dtype)
    for each in matrix.calls(x, out, [part.data_ptr() for part in matrix.parts]):
        each.run()
    return out


class PackedProduct:
    """The product with packed weights, rounded to `dtype`; None: to the input's dtype."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype | None) -> None:
        self.matrix, self._dtype = matrix, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.matrix, self._dtype)


def packed_product(weight: Tensor, *, dtype: torch.dtype | None = None) -> PackedProduct | None:
    """The product with a packed copy of `weight` `[out, in]`; its result has `dtype`. None where this CPU or
    the shape does not allow packed weights."""
    return PackedProduct(pack(weight), dtype) if can_multiply(weight) else None
