"""`matmul` and `matmul_fixed` are products with a large weight on a GPU, in Triton.

`matmul` is for few rows, where the reading of the weight limits. A library's kernels for such shapes waste
bandwidth if the weight is small: too few programs, or one wave and a bit. Here the weight is the wide operand
of the matrix instruction (`weight @ x.T`), and `splits` programs share a column tile, each with a part of the
inner dimension, so that one wave fills every multiprocessor. Their float32 sums stay separate: the next
kernel (norm, rotation) adds them up. With a joined gate and up a program may compute the same columns of
both, and store `silu(gate) * up`.

In `matmul_fixed` a row's bits do not depend on the other rows. A library uses another kernel, or splits the
inner dimension differently, for another number of rows. Here one program computes each element as one float32
sum from the start of the inner dimension to its end, in the steps of the matrix instruction.

Layouts may still depend on the number of rows: they change which elements a program computes and how it loads
its operands, not the order of an element's sum. All layouts of a device have tiles of 64 rows or more if the
type has matrix instructions, so that they use the same instruction.

Chained launches: a kernel starts while the kernel before it still runs, and waits for its results in
`ready`.

This is programmatic dependent launch (since CUDA 12.3 and sm_90). `begin` lets the next kernel start once all
programs of this one have started; `ready` waits for the end of the kernel before and its writes. Before
`ready` a kernel may use only memory that no kernel of the chain writes: weights, tables, the step's plan.
Every kernel that calls `begin` must call `ready` on every path; then all earlier kernels have ended, too, not
only the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.quantised.ref import Fp8Rows

_GROUP = 8  # row tiles that share the columns of the weight in the second-level cache


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    rows: tl.tensor,
    split_stride: tl.tensor,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT_INNER: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    CHAINED: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    begin(CHAINED)
    first, split = tl.program_id(0) * TILE, tl.program_id(1)
    n, m, k = first + tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, STEP)
    HALF: tl.constexpr = TILE // 2
    if GATED:  # half a tile of the gate, and the same of up
        i = tl.arange(0, TILE)
        n = first // 2 + i % HALF + tl.where(i < HALF, 0, WIDTH // 2)
    begin_at = split * SPLIT_INNER
    weights = weight + n.to(tl.int64)[:, None] * INNER + k[None, :]
    if AHEAD > 0:  # while the kernel before still runs
        line = tl.arange(0, AHEAD // 64) * 64
        prefetch(weight + n.to(tl.int64)[:, None] * INNER + begin_at + line[None, :])
    ready(CHAINED)
    inputs = x + m[:, None] * INNER + k[None, :]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for at in tl.range(begin_at, begin_at + SPLIT_INNER, STEP, num_stages=STAGES):
        w = tl.load(weights + at, eviction_policy="evict_first")
        value = tl.load(inputs + at, mask=(m < rows)[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
    if SCALED:
        acc *= tl.load(weight_scales + n)[:, None] * tl.load(x_scales + m, mask=m < rows, other=0.0)[None, :]
    if GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, HALF, ROWS]), [2, 1, 0]))
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)  # all rounded as kernels.elementwise has it
        columns = first // 2 + tl.arange(0, HALF)
        at_out = out + m[:, None] * (WIDTH // 2) + columns[None, :]
        tl.store(at_out, (silu * up).to(dtype), mask=(m < rows)[:, None])
    else:
        at_out = out + split * split_stride + m[:, None] * WIDTH + n[None, :]
        tl.store(at_out, tl.trans(acc).to(out.dtype.element_ty), mask=(m < rows)[:, None])


@dataclass(frozen=True, slots=True)
class MatmulTuning:
    """The layout of a product. `tile` divides the width, `splits * step` the inner dimension. `ahead`:
    elements of each row of the weight, a power of two of at least 64, prefetched before the input is
    there."""

    tile: int
    step: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    ahead: int = 0
    gated: bool = False  # for a joined gate and up with one split: SwiGLU in the same kernel
    chained: bool = False  # see kernels.gemm.gpu


def matmul(x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows, tuning: MatmulTuning) -> Tensor:
    """`x @ weight.T` of `x` `[rows, inner]` and `weight` `[width, inner]`: `[rows, width]` in the dtype of
    `x`, or with several splits `[splits, rows, width]` float32, to be added up; with a gated layout
    `silu(gate) * up`, `[rows, width / 2]`. Fp8 rows, on both sides, give bfloat16; each split is scaled at
    its end. Raises ValueError if the weight does not divide into the layout."""
    numbers, x_scales = x.tensors if isinstance(x, Fp8Rows) else (x, None)
    matrix, weight_scales = weight.tensors if isinstance(weight, Fp8Rows) else (weight, None)
    dtype = numbers.dtype if x_scales is None else torch.bfloat16
    rows, inner = numbers.shape
    width, splits = len(matrix), tuning.splits
    if width % tuning.tile or inner % (splits * tuning.step) or (tuning.gated and splits > 1):
        raise ValueError(f"a weight of {width} x {inner} does not divide into {tuning}")
    shape = (rows, width // (1 + tuning.gated)) if splits == 1 else (splits, rows, width)
    out = torch.empty(shape, dtype=dtype if splits == 1 else torch.float32, device=numbers.device)
    _matmul[(width // tuning.tile, splits)](
        numbers, matrix, out, x_scales, weight_scales, rows, rows * width, WIDTH=width, INNER=inner,
        SPLIT_INNER=inner // splits, ROWS=max(16, triton.next_power_of_2(rows)), TILE=tuning.tile,
        STEP=tuning.step, STAGES=tuning.stages, PRECISION="ieee" if dtype == torch.float32 else "tf32",
        AHEAD=tuning.ahead, GATED=tuning.gated, CHAINED=tuning.chained, SCALED=x_scales is not None,
        launch_pdl=tuning.chained, num_warps=tuning.warps,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _matmul_fixed(
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
    column = tl.where(n < width, n, 0)  # columns past the end are computed, but not stored
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
    """The layout of a product: `rows` and `tile` columns of a program, `step` of the inner dimension at a
    time, all powers of two."""

    rows: int
    tile: int
    step: int
    stages: int = 4
    warps: int = 4


def layout_of(rows: int, width: int, processors: int, layouts: tuple[FixedTuning, ...]) -> FixedTuning:
    """The first of `layouts` (the largest tiles first) that gives most multiprocessors a program and does not
    leave half of its rows empty; else the last."""
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
    _matmul_fixed[(triton.cdiv(rows, tuning.rows) * triton.cdiv(width, tuning.tile),)](
        x, weight, bias, out, rows, width, inner, ROWS=tuning.rows, TILE=tuning.tile, STEP=tuning.step,
        GROUP=_GROUP, STAGES=tuning.stages, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EVEN=inner % tuning.step == 0, BIASED=bias is not None, num_warps=tuning.warps,
    )  # fmt: skip
    return out


@triton.jit
def begin(CHAINED: tl.constexpr) -> None:
    """Let the next kernel start."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def ready(CHAINED: tl.constexpr) -> None:
    """Wait for the end of the kernel before."""
    if CHAINED:
        gdc_wait()


@triton.jit
def prefetch(pointers: tl.tensor) -> None:
    """Load the cache lines at `pointers` into the second-level cache, without a wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
