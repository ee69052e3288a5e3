"""A mixture of experts on a GPU (kernels.moe.ref), in Triton and with torch's grouped product, or that of
kernels.quantised.

Only the device has the number of rows of an expert: buffers have room for every pair, and the kernels read
the number. So nothing waits for the host, and a graph can hold the ops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.ref import Permutation
from kernels.quantised import gpu as int4
from kernels.quantised.gpu import Int4Weight

_ROUTED = 8  # rows of logits in a program
_SUB = 64  # pairs counted at once: a tile of pairs by experts
_PARTS = 128  # programs that count; one program adds up their counts
_LOOPS = 16 * 132  # programs that loop over an unknown number of rows


@triton.jit
def _route(
    logits: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    rows: tl.tensor,
    COUNT: tl.constexpr,
    PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    RENORMALISE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, slot = tl.arange(0, PAD), tl.arange(0, K_PAD)
    exists, real = (row < rows)[:, None], (at < COUNT)[None, :]
    value = tl.load(logits + row[:, None] * COUNT + at[None, :], mask=exists & real, other=0.0)
    value = tl.where(real, value.to(tl.float32), float("-inf"))
    power = tl.exp(value - tl.max(value, 1)[:, None])
    left = tl.where(real, power / tl.sum(power, 1)[:, None], -1.0)
    shares = tl.zeros([ROWS, K_PAD], tl.float32)
    numbers = tl.zeros([ROWS, K_PAD], tl.int32)
    for i in tl.static_range(K):
        best = tl.argmax(left, 1)
        shares = tl.where((slot == i)[None, :], tl.max(left, 1)[:, None], shares)
        numbers = tl.where((slot == i)[None, :], best[:, None], numbers)
        left = tl.where(at[None, :] == best[:, None], -1.0, left)
    if RENORMALISE:
        shares = shares / tl.sum(shares, 1)[:, None]
    to = row[:, None] * K + slot[None, :]
    tl.store(weights + to, shares, mask=exists & (slot < K)[None, :])
    tl.store(experts + to, numbers, mask=exists & (slot < K)[None, :])


@triton.jit
def _count(
    experts: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    first: tl.tensor,
    span: tl.tensor,
    PAD: tl.constexpr,
    SUB: tl.constexpr,
) -> None:
    """Count the pairs of each expert in this program's span."""
    begin, each = tl.program_id(0) * span, tl.arange(0, PAD)
    found = tl.zeros([PAD], tl.int32)
    for at in range(0, span, SUB):
        pair = begin + at + tl.arange(0, SUB)
        expert = tl.load(experts + pair, mask=pair < pairs, other=-1) - first
        found += tl.sum((expert[:, None] == each[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * PAD + each, found)


@triton.jit
def _begin(
    counts: tl.tensor,
    bounds: tl.tensor,
    here: tl.tensor,
    parts: tl.tensor,
    PAD: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Turn counts by span and expert into first rows, and store the experts' bounds."""
    span, each = tl.arange(0, PARTS), tl.arange(0, PAD)
    at = counts + span[:, None] * PAD + each[None, :]
    inside = (span < parts)[:, None] & (each < here)[None, :]
    found = tl.load(at, mask=inside, other=0)
    total = tl.sum(found, 0)
    until = tl.cumsum(total, 0)
    tl.store(at, tl.cumsum(found, 0) - found + (until - total)[None, :], mask=inside)
    tl.store(bounds + each, until - total, mask=each < here)
    tl.store(bounds + 1 + each, until, mask=each + 1 == here)


@triton.jit
def _permute(
    experts: tl.tensor,
    begins: tl.tensor,
    rows: tl.tensor,
    pairs: tl.tensor,
    first: tl.tensor,
    here: tl.tensor,
    span: tl.tensor,
    PAD: tl.constexpr,
    SUB: tl.constexpr,
) -> None:
    begin, each = tl.program_id(0) * span, tl.arange(0, PAD)
    following = tl.load(begins + tl.program_id(0) * PAD + each)
    for at in range(0, span, SUB):
        pair = begin + at + tl.arange(0, SUB)
        expert = tl.load(experts + pair, mask=pair < pairs, other=-1) - first
        mine = (expert[:, None] == each[None, :]).to(tl.int32)
        row = tl.sum(mine * (tl.cumsum(mine, 0) - mine + following[None, :]), 1)
        row = tl.where((expert >= 0) & (expert < here), row, -1)
        tl.store(rows + pair, row, mask=pair < pairs)
        following += tl.sum(mine, 0)


@triton.jit
def _dispatch(
    x: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + token * WIDTH + at, mask=inside)
    for i in tl.static_range(K):
        row = tl.load(rows + token * K + i).to(tl.int64)
        tl.store(out + row * WIDTH + at, value, mask=inside & (row >= 0))


@triton.jit
def _swiglu(
    gate_up: tl.tensor,
    out: tl.tensor,
    bounds: tl.tensor,
    LAST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    stride = tl.full([BLOCK], WIDTH, tl.int64)
    for row in range(tl.program_id(0), tl.load(bounds + LAST), tl.num_programs(0)):
        gate = tl.load(gate_up + 2 * row * stride + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + (2 * row + 1) * stride + at, mask=inside, other=0.0).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)  # rounded as F.silu rounds
        tl.store(out + row * stride + at, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    y: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        row = tl.load(rows + token * K + i).to(tl.int64)
        share = tl.load(weights + token * K + i)
        total += share * tl.load(y + row * WIDTH + at, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + at, total.to(out.dtype.element_ty), mask=inside)


def route(logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See kernels.moe.ref; equally probable experts are in the order of their numbers."""
    rows, experts = logits.shape
    weights = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    numbers = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    _route[(triton.cdiv(rows, _ROUTED),)](
        logits, weights, numbers, rows, COUNT=experts, PAD=triton.next_power_of_2(experts), K=count,
        K_PAD=triton.next_power_of_2(count), ROWS=_ROUTED, RENORMALISE=renormalise, num_warps=4,
    )  # fmt: skip
    return weights, numbers


def permute(experts: Tensor, first: int, count: int) -> Permutation:
    """See kernels.moe.ref; `experts` is contiguous."""
    pairs, device = experts.numel(), experts.device
    span = triton.cdiv(triton.cdiv(pairs, _PARTS), _SUB) * _SUB
    parts, pad = triton.cdiv(pairs, span), triton.next_power_of_2(count)
    begins = torch.empty(parts, pad, dtype=torch.int32, device=device)
    bounds = torch.empty(count + 1, dtype=torch.int32, device=device)
    rows = torch.empty(experts.shape, dtype=torch.int32, device=device)
    _count[(parts,)](experts, begins, pairs, first, span, PAD=pad, SUB=_SUB, num_warps=4)
    _begin[(1,)](begins, bounds, count, parts, PAD=pad, PARTS=_PARTS, num_warps=16)
    _permute[(parts,)](experts, begins, rows, pairs, first, count, span, PAD=pad, SUB=_SUB, num_warps=4)
    return Permutation(bounds, rows)


def dispatch(x: Tensor, permutation: Permutation) -> Tensor:
    """See kernels.moe.ref; `x` is contiguous."""
    tokens, k = permutation.rows.shape
    out = x.new_empty(tokens * k, x.shape[1])
    width = x.shape[1]
    _dispatch[(tokens,)](
        x, permutation.rows, out, K=k, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
    )
    return out


def combine(y: Tensor, permutation: Permutation, weights: Tensor) -> Tensor:
    """See kernels.moe.ref; `y` and `weights` are contiguous."""
    tokens, k = permutation.rows.shape
    width = y.shape[1]
    out = y.new_empty(tokens, width)
    block = triton.next_power_of_2(width)
    _combine[(tokens,)](y, permutation.rows, weights, out, K=k, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def experts_mlp(x: Tensor, gate_up: Tensor | Int4Weight, down: Tensor | Int4Weight, bounds: Tensor) -> Tensor:
    """See kernels.moe.ref; plain arguments have one dtype."""
    return grouped(_gate(grouped(x, gate_up, bounds), bounds), down, bounds)


def grouped(x: Tensor, weight: Tensor | Int4Weight, bounds: Tensor) -> Tensor:
    """The product of each expert's rows with its matrix."""
    if isinstance(weight, Int4Weight):
        return int4.product(x, weight, bounds=bounds)
    return torch._grouped_mm(x, weight.mT, offs=bounds[1:])


def _gate(gate_up: Tensor, bounds: Tensor) -> Tensor:
    """SwiGLU of the rows up to the last bound."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = triton.next_power_of_2(width)
    _swiglu[(min(rows, _LOOPS),)](
        gate_up, out, bounds, LAST=len(bounds) - 1, WIDTH=width, BLOCK=block, num_warps=4
    )
    return out
