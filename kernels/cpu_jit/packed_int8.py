"""Products with an int8 matrix on a CPU with AVX-512 VNNI: half the bytes of bfloat16, and twice the products
an instruction.

Each row of the matrix has a scale. `x` is quantised at the call, every 32 columns of a row by their largest
number, as in llama.cpp (Q8_0).

    panel [out / 48][in / 4][48][4]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from kernels.cpu_jit.microkernel import PANEL
from kernels.cpu_jit.microkernel_int8 import BLOCK, microkernel_int8
from kernels.cpu_jit.packed_weights import packed_layout
from kernels.cpu_jit.thread_team import Call, Kernel, Number

_MOST = np.float32(127)
_ZERO = np.float32(0)
_ROWS = 4  # of `x` in a piece of work
_MIDDLE = 128  # added to the bytes of the matrix

_four, _two, _one = (microkernel_int8(rows) for rows in (4, 2, 1))


@fast
def _quantise(x: Any, out: Any, scales: Any, starts: Any, rows: int, width: int, p: Any) -> None:
    blocks = width // BLOCK
    while True:
        first = fetch_add(p) * _ROWS * blocks
        if first >= rows * blocks:
            return
        for block in range(first, min(first + _ROWS * blocks, rows * blocks)):
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
def _multiply(
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
                _four(at, of, start, blocks, panel, own, goal, height)
                row += 4
            elif row + 2 <= rows:
                _two(at, of, start, blocks, panel, own, goal, height)
                row += 2
            else:
                _one(at, of, start, blocks, panel, own, goal, height)
                row += 1


def _of_x(p: Any) -> None:
    _quantise(bf16_at(p[1]), i8_at(p[2]), f32_at(p[3]), i32_at(p[4]), p[5], p[6], p)


def _to_bf16(p: Any) -> None:
    x, of_x, starts, panels, scales = i8_at(p[1]), f32_at(p[2]), i32_at(p[3]), i8_at(p[4]), f32_at(p[5])
    _multiply(x, of_x, starts, panels, scales, bf16_at(p[6]), p[7], p[8], p[9], p)


def _to_f32(p: Any) -> None:
    x, of_x, starts, panels, scales = i8_at(p[1]), f32_at(p[2]), i32_at(p[3]), i8_at(p[4]), f32_at(p[5])
    _multiply(x, of_x, starts, panels, scales, f32_at(p[6]), p[7], p[8], p[9], p)


_QUANTISE, _PRODUCTS = Kernel(_of_x), {torch.bfloat16: Kernel(_to_bf16), torch.float32: Kernel(_to_f32)}


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
        """See kernels.cpu_jit.packed_weights.PackedMatrix."""
        rows, width = x.shape
        blocks = rows * width // BLOCK
        scratch = torch.empty(blocks * (4 + 4 + BLOCK), dtype=torch.uint8)
        starts = scratch.data_ptr() + 4 * blocks
        quantised = (starts + 4 * blocks, scratch.data_ptr(), starts)
        panels, scales = parts
        to = (panels, scales, out.data_ptr(), rows, width, self.height)
        return (
            Call(_QUANTISE, -(-rows // _ROWS), (x.data_ptr(), *quantised, rows, width), scratch),
            Call(_PRODUCTS[out.dtype], len(self.data), (*quantised, *to), scratch),
        )


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
