"""Products with packed weights on a CPU with AVX-512 (bfloat16: AVX512-BF16; int8: VNNI).

The matrix is stored in panels of 48 rows, in the order of the instructions: a register has 16 rows, for
bfloat16 two neighbouring columns of each, for int8 four.

    panel [out / 48][in / 2][48][2]    float32: [out / 48][in][48]    int8: [out / 48][in / 4][48][4]

A panel is a piece of work: it is read once and stays in the second-level cache for all tiles of 8 rows of
`x`. With few rows the read takes the time, with many rows the arithmetic. Int8 has half the bytes of bfloat16
and twice the products an instruction: each row of the matrix has a scale, and `x` is quantised at the call,
every 32 columns of a row by their largest number, as in llama.cpp (Q8_0).

Measured on 2 Zen 4 cores under other load, all products of a 135M model with its head, ms by rows:

    rows                             1     2     4     8    16    32    64   128   256
    f32    oneDNN, packed         32.9  28.0  26.3  29.1  40.1  67.5   118   225   438
           packed weights         19.4  19.2  17.0  22.4  37.7  48.9   101   198   424
    bf16   oneDNN, packed         16.4  14.0  15.6  20.4  24.8  40.6  67.2   115   207
           packed weights          9.8   8.8  11.3  11.6  15.5  28.9  53.8  94.0   199
           few rows, plain matrix 12.2  16.6  18.6

Packed weights are bit-equal by row: every tile adds up a row's sum in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import kernels.cpu_jit
from kernels.cpu_jit.llvm_intrinsics import (
    bf16_at,
    f32_at,
    fast,
    fetch_add,
    i8_at,
    i32_at,
    nearest,
    offset_by,
    widen,
)
from kernels.cpu_jit.microkernel import BLOCK, PANEL, microkernel, microkernel_int8
from kernels.cpu_jit.thread_team import Call, Kernel, Number

_TILE = 8  # rows of x
_INT8_ROWS = 4  # of `x` in a piece of work that quantises it
_MIDDLE = 128  # added to the bytes of the matrix
_MOST, _ZERO = np.float32(127), np.float32(0)

_eight, _four, _two, _one = (microkernel(rows) for rows in (8, 4, 2, 1))
_four_int8, _two_int8, _one_int8 = (microkernel_int8(rows) for rows in (4, 2, 1))


@fast
def _all(x: Any, panel: Any, out: Any, rows: int, width: int, height: int) -> None:
    row = 0
    while row + _TILE <= rows:
        _eight(offset_by(x, row * width), width, panel, offset_by(out, row * height), height)
        row += _TILE
    if row + 4 <= rows:
        _four(offset_by(x, row * width), width, panel, offset_by(out, row * height), height)
        row += 4
    if row + 2 <= rows:
        _two(offset_by(x, row * width), width, panel, offset_by(out, row * height), height)
        row += 2
    if row < rows:
        _one(offset_by(x, row * width), width, panel, offset_by(out, row * height), height)


@fast
def _multiply(x: Any, panels: Any, out: Any, rows: int, width: int, height: int, p: Any) -> None:
    while True:
        to = fetch_add(p) * PANEL
        if to >= height:
            return
        target = offset_by(out, min(to, height - PANEL))  # the last panel may begin within the one before
        _all(x, offset_by(panels, to * width), target, rows, width, height)


def _bf16(p: Any) -> None:
    _multiply(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), p[4], p[5], p[6], p)


def _bf16_to_f32(p: Any) -> None:
    _multiply(bf16_at(p[1]), bf16_at(p[2]), f32_at(p[3]), p[4], p[5], p[6], p)


def _f32(p: Any) -> None:
    _multiply(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), p[4], p[5], p[6], p)


_KERNELS = {  # by dtype of the operands and of the result
    (torch.bfloat16, torch.bfloat16): Kernel(_bf16),
    (torch.bfloat16, torch.float32): Kernel(_bf16_to_f32),
    (torch.float32, torch.float32): Kernel(_f32),
}
_NEEDS = {torch.bfloat16: "avx512bf16", torch.float32: "avx512f"}


@fast
def _quantise(x: Any, out: Any, scales: Any, starts: Any, rows: int, width: int, p: Any) -> None:
    blocks = width // BLOCK
    while True:
        first = fetch_add(p) * _INT8_ROWS * blocks
        if first >= rows * blocks:
            return
        for block in range(first, min(first + _INT8_ROWS * blocks, rows * blocks)):
            at, most, total = block * BLOCK, _ZERO, 0
            for i in range(BLOCK):
                most = max(most, abs(widen(x[at + i])))
            inverse = _MOST / most if most > _ZERO else _ZERO
            for i in range(BLOCK):
                number = nearest(widen(x[at + i]) * inverse)
                out[at + i] = number
                total += number
            scales[block], starts[block] = most / _MOST, -_MIDDLE * total


@fast
def _multiply_int8(
    x: Any,
    of_x: Any,
    starts: Any,
    panels: Any,
    scales: Any,
    out: Any,
    rows: int,
    width: int,
    height: int,
    p: Any,
) -> None:
    blocks = width // BLOCK
    while True:
        to = fetch_add(p) * PANEL
        if to >= height:
            return
        panel, own, target = (
            offset_by(panels, to * width),
            offset_by(scales, to),
            offset_by(out, min(to, height - PANEL)),
        )
        row = 0
        while row < rows:
            at, of, start = (
                offset_by(x, row * width),
                offset_by(of_x, row * blocks),
                offset_by(starts, row * blocks),
            )
            goal = offset_by(target, row * height)
            if row + 4 <= rows:
                _four_int8(at, of, start, blocks, panel, own, goal, height)
                row += 4
            elif row + 2 <= rows:
                _two_int8(at, of, start, blocks, panel, own, goal, height)
                row += 2
            else:
                _one_int8(at, of, start, blocks, panel, own, goal, height)
                row += 1


def _of_x(p: Any) -> None:
    _quantise(bf16_at(p[1]), i8_at(p[2]), f32_at(p[3]), i32_at(p[4]), p[5], p[6], p)


def _int8_to_bf16(p: Any) -> None:
    x, of_x, starts, panels, scales = i8_at(p[1]), f32_at(p[2]), i32_at(p[3]), i8_at(p[4]), f32_at(p[5])
    _multiply_int8(x, of_x, starts, panels, scales, bf16_at(p[6]), p[7], p[8], p[9], p)


def _int8_to_f32(p: Any) -> None:
    x, of_x, starts, panels, scales = i8_at(p[1]), f32_at(p[2]), i32_at(p[3]), i8_at(p[4]), f32_at(p[5])
    _multiply_int8(x, of_x, starts, panels, scales, f32_at(p[6]), p[7], p[8], p[9], p)


_QUANTISE = Kernel(_of_x)
_INT8_KERNELS = {torch.bfloat16: Kernel(_int8_to_bf16), torch.float32: Kernel(_int8_to_f32)}  # by result


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
        numbers = (x.data_ptr(), *parts, out.data_ptr(), *x.shape, self.height)
        return (Call(_KERNELS[x.dtype, out.dtype], len(self.data), numbers),)


@dataclass(frozen=True, slots=True)
class PackedInt8Weights:
    """A matrix in bytes with 128 added, in panels, and the scales of its rows, `[panels, 48]`."""

    data: Tensor
    height: int
    scales: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.data, self.scales

    def calls(self, x: Tensor, out: Tensor, parts: Sequence[Number]) -> tuple[Call, ...]:
        """See PackedMatrix."""
        rows, width = x.shape
        blocks = rows * width // BLOCK
        scratch = torch.empty(blocks * (4 + 4 + BLOCK), dtype=torch.uint8)
        starts = scratch.data_ptr() + 4 * blocks
        quantised = (starts + 4 * blocks, scratch.data_ptr(), starts)
        panels, scales = parts
        to = (panels, scales, out.data_ptr(), rows, width, self.height)
        return (
            Call(_QUANTISE, -(-rows // _INT8_ROWS), (x.data_ptr(), *quantised, rows, width), scratch),
            Call(_INT8_KERNELS[out.dtype], len(self.data), (*quantised, *to), scratch),
        )


def can_multiply(weight: Tensor) -> bool:
    """Whether this CPU has the instructions and `weight` `[out, in]` a suitable shape."""
    height, width = weight.shape
    fits = weight.dtype in _NEEDS and height >= PANEL and width % 2 == 0
    return fits and kernels.cpu_jit.has(_NEEDS[weight.dtype])


def pack(weight: Tensor) -> PackedWeights:
    """`weight` `[out, in]` in panels. The last panel ends with the matrix, so it may repeat rows."""
    return PackedWeights(packed_layout(weight, 2 if weight.dtype == torch.bfloat16 else 1), len(weight))


def packed_layout(weight: Tensor, columns: int) -> Tensor:
    """`weight` `[out, in]` in panels, with `columns` next to each other: `[panels, in / columns, 48,
    columns]`."""
    height, width = weight.shape
    whole, rest = divmod(height, PANEL)
    panels = weight[: whole * PANEL].view(whole, PANEL, width)
    if rest:
        panels = torch.cat((panels, weight[-PANEL:][None]))
    return panels.view(-1, PANEL, width // columns, columns).transpose(1, 2).contiguous()


def multiply(x: Tensor, matrix: PackedMatrix, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ matrix.T` of a contiguous `x` `[rows, in]`, with float32 sums rounded once to `dtype` (float32 or
    that of `x`): `[rows, out]`."""
    out = x.new_empty(len(x), matrix.height, dtype=dtype)
    for each in matrix.calls(x, out, [part.data_ptr() for part in matrix.parts]):
        each.run()
    return out


