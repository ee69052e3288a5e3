"""Rotates q and k of a layer's joined q, k, v and writes K and V to the paged cache, in one Triton launch.

One program a token and KV head: its query heads, its key, its value. The norms of q and k heads (Qwen3) are
computed here, too, in float32, rounded like the separate norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import begin, ready


@triton.jit
def _halves(
    source: tl.tensor,
    heads: tl.tensor,
    rows: tl.tensor,
    split_stride: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Both halves of some heads, `[heads, HALF]` float32, normalised if NORM."""
    d = tl.arange(0, HALF)
    inside = rows[:, None] & (d < DIM // 2)[None, :]
    at = source + heads[:, None] * DIM + d[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(at + split * split_stride, mask=inside, other=0.0)
        high += tl.load(at + split * split_stride + DIM // 2, mask=inside, other=0.0)
    low = low.to(DTYPE).to(tl.float32)
    high = high.to(DTYPE).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        weight_low = tl.load(norm + d, mask=d < DIM // 2, other=0.0).to(tl.float32)
        weight_high = tl.load(norm + DIM // 2 + d, mask=d < DIM // 2, other=0.0).to(tl.float32)
        low = (low * scale * weight_low[None, :]).to(DTYPE).to(tl.float32)
        high = (high * scale * weight_high[None, :]).to(DTYPE).to(tl.float32)
    return low, high


@triton.jit
def _keep(target: tl.tensor, value: tl.tensor, inside: tl.tensor) -> None:
    """Write to the cache; fp8 saturates, since it has no infinity."""
    if target.dtype.element_ty.is_fp8():
        value = tl.clamp(value.to(tl.float32), -448.0, 448.0, tl.PropagateNan.ALL)
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer", "layers"])
def _rope_write(
    qkv: tl.tensor,
    query: tl.tensor,
    kv: tl.tensor,
    rotations: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    eps: tl.tensor,
    split_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    IN_PLACE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = query.dtype.element_ty
    source = qkv + token * (GROUP + 2) * KV_HEADS * DIM
    d = tl.arange(0, HALF)
    within = d < DIM // 2
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(rotations + position * 2 * DIM + d, mask=within, other=0.0)[None, :]
    sin = tl.load(rotations + position * 2 * DIM + DIM + DIM // 2 + d, mask=within, other=0.0)[None, :]
    place = tl.load(slot_mapping + token).to(tl.int64)
    ready(CHAINED)

    g = tl.arange(0, GROUP_PAD)
    heads = head * GROUP + g
    low, high = _halves(
        source, heads, g < GROUP, split_stride, q_norm, eps, DIM, HALF, SPLITS, NORM, dtype
    )  # fmt: skip
    target = query + token * KV_HEADS * GROUP * DIM + heads[:, None] * DIM + d[None, :]
    inside = (g < GROUP)[:, None] & within[None, :]
    tl.store(target, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(target + DIM // 2, (high * cos + low * sin).to(dtype), mask=inside)

    row = ((place // BLOCK_TOKENS) * layers + layer) * 2 * BLOCK_TOKENS + place % BLOCK_TOKENS
    one = tl.arange(0, 1)
    low, high = _halves(
        source, KV_HEADS * GROUP + head + one, one < 1, split_stride, k_norm, eps,
        DIM, HALF, SPLITS, NORM, dtype,
    )  # fmt: skip
    target = kv + row * KV_HEADS * DIM + head * DIM + d[None, :]
    first, second = (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
    _keep(target, first, within[None, :])
    _keep(target + DIM // 2, second, within[None, :])
    if IN_PLACE:
        own = source + (KV_HEADS * GROUP + head) * DIM + d[None, :]
        tl.store(own, first, mask=within[None, :])
        tl.store(own + DIM // 2, second, mask=within[None, :])
    low, high = _halves(
        source, KV_HEADS * GROUP + KV_HEADS + head + one, one < 1, split_stride, k_norm, eps,
        DIM, HALF, SPLITS, False, dtype,
    )  # fmt: skip
    target += BLOCK_TOKENS * KV_HEADS * DIM
    _keep(target, low.to(dtype), within[None, :])
    _keep(target + DIM // 2, high.to(dtype), within[None, :])


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """Positions and slot mapping of a step's tokens, `[tokens]` int32; `rotations` is the table of
    `rope_table`."""

    rotations: Tensor
    positions: Tensor
    slot_mapping: Tensor  # block * block_tokens + offset
    chained: bool = False  # see kernels.launch
    dtype: torch.dtype | None = None  # of the queries; None: the cache's


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights `[head_dim]` of the norms on each q and k head; None without them."""

    query: Tensor | None
    key: Tensor | None
    eps: float


def rope_write(
    qkv: Tensor, inputs: RopeInputs, norms: HeadNorms, kv: Tensor, layer: int, heads: int
) -> Tensor:
    """Rotate the queries and keys of `qkv` `[tokens, (heads + 2 * kv_heads) * head_dim]`, and write keys and
    values of `layer` to `kv`. Returns the queries `[tokens, heads, head_dim]`; keys are rotated in `qkv`,
    too. The splits of a `qkv` `[splits, tokens, ...]` float32 are added up first; it stays unchanged."""
    _, layers, _, block_tokens, kv_heads, dim = kv.shape
    tokens, width = qkv.shape[-2:]
    query = torch.empty(tokens, heads, dim, dtype=inputs.dtype or kv.dtype, device=kv.device)
    group = heads // kv_heads
    _rope_write[(tokens, kv_heads)](
        qkv, query, kv, inputs.rotations, inputs.positions, inputs.slot_mapping, norms.query, norms.key,
        layer, layers, norms.eps, tokens * width,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), DIM=dim,
        HALF=triton.next_power_of_2(dim // 2), BLOCK_TOKENS=block_tokens,
        SPLITS=qkv.shape[0] if qkv.dim() == 3 else 1, NORM=norms.query is not None, IN_PLACE=qkv.dim() == 2,
        CHAINED=inputs.chained, launch_pdl=inputs.chained, num_warps=1,
    )  # fmt: skip
    return query
