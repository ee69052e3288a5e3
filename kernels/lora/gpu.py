"""What adapters add to a product on a GPU, in Triton: shrink, then expand, each over all places.

    shrink   low [rows, segments * rank] = scale * x A^T         expand   out += low B, by segment

A program has 16 rows and one place, and ends at once if none of its rows has this place: so the grid depends
on the number of rows alone, a graph fits any adapters, and no rows are sorted. The sum of a row depends on no
other row. Ranks are padded with zeros to a multiple of 16, places to those of the engine; place 0 is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # of a program
_LOW, _INNER, _OUT, _RANK = 32, 128, 128, 32  # of its tiles


@dataclass(frozen=True, slots=True)
class PlacedMatrices:
    """The matrices of all places for one product: `a` `[places, layers, segments * rank, in]`, `b` `[places,
    layers, rank, out]`, `scales` `[places]` float32; place 1 is the first. `bounds`: the ends of the first
    two segments; the last one ends with the outputs."""

    a: Tensor
    b: Tensor
    scales: Tensor
    bounds: tuple[int, int]

    @property
    def segments(self) -> int:
        return self.a.shape[2] // self.b.shape[2]


@triton.jit
def _places_of(
    slots: tl.tensor, of_slot: tl.tensor, row: tl.tensor, rows: tl.tensor, place: tl.tensor
) -> tl.tensor:
    """Which of these rows have the place."""
    slot = tl.load(slots + row, mask=row < rows, other=0)
    return (tl.load(of_slot + slot, mask=row < rows, other=0) == place) & (row < rows)


@triton.jit(do_not_specialize=["rows", "layer"])
def _shrink(
    x: tl.tensor, a: tl.tensor, scales: tl.tensor, slots: tl.tensor, of_slot: tl.tensor, low: tl.tensor,
    rows: tl.tensor, layer: tl.tensor, LAYERS: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, LOW: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1)
    here = _places_of(slots, of_slot, row, rows, place + 1)
    if tl.max(here.to(tl.int32), 0) > 0:
        column, total = tl.program_id(2) * LOW + tl.arange(0, LOW), tl.zeros([ROWS, LOW], tl.float32)
        matrix = a + (place.to(tl.int64) * LAYERS + layer) * COUNT * WIDTH
        for first in range(0, WIDTH, INNER):
            inner = first + tl.arange(0, INNER)
            left = tl.load(
                x + row[:, None].to(tl.int64) * WIDTH + inner[None, :],
                mask=here[:, None] & (inner < WIDTH)[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                matrix + column[None, :] * WIDTH + inner[:, None],
                mask=(column < COUNT)[None, :] & (inner < WIDTH)[:, None], other=0.0,
            )  # fmt: skip
            total = tl.dot(left, right, total, input_precision="ieee")
        total *= tl.load(scales + place)
        to = low + row[:, None] * COUNT + column[None, :]
        tl.store(to, total.to(low.dtype.element_ty), mask=here[:, None] & (column < COUNT)[None, :])


@triton.jit(do_not_specialize=["rows", "layer"])
def _expand(
    low: tl.tensor, b: tl.tensor, slots: tl.tensor, of_slot: tl.tensor, out: tl.tensor, rows: tl.tensor,
    layer: tl.tensor, LAYERS: tl.constexpr, RANK: tl.constexpr, HEIGHT: tl.constexpr, SEGMENTS: tl.constexpr,
    END_0: tl.constexpr, END_1: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1)
    here = _places_of(slots, of_slot, row, rows, place + 1)
    if tl.max(here.to(tl.int32), 0) > 0:
        column = tl.program_id(2) * OUT + tl.arange(0, OUT)
        own = (column >= END_0).to(tl.int32) + (column >= END_1).to(tl.int32)  # the segment of each output
        matrix = b + (place.to(tl.int64) * LAYERS + layer) * RANK * HEIGHT
        total = tl.zeros([ROWS, OUT], tl.float32)
        for segment in tl.static_range(SEGMENTS):
            for first in range(0, RANK, PART):
                inner = first + tl.arange(0, PART)
                left = tl.load(
                    low + row[:, None] * (SEGMENTS * RANK) + segment * RANK + inner[None, :],
                    mask=here[:, None] & (inner < RANK)[None, :], other=0.0,
                )  # fmt: skip
                right = tl.load(
                    matrix + inner[:, None] * HEIGHT + column[None, :],
                    mask=(inner < RANK)[:, None] & ((own == segment) & (column < HEIGHT))[None, :], other=0.0,
                )  # fmt: skip
                total = tl.dot(left, right, total, input_precision="ieee")
        at = out + row[:, None].to(tl.int64) * HEIGHT + column[None, :]
        mask = here[:, None] & (column < HEIGHT)[None, :]
        before = tl.load(at, mask=mask, other=0.0)
        tl.store(at, (before.to(tl.float32) + total).to(before.dtype), mask=mask)


def adapt(x: Tensor, out: Tensor, placed: PlacedMatrices, layer: int, slots: Tensor, of_slot: Tensor) -> None:
    """Add to `out` `[rows, out]` what the adapters of the rows of `x` `[rows, in]` add in a layer, both
    contiguous and of the matrices' dtype. `slots` `[rows]` and `of_slot` `[slots]`, the place of each slot,
    are int32 on the device."""
    rows, width = x.shape
    places, layers, count, _ = placed.a.shape
    rank, height = placed.b.shape[2:]
    low = torch.empty(rows, count, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(rows, _ROWS)
    _shrink[blocks, places, triton.cdiv(count, _LOW)](
        x, placed.a, placed.scales, slots, of_slot, low, rows, layer,
        LAYERS=layers, WIDTH=width, COUNT=count, ROWS=_ROWS, LOW=_LOW, INNER=_INNER,
    )  # fmt: skip
    first, second = placed.bounds
    _expand[blocks, places, triton.cdiv(height, _OUT)](
        low, placed.b, slots, of_slot, out, rows, layer,
        LAYERS=layers, RANK=rank, HEIGHT=height, SEGMENTS=placed.segments, END_0=first, END_1=second,
        ROWS=_ROWS, OUT=_OUT, PART=_RANK,
    )  # fmt: skip