def can_quantise(weight: Tensor) -> bool:
    """Whether this CPU has the instructions and `weight` `[out, in]` a suitable shape."""
    height, width = weight.shape
    fits = weight.dtype == torch.bfloat16 and height >= PANEL and width % BLOCK == 0
    return fits and kernels.cpu_jit.has(*kernels.cpu_jit.INT8)


def quantise(weight: Tensor) -> PackedInt8Weights:
    """`weight` `[out, in]` bfloat16 as int8, each row scaled by its largest number."""
    scales = weight.float().abs().amax(1).clamp(min=1e-30) / 127
    rounded = (weight.float() / scales[:, None]).round() + _MIDDLE
    if rest := len(scales) % PANEL:
        scales = torch.cat((scales[:-rest], scales[-PANEL:]))
    return PackedInt8Weights(
        packed_layout(rounded.to(torch.uint8), 4), len(weight), scales.view(-1, PANEL).contiguous()
    )


class PackedProduct:
    """The product with packed weights, rounded to `dtype`; None: to the input's dtype."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype | None) -> None:
        self.matrix, self._dtype = matrix, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.matrix, self._dtype)


def packed_product(
    weight: Tensor, *, int8: bool = False, dtype: torch.dtype | None = None
) -> PackedProduct | None:
    """The product with a packed copy of `weight` `[out, in]`, in int8 if asked and the shape allows it; its
    result has `dtype`. None where this CPU or the shape does not allow packed weights."""
    if int8 and can_quantise(weight):
        return PackedProduct(quantise(weight), dtype)
    return PackedProduct(pack(weight), dtype) if can_multiply(weight) else None
