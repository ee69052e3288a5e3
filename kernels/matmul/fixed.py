"""Products in which no row sees the others, on a GPU, in Triton: for any number of rows the same bits.

A library takes another kernel, or splits the inner dimension otherwise, when the number of rows is another.
Here each element is one sum over the inner dimension from its start to its end, in float32, in the matrix
instruction's own steps, by one program: neither the number of rows nor a row's place in them changes it.

Layouts may still go by the number of rows: they say which elements a program computes and how it loads what
it needs, not in which order an element is summed. Those of one device all have tiles of 64 rows or more where
the type has matrix instructions, so that they take the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUP = 8  # row tiles that share the columns of the weight in the second-level cache


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    # Tiles in groups of GROUP rows of tiles, column by column.
    tiles, row_tiles = (width + TILE - 1) // TILE, (rows + ROWS - 1) // ROWS
    group = tl.program_id(0) // (GROUP * tiles)
    high = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles)
    m = (group * GROUP + within % high) * ROWS + tl.arange(0, ROWS)
    n = within // high * TILE + tl.arange(0, TILE)
    k = tl.arange(0, STEP)
    exists = (m < rows)[:, None]
    inputs = x + m.to(tl.int64)[:, None] * inner + k[None, :]
    column = tl.where(n < width, n, 0)  # of those past the end something is computed, and not stored
    weights = weight + column.to(tl.int64)[:, None] * inner + k[None, :]
    acc = tl.zeros([ROWS, TILE], tl.float32)
    for at in tl.range(0, inner, STEP, num_stages=STAGES):
        if EVEN:
            value = tl.load(inputs + at, mask=exists, other=0.0)
            w = tl.load(weights + at)
        else:
            inside = (at + k < inner)[None, :]
            value = tl.load(inputs + at, mask=exists & inside, other=0.0)
            w = tl.load(weights + at, mask=inside, other=0.0)
        acc = tl.dot(value, tl.trans(w), acc, input_precision=PRECISION)
    if BIASED:
        acc += tl.load(bias + column).to(tl.float32)[None, :]
    at_out = out + m.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=exists & (n < width)[None, :])


@dataclass(frozen=True, slots=True)
class FixedTuning:
    """How a product is laid out: `rows` and `tile` columns of a program, `step` of the inner dimension at a
    time, all powers of two."""

    rows: int
    tile: int
    step: int
    stages: int = 4
    warps: int = 4


def layout_of(rows: int, width: int, processors: int, layouts: tuple[FixedTuning, ...]) -> FixedTuning:
    """The first of `layouts`, the largest tiles first, that gives most of the multiprocessors a program and
    does not leave half of its rows empty where another leaves fewer; else the last."""
    least = layouts[-1]
    for tuning in layouts[:-1]:
        programs = triton.cdiv(rows, tuning.rows) * triton.cdiv(width, tuning.tile)
        if tuning.rows < 2 * max(rows, least.rows) and 4 * programs >= 3 * processors:
            return tuning
    return least


def matmul_fixed(x: Tensor, weight: Tensor, bias: Tensor | None, tuning: FixedTuning) -> Tensor:
    """`x @ weight.T + bias` of `x` `[rows, inner]`, `weight` `[width, inner]` and `bias` `[width]`, all
    contiguous: `[rows, width]` in the dtype of `x`."""
    rows, inner = x.shape
    width = weight.shape[0]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _matmul[(triton.cdiv(rows, tuning.rows) * triton.cdiv(width, tuning.tile),)](
        x, weight, bias, out, rows, width, inner, ROWS=tuning.rows, TILE=tuning.tile, STEP=tuning.step,
        GROUP=_GROUP, STAGES=tuning.stages, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EVEN=inner % tuning.step == 0, BIASED=bias is not None, num_warps=tuning.warps,
    )  # fmt: skip
    return out
