"""Products with a matrix on a CPU with AVX-512, of which bfloat16 needs the part that multiplies its pairs.

The matrix is kept in panels of 48 of its rows, as instructions want it: 16 rows in one register, of bfloat16
two neighbouring columns of each.

    panel [out / 48][in / 2][48][2]    float32: [out / 48][in][48]

A panel is a piece of work: it comes from memory once and stays in the second cache for all tiles of 8 rows of
`x` by the panel. With few rows that reading is all the time, with many the arithmetic.

int8 halves what is read, for few rows; for more a panel is widened to bfloat16 first, in the second cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernels.cpu
from kernels.cpu.machine import after, bf16_at, f32_at, fast, i8_at, take, upper
from kernels.cpu.team import Call, Kernel, Number, team_size
from kernels.matmul.tiles import PANEL, tile_of

_TILE = 8  # rows of x
_FEW = 4  # rows up to which int8 is multiplied as float32: as quick as memory. More pay for widening a panel

_eight, _four, _two, _one = (tile_of(rows) for rows in (8, 4, 2, 1))


@fast
def _few(x: Any, panel: Any, scales: Any, out: Any, row: int, rows: int, width: int, height: int) -> None:
    """The rows from `row` on, fewer than eight."""
    if row + 4 <= rows:
        _four(after(x, row * width), width, panel, scales, after(out, row * height), height)
        row += 4
    if row + 2 <= rows:
        _two(after(x, row * width), width, panel, scales, after(out, row * height), height)
        row += 2
    if row < rows:
        _one(after(x, row * width), width, panel, scales, after(out, row * height), height)


@fast
def _all(x: Any, panel: Any, scales: Any, out: Any, rows: int, width: int, height: int) -> None:
    row = 0
    while row + _TILE <= rows:
        _eight(after(x, row * width), width, panel, scales, after(out, row * height), height)
        row += _TILE
    _few(x, panel, scales, out, row, rows, width, height)


@fast
def _panels(x: Any, panels: Any, out: Any, rows: int, width: int, height: int, p: Any) -> None:
    while True:
        to = take(p) * PANEL
        if to >= height:
            return
        target = after(out, min(to, height - PANEL))  # the last panel may begin within the one before
        _all(x, after(panels, to * width), None, target, rows, width, height)


@fast
def _quantised(
    x: Any, panels: Any, scales: Any, out: Any, scratch: Any, rows: int, width: int, height: int, p: Any
) -> None:
    wide = after(scratch, take(after(p, 1)) * PANEL * width)  # this thread's own
    while True:
        to = take(p) * PANEL
        if to >= height:
            return
        panel, own, target = after(panels, to * width), after(scales, to), after(out, min(to, height - PANEL))
        if rows <= _FEW:
            _few(x, panel, own, target, 0, rows, width, height)
            continue
        for i in range(PANEL * width):
            wide[i] = upper(np.float32(panel[i]))
        _all(x, wide, own, target, rows, width, height)


def _bf16(p: Any) -> None:
    _panels(bf16_at(p[1]), bf16_at(p[2]), bf16_at(p[3]), p[4], p[5], p[6], p)


def _f32(p: Any) -> None:
    _panels(f32_at(p[1]), f32_at(p[2]), f32_at(p[3]), p[4], p[5], p[6], p)


def _int8(p: Any) -> None:
    x, panels, scales, out, scratch = bf16_at(p[2]), i8_at(p[3]), f32_at(p[4]), bf16_at(p[5]), bf16_at(p[6])
    _quantised(x, panels, scales, out, scratch, p[7], p[8], p[9], p)


_KERNELS = {torch.bfloat16: Kernel(_bf16), torch.float32: Kernel(_f32)}
_QUANTISED = Kernel(_int8)
_NEEDS = {torch.bfloat16: "avx512bf16", torch.float32: "avx512f"}


def can_multiply(weight: Tensor) -> bool:
    """True where this CPU has the instructions and `weight` `[out, in]` a shape for panels."""
    height, width = weight.shape
    fits = weight.dtype in _NEEDS and height >= PANEL and width % 2 == 0
    return fits and kernels.cpu.has(_NEEDS[weight.dtype])


@dataclass(frozen=True, slots=True)
class Panels:
    """`panels` of a matrix of `height` rows, and for int8 what 1 stands for in each row: `scales`
    `[panels, 48]`."""

    panels: Tensor
    height: int
    scales: Tensor | None = None


def pack(weight: Tensor) -> Panels:
    """`weight` `[out, in]` in panels, as above. The last one ends with the matrix."""
    height, width = weight.shape
    whole, rest = divmod(height, PANEL)
    panels = weight[: whole * PANEL].view(whole, PANEL, width)
    if rest:
        panels = torch.cat((panels, weight[-PANEL:][None]))
    columns = 2 if weight.dtype == torch.bfloat16 else 1
    packed = panels.view(-1, PANEL, width // columns, columns).transpose(1, 2).contiguous()
    return Panels(packed, height)


def multiply(x: Tensor, matrix: Panels) -> Tensor:
    """`x @ weight.T` of `x` `[rows, in]`, contiguous, and the panels of `weight`, added up in float32 and
    rounded once: `[rows, out]`."""
    out = x.new_empty(len(x), matrix.height)
    scales = 0 if matrix.scales is None else matrix.scales.data_ptr()
    product_call(x, matrix, matrix.panels.data_ptr(), scales, out).run()
    return out


def product_call(x: Tensor, like: Panels, panels: Number, scales: Number, out: Tensor) -> Call:
    """See multiply. `panels` and `scales` are addresses, of matrices `like` this one."""
    (rows, width), pieces = x.shape, len(like.panels)
    of_x, to, sizes = x.data_ptr(), out.data_ptr(), (rows, width, like.height)
    if like.scales is None:
        return Call(_KERNELS[x.dtype], pieces, (of_x, panels, to, *sizes))
    wide = x.new_empty(team_size() if rows > _FEW else 0, PANEL * width)
    return Call(_QUANTISED, pieces, (0, of_x, panels, scales, to, wide.data_ptr(), *sizes), wide)


def quantise(weight: Tensor) -> Panels:
    """`weight` `[out, in]` in bfloat16 to int8, each row by its largest number."""
    scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    rounded = (weight.float() / scales).round()
    packed = pack(rounded.bfloat16()).panels.to(torch.int8)
    whole = scales[:, 0]
    if len(whole) % PANEL:
        whole = torch.cat((whole[: -(len(whole) % PANEL)], whole[-PANEL:]))
    return Panels(packed, weight.shape[0], whole.view(-1, PANEL).contiguous())
