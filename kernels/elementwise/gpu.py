"""RMS norm on a GPU, in Triton: the residual add, the norm and the sum of a split product in one pass.

One program a row, accumulated in float32. The sum `x + residual` is rounded to its dtype before the norm,
as the torch reference does.

SwiGLU on a GPU, in Triton: one read, one write, float32 in between; it also adds up a split product.

Rotates q and k of a layer's joined q, k, v and writes K and V to the paged cache, in one Triton launch.

One program a token and KV head: its query heads, its key, its value. The norms of q and k heads (Qwen3) are
computed here, too, in float32, rounded like the separate norm.

Computes a step's inputs on a GPU, in Triton, from the host's columns and the state of the slots.

The host has the slot, position and batch index of every token, and the ids of host-fed tokens. Only the
device has the ids that the step before has chosen, and whether a slot is done. `record_timestamp` writes the
device's clock, to time parts of a stream or graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from kernels.gemm.gpu import begin, ready
from kernels.quantised.gpu import empty_rows, in_fp8, warps_of
from kernels.quantised.ref import Fp8Rows


@triton.jit
def _norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    split_stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    scales = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    ready(CHAINED)
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(x + split * split_stride + row * WIDTH + at, mask=inside, other=0.0)
    if ADD:
        value = value.to(residual.dtype.element_ty).to(tl.float32)  # what an unsplit product gives
        value += tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = value * scale * scales
    if out.dtype.element_ty == tl.float8e4nv:
        normed, row_scale = in_fp8(normed)
        tl.store(out_scales + row, row_scale)
    tl.store(out + row * WIDTH + at, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, chained: bool = False) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` of the rows of `x` `[rows, width]`, contiguous."""
    out = torch.empty_like(x)
    _launch((x, None, weight, out), eps, chained)
    return out


def add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    chained: bool = False,
) -> Tensor:
    """Add `x` to `residual` `[rows, width]` in place; the norm of the sum, in `out` if given. `x` is `[rows,
    width]`, or `[splits, rows, width]` float32, which is added up over the splits."""
    out = torch.empty_like(residual) if out is None else out
    _launch((x, residual, weight, out), eps, chained)
    return out


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, chained: bool = False
) -> Fp8Rows:
    """`rms_norm` as fp8 rows; with a `residual` `add_rms_norm_`."""
    out = empty_rows(x.shape[-2], x.shape[-1], x.device)
    _launch((x, residual, weight, out.numbers), eps, chained, out.scales)
    return out


def _launch(
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor],
    eps: float,
    chained: bool,
    out_scales: Tensor | None = None,
) -> None:
    x, residual, weight, out = tensors
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, residual, weight, out, out_scales, rows * width, eps,
        WIDTH=width, BLOCK=block, SPLITS=x.shape[0] if x.dim() == 3 else 1, ADD=residual is not None,
        CHAINED=chained, launch_pdl=chained, num_warps=min(16, warps_of(block)),
    )  # fmt: skip


_BLOCK = 1024


@triton.jit
def _swiglu(
    gate_up: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    split_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    fp8: tl.constexpr = out.dtype.element_ty == tl.float8e4nv  # a row is then in one program
    rounded: tl.constexpr = gate_up.dtype.element_ty if fp8 else out.dtype.element_ty
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    ready(CHAINED)
    gate_up += row * 2 * WIDTH + at
    gate = tl.load(gate_up, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + WIDTH, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        gate += tl.load(gate_up + split * split_stride, mask=inside, other=0.0)
        up += tl.load(gate_up + split * split_stride + WIDTH, mask=inside, other=0.0)
    if SPLITS > 1:  # what an unsplit product gives
        gate, up = gate.to(rounded).to(tl.float32), up.to(rounded).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(rounded).to(tl.float32)  # rounded as F.silu rounds
    value = silu * up
    if fp8:
        value, row_scale = in_fp8(value)
        tl.store(out_scales + row, row_scale)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, dtype: torch.dtype | None = None, *, chained: bool = False) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * width]`, gate first: `[tokens, width]` in `dtype`. The splits of
    `[splits, tokens, ...]` float32 are added up first, and the sum is rounded to `dtype`."""
    rows, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = gate_up.new_empty(rows, width, dtype=dtype)
    _swiglu[(rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, None, 2 * rows * width, WIDTH=width, BLOCK=_BLOCK,
        SPLITS=gate_up.shape[0] if gate_up.dim() == 3 else 1, CHAINED=chained, launch_pdl=chained,
        num_warps=4,
    )  # fmt: skip
    return out


def swiglu_fp8(gate_up: Tensor, *, chained: bool = False) -> Fp8Rows:
    """`swiglu` of an unsplit product as fp8 rows."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, block = empty_rows(rows, width, gate_up.device), triton.next_power_of_2(width)
    _swiglu[(rows, 1)](
        gate_up, out.numbers, out.scales, 0, WIDTH=width, BLOCK=block, SPLITS=1, CHAINED=chained,
        launch_pdl=chained, num_warps=warps_of(block),
    )  # fmt: skip
    return out


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
    chained: bool = False  # see kernels.gemm.gpu
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


# In place of the id of a device-fed token; the i-th draft after it is i less.
FROM_DEVICE = -1
NO_DRAFT = -1_000  # in place of the id of a draft that is not wanted, or that the slot does not have
AT_PLACE = -1_000_000  # in place of the position of a slot's last token, where only the device has it
_INPUTS_BLOCK = 128
_FROM_DEVICE, _NO_DRAFT, _AT_PLACE = (tl.constexpr(each) for each in (FROM_DEVICE, NO_DRAFT, AT_PLACE))


@triton.jit(do_not_specialize=["tokens", "rows", "table_blocks", "spare", "spare_slot"])
def _resolve(
    columns: tl.tensor,
    tables: tl.tensor,
    last_tokens: tl.tensor,
    done: tl.tensor,
    places: tl.tensor | None,
    drafts: tl.tensor | None,
    max_lengths: tl.tensor | None,
    ids: tl.tensor,
    slot_mapping: tl.tensor,
    lengths: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    table_blocks: tl.tensor,
    spare: tl.tensor,
    spare_slot: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tokens
    slot = tl.load(columns + at, mask=inside, other=0).to(tl.int64)
    position = tl.load(columns + tokens + at, mask=inside, other=0)
    given = tl.load(columns + 2 * tokens + at, mask=inside, other=0)
    last = tl.load(last_tokens + slot, mask=inside, other=0)
    ended = tl.load(done + slot, mask=inside, other=1)
    table = tables + slot * table_blocks
    if PLACED:
        place = tl.load(places + slot, mask=inside, other=0)
        is_draft = given < _FROM_DEVICE
        ahead = tl.where(is_draft & (given > _NO_DRAFT), _FROM_DEVICE - given, 0)
        draft = tl.load(drafts + slot * MOST_DRAFTS + ahead - 1, mask=ahead > 0, other=-1)
        position = tl.where(position <= _AT_PLACE, place + ahead, position)
        sound = (draft >= 0) & (ended == 0)
        sound = sound & (position + 1 < tl.load(max_lengths + slot, mask=ahead > 0, other=0))
        sound = sound & (tl.load(table + position // BLOCK_TOKENS, mask=sound, other=0) != spare)
        position = tl.where(is_draft & (sound == 0), place, position)
        given = tl.where(is_draft, tl.where(sound, draft, _NO_DRAFT), given)
        ended = tl.where(is_draft & (sound == 0), 1, ended)
        tl.store(columns + tokens + at, position, mask=inside)
        tl.store(columns + 2 * tokens + at, given, mask=inside)
    block = tl.load(table + position // BLOCK_TOKENS, mask=inside, other=0)
    block = tl.where(ended != 0, spare, block)
    decode_rows = tl.load(columns + 3 * tokens)
    tl.store(ids + at, tl.where(given < 0, last, given), mask=inside)
    tl.store(slot_mapping + at, block * BLOCK_TOKENS + position % BLOCK_TOKENS, mask=inside)
    row = at // QUERIES
    attends = (row < decode_rows) & (slot != spare_slot) & (ended == 0)
    tl.store(lengths + row, tl.where(attends, position + 1, 0), mask=(row < rows) & (at % QUERIES == 0))


@triton.jit(do_not_specialize=["count"])
def _place_tiles(
    slots: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    places: tl.tensor,
    count: tl.tensor,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + i, mask=i < count, other=0)
    placed = start < 0
    place = tl.load(places + tl.load(slots + i, mask=placed, other=0), mask=placed, other=0)
    tl.store(starts + i, place + start - _AT_PLACE, mask=placed)
    tokens, row = tl.load(counts + i, mask=placed, other=0), tl.load(rows + i, mask=placed, other=0)
    q = tl.arange(0, QUERIES)
    there = placed[:, None] & (q[None, :] < tokens[:, None])
    its = tl.load(ids + row[:, None] + q[None, :], mask=there, other=_NO_DRAFT)
    tl.store(counts + i, tl.sum((its > _NO_DRAFT).to(tl.int32), 1), mask=placed)


@triton.jit(do_not_specialize=["count"])
def _scatter(
    at: tl.tensor, values: tl.tensor, target: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.load(at + i, mask=i < count, other=0)
    tl.store(target + where, tl.load(values + i, mask=i < count, other=0), mask=i < count)


@triton.jit(do_not_specialize=["count"])
def _move(source: tl.tensor, target: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


@triton.jit
def _record_timestamp(target: tl.tensor) -> None:
    tl.store(target, globaltimer())


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of the slots on the device, int32. The last slot is spare: always done, its table the spare
    block."""

    tables: Tensor  # [slots + 1, blocks]
    last_tokens: Tensor  # [slots + 1]
    done: Tensor  # [slots + 1]
    drafts: DraftState | None = None  # None: the host has all places


@dataclass(frozen=True, slots=True)
class DraftState:
    """What the device has of slots whose steps may have drafts, int32."""

    places: Tensor  # [slots + 1], the position of the last token
    ids: Tensor  # [slots + 1, a power of two], the next step's drafts, in order; negative: there is none
    max_lengths: Tensor  # [slots + 1]
    prompts: Tensor  # [slots + 1], tokens before the answer
    predicted: Tensor  # [slots + 1], tokens that the answer may repeat: at the end of the slot's `history`
    history: Tensor  # [slots + 1, > context], tokens by position


@dataclass(frozen=True, slots=True)
class Resolved:
    """The results of `resolve`, int32: for every token, and `lengths` for the decode rows, which come
    first."""

    ids: Tensor  # [tokens]
    slot_mapping: Tensor  # [tokens], block * block_tokens + offset
    lengths: Tensor  # [rows], tokens of context; 0 for rows that are no-ops


def resolve(
    columns: Tensor, state: SlotState, spare: int, block_tokens: int, found: Resolved, queries: int = 1
) -> None:
    """Resolve the tokens of a step. `columns` is `[3 * tokens + 1]` int32: slots, positions, ids (FROM_DEVICE
    for the slot's last token, less for its drafts), and the number of decode rows of `queries` tokens, which
    come first. KV of done slots and of missing drafts goes to the block `spare`.

    With `state.drafts` the positions and the ids of drafts are written to `columns`; a missing draft is
    NO_DRAFT, and none is at or beyond its slot's largest length or in a block that its table lacks."""
    tokens, drafts = len(found.ids), state.drafts
    placed = (None, None, None) if drafts is None else (drafts.places, drafts.ids, drafts.max_lengths)
    _resolve[(triton.cdiv(tokens, _INPUTS_BLOCK),)](
        columns, state.tables, state.last_tokens, state.done, *placed, found.ids, found.slot_mapping,
        found.lengths, tokens, len(found.lengths), state.tables.shape[1], spare, len(state.done) - 1,
        BLOCK_TOKENS=block_tokens, BLOCK=_INPUTS_BLOCK, QUERIES=queries,
        MOST_DRAFTS=0 if drafts is None else drafts.ids.shape[1], PLACED=drafts is not None, num_warps=4,
    )  # fmt: skip


def place_tiles(
    tiles: tuple[Tensor, Tensor, Tensor, Tensor], ids: Tensor, places: Tensor, queries: int
) -> None:
    """The slots, token rows, starts and counts `[tiles]` of tiles of attention, in place: a start that the
    host gave as AT_PLACE + n is n tokens after the place of its slot, and such a tile, of up to `queries`
    tokens, ends before the first one that has NO_DRAFT among the resolved `ids` `[tokens]`."""
    count = len(tiles[0])
    _place_tiles[(triton.cdiv(count, _INPUTS_BLOCK),)](
        *tiles, ids, places, count, QUERIES=queries, BLOCK=_INPUTS_BLOCK, num_warps=4
    )


def scatter(at: Tensor, values: Tensor, target: Tensor) -> None:
    """`target.view(-1)[at] = values`, all int32. Equal indices must have equal values."""
    count = len(at)
    _scatter[(triton.cdiv(count, _INPUTS_BLOCK),)](
        at, values, target, count, BLOCK=_INPUTS_BLOCK, num_warps=4
    )


def move(source: Tensor, target: Tensor) -> None:
    """`target = source`, int32 `[count]`; either may be in pinned host memory. A few KiB take 3 µs. With a
    copy engine they would wait for the KV blocks that it is copying: up to 0.7 ms."""
    count = source.numel()
    _move[(triton.cdiv(count, 4 * _INPUTS_BLOCK),)](
        source, target, count, BLOCK=4 * _INPUTS_BLOCK, num_warps=4
    )


def record_timestamp(target: Tensor) -> None:
    """Write the device's clock in ns to `target[0]`, int64, when all earlier work of this stream is done. It
    takes a microsecond of one processor; the clock of some devices has steps of 1 µs."""
    _record_timestamp[(1,)](target, num_warps=1)
