"""Paged prefill attention for an H100 or H200, in Gluon: the tiles of kernels.attention.prefill.

A program has three groups of warps. One fetches K and V by TMA, a block of the cache at a time, in tiles of
`tile_tokens` tokens that lie as the tensor cores read them. Two compute 64 rows each:

    fetch     K0 V0 K1 V1 K2 ...
    rows 0    q K0 | q K1, softmax 0, w V0 | q K2, softmax 1, w V1 | ...
    rows 64   the same, in the other's pauses

KV in fp8 comes to buffers of its own, and the group that fetches has four warps: they widen a tile to bf16 in
registers, which is exact, and store it where the others read it.

The tensor cores compute the scores of a tile beside the weighted values of the tile before, and one group's
products run during the other group's softmax. Groups wait for bytes and for free memory at barriers in shared
memory, never at one of the whole program. Method: "FlashAttention-3" (arXiv:2407.08608).

Gluon has no interpreter: on a CPU tests run this code in threads (tests/support/executor/gluon_threads.py).
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.ref import FP8

_thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7
_REGISTERS = (240, 24)  # of a thread that computes, that fetches
_REGISTERS_NARROW = (216, 72)  # with KV in fp8
_SHARED = gl.NVMMASharedLayout(128, 16, 2)  # as TMA writes and tensor cores read
_SHARED_NARROW = {dim: gl.NVMMASharedLayout(dim, 8, 2) for dim in (64, 128)}  # by head_dim


@gluon.jit
def _rows_of(
    table: gl.tensor,
    i: gl.tensor,
    end: gl.tensor,
    layer_row: gl.tensor,
    block_rows: gl.tensor,
    absent: gl.tensor,
    TILE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
) -> gl.tuple:
    """Where the K of each block of tile `i` begins; `absent`, whose numbers are zeros, past token `end`."""
    EACH: gl.constexpr = TILE // BLOCK_TOKENS
    blocks = (end + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    rows = ()
    for j in gl.static_range(EACH):
        at = i * EACH + j
        block = gl.load(table + gl.minimum(at, blocks - 1))
        rows = rows + (gl.where(at < blocks, block * block_rows + layer_row, absent),)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _copy_tile(
    kv: gl.tensor,
    rows: gl.tuple,
    tile: gl.tensor,
    arrived: gl.tensor,
    column: gl.tensor,
    WHICH: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    BYTES: gl.constexpr,
) -> None:
    """K (0) or V (1) of the blocks at `rows` to `tile`, `BYTES` in all."""
    mbarrier.expect(arrived, BYTES)
    for j in gl.static_range(len(rows)):
        part = tile.slice(j * BLOCK_TOKENS, BLOCK_TOKENS)
        tma.async_copy_global_to_shared(kv, [rows[j] + WHICH * BLOCK_TOKENS, column], arrived, part)


@gluon.jit
def _fetch(
    kv: gl.tensor,
    table: gl.tensor,
    narrow: None,
    arrived: None,
    buffers: gl.tuple,
    full: gl.tuple,
    free: gl.tuple,
    span: gl.tuple,
    layer_row: gl.tensor,
    block_rows: gl.tensor,
    absent: gl.tensor,
    column: gl.tensor,
    TILE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    DIM: gl.constexpr,
) -> None:
    """K and V of the tiles of `span`; zeros for blocks past its end."""
    first, last, end = span
    for i in range(first, last):
        rows = _rows_of(table, i, end, layer_row, block_rows, absent, TILE, BLOCK_TOKENS)
        stage, phase = (i - first) % STAGES, ((i - first) // STAGES & 1) ^ 1
        for which in gl.static_range(2):
            mbarrier.wait(free[which].index(stage), phase)
            tile, came = buffers[which].index(stage), full[which].index(stage)
            _copy_tile(kv, rows, tile, came, column, which, BLOCK_TOKENS, TILE * DIM * 2)


@gluon.jit
def _widen(numbers: gl.tensor) -> gl.tensor:
    """e4m3 to bf16, exactly, by way of float32: the instruction from float16 to bf16 is one of the units that
    the softmax needs."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 pair<2>, half<4>;
        .reg .b32 halves<2>;
        .reg .f32 wide<4>;
        mov.b32 {pair0, pair1}, $2;
        cvt.rn.f16x2.e4m3x2 halves0, pair0;
        cvt.rn.f16x2.e4m3x2 halves1, pair1;
        mov.b32 {half0, half1}, halves0;
        mov.b32 {half2, half3}, halves1;
        cvt.f32.f16 wide0, half0;
        cvt.f32.f16 wide1, half1;
        cvt.f32.f16 wide2, half2;
        cvt.f32.f16 wide3, half3;
        cvt.rn.bf16x2.f32 $0, wide1, wide0;
        cvt.rn.bf16x2.f32 $1, wide3, wide2;
        }""",
        "=r,=r,r", [numbers], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _fetch_narrow(
    kv: gl.tensor,
    table: gl.tensor,
    narrow: gl.tuple,
    arrived: gl.tuple,
    buffers: gl.tuple,
    full: gl.tuple,
    free: gl.tuple,
    span: gl.tuple,
    layer_row: gl.tensor,
    block_rows: gl.tensor,
    absent: gl.tensor,
    column: gl.tensor,
    TILE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    DIM: gl.constexpr,
) -> None:
    """`_fetch` of KV in fp8, by four warps: tiles come to `narrow`, and go on to `buffers` in bf16."""
    R: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    first, last, end = span
    for i in range(first, gl.minimum(last, first + STAGES)):
        rows = _rows_of(table, i, end, layer_row, block_rows, absent, TILE, BLOCK_TOKENS)
        for which in gl.static_range(2):
            tile, came = narrow[which].index(i - first), arrived[which].index(i - first)
            _copy_tile(kv, rows, tile, came, column, which, BLOCK_TOKENS, TILE * DIM)
    for i in range(first, last):
        rows = _rows_of(table, i + STAGES, end, layer_row, block_rows, absent, TILE, BLOCK_TOKENS)
        stage, phase = (i - first) % STAGES, (i - first) // STAGES & 1
        for which in gl.static_range(2):
            tile, came = narrow[which].index(stage), arrived[which].index(stage)
            mbarrier.wait(came, phase)
            mbarrier.wait(free[which].index(stage), phase ^ 1)
            wide = _widen(tile.load(R))
            if which == 1 and (i + 1) * TILE > end:  # as _clear
                token = i * TILE + gl.arange(0, TILE, gl.SliceLayout(1, R))
                wide = gl.where((token < end)[:, None], wide, gl.zeros_like(wide))
            buffers[which].index(stage).store(wide)
            fence_async_shared()
            _thread_barrier()
            mbarrier.arrive(full[which].index(stage), count=1)
            if i + STAGES < last:
                _copy_tile(kv, rows, tile, came, column, which, BLOCK_TOKENS, TILE * DIM)


@gluon.jit
def _clear(v: gl.tensor, first: gl.tensor, end: gl.tensor, BLOCK_TOKENS: gl.constexpr) -> None:
    """Zeros for the values from token `end` on in its block: old contents may be NaN, and 0 * NaN is NaN."""
    R: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for j in gl.static_range(v.shape[0] // BLOCK_TOKENS):
        begin = first + j * BLOCK_TOKENS
        if (begin < end) & (end < begin + BLOCK_TOKENS):
            part = v.slice(j * BLOCK_TOKENS, BLOCK_TOKENS)
            held = part.load(R)
            token = begin + gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(1, R))
            part.store(gl.where((token < end)[:, None], held, gl.zeros_like(held)))


@gluon.jit
def _softmax(
    scores: gl.tensor,
    top: gl.tensor,
    mass: gl.tensor,
    at_first: gl.tensor,
    seen_to: gl.tensor,
    scale: gl.tensor,
    MASKED: gl.constexpr,
    S: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Weights of a tile, the factor for what was added before, the new maximum and mass."""
    if MASKED:
        at = at_first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, S))
        seen = at[None, :] <= seen_to[:, None]
        scores = gl.where(seen, scores, -1.0e30)  # finite: a row may see none of a tile
    new_top = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores * scale - (new_top * scale)[:, None])
    if MASKED:
        weights = gl.where(seen, weights, 0.0)
    shrink = gl.exp2((top - new_top) * scale)
    return weights, shrink, new_top, mass * shrink + gl.sum(weights, 1)


@gluon.jit
def _step(
    i: gl.tensor,
    first: gl.tensor,
    q: gl.tensor,
    buffers: gl.tuple,
    full: gl.tuple,
    free: gl.tuple,
    state: gl.tuple,
    seen_to: gl.tensor,
    scale: gl.tensor,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    S: gl.constexpr,
    A: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """The scores of tile `i`, beside the weighted values of the tile before."""
    acc, weights, top, mass = state
    turn = i - first
    stage, before = turn % STAGES, (turn - 1) % STAGES
    mbarrier.wait(full[0].index(stage), turn // STAGES & 1)
    zeros = gl.zeros([64, TILE], gl.float32, S)
    keys = buffers[0].index(stage).permute((1, 0))
    scores = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    mbarrier.wait(full[1].index(before), (turn - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, buffers[1].index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(free[0].index(stage), count=1)
    found, shrink, top, mass = _softmax(scores, top, mass, i * TILE, seen_to, scale, MASKED, S)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free[1].index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, A))[:, None]
    weights = gl.convert_layout(found.to(gl.bfloat16), gl.DotOperandLayout(0, A, 2))
    return acc, weights, top, mass


@gluon.jit
def _compute(
    query: gl.tensor,
    out: gl.tensor,
    partial: gl.tensor | None,
    sums: gl.tensor | None,
    queries: gl.tensor,
    buffers: gl.tuple,
    full: gl.tuple,
    free: gl.tuple,
    cleared: gl.tensor,
    span: gl.tuple,
    chunk: gl.tuple,
    head: gl.tensor,
    scale: gl.tensor,
    parts: gl.tensor,
    place: gl.tensor,
    PART: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    NARROW: gl.constexpr,
) -> None:
    """Rows 64 * PART to 64 * PART + 64 of the tile: row r is token r // GROUP, query head r % GROUP."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    R: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    first, last, end = span
    start, count, first_row = chunk
    q = queries.index(PART)
    r, d = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, R)), gl.arange(0, DIM, gl.SliceLayout(0, R))
    at_row = (first_row + r // GROUP) * (KV_HEADS * GROUP * DIM) + (head * GROUP + r % GROUP) * DIM
    inside = (r // GROUP < count)[:, None]
    q.store(gl.load(query + at_row[:, None] + d[None, :], mask=inside, other=0.0))
    fence_async_shared()
    _thread_barrier()
    q = q.load(gl.DotOperandLayout(0, S, 2))  # read once: less power than from shared memory
    r = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    seen_to = gl.minimum(start + r // GROUP, end - 1)
    top = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, S))
    mass = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
    mbarrier.wait(full[0].index(0), 0)
    zeros = gl.zeros([64, TILE], gl.float32, S)
    scores = warpgroup_mma(q, buffers[0].index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(free[0].index(0), count=1)
    found, _, top, mass = _softmax(scores, top, mass, first * TILE, seen_to, scale, True, S)
    weights = gl.convert_layout(found.to(gl.bfloat16), gl.DotOperandLayout(0, A, 2))
    state = (gl.zeros([64, DIM], gl.float32, A), weights, top, mass)
    whole = gl.maximum(first + 1, gl.minimum((start + 1) // TILE, last))  # to here every row sees all tokens
    for i in range(first + 1, whole):
        state = _step(i, first, q, buffers, full, free, state, seen_to, scale, TILE, STAGES, False, S, A)
    for i in range(whole, last):
        state = _step(i, first, q, buffers, full, free, state, seen_to, scale, TILE, STAGES, True, S, A)
    acc, weights, top, mass = state
    turn = last - 1 - first
    v = buffers[1].index(turn % STAGES)
    mbarrier.wait(full[1].index(turn % STAGES), turn // STAGES & 1)
    if NARROW:
        pass  # it came so
    elif PART == 0:
        _clear(v, (last - 1) * TILE, end, BLOCK_TOKENS)
        fence_async_shared()
        _thread_barrier()
        mbarrier.arrive(cleared.index(0), count=1)
    else:
        mbarrier.wait(cleared.index(0), 0)
    acc = warpgroup_mma(weights, v, acc)
    top, mass = gl.convert_layout(top, gl.SliceLayout(1, A)), gl.convert_layout(mass, gl.SliceLayout(1, A))
    r, d = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, A)), gl.arange(0, DIM, gl.SliceLayout(0, A))
    inside = r // GROUP < count
    if SPLIT:
        if parts > 1:  # as keep_part of kernels.attention.prefill
            gl.store(partial + ((place * 128 + r) * DIM)[:, None] + d[None, :], acc)
            gl.store(sums + place * 256 + r, top * scale)
            gl.store(sums + place * 256 + 128 + r, mass)
        inside = inside & (parts == 1)
    at_row = (first_row + r // GROUP) * (KV_HEADS * GROUP * DIM) + (head * GROUP + r % GROUP) * DIM
    done = (acc / mass[:, None]).to(gl.bfloat16)
    gl.store(out + at_row[:, None] + d[None, :], done, mask=inside[:, None])


@gluon.jit
def _barriers(STAGES: gl.constexpr, COUNT: gl.constexpr) -> gl.tensor:
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(found.index(i), count=COUNT)
    return found


@gluon.jit(do_not_specialize=["table_blocks", "layer_row", "block_rows", "absent"])
def _attend(
    query: gl.tensor,
    kv: gl.tensor,
    tables: gl.tensor,
    tile_slots: gl.tensor,
    tile_rows: gl.tensor,
    tile_starts: gl.tensor,
    tile_counts: gl.tensor,
    tile_part: gl.tensor | None,
    tile_parts: gl.tensor | None,
    partial: gl.tensor | None,
    sums: gl.tensor | None,
    out: gl.tensor,
    table_blocks: gl.tensor,
    layer_row: gl.tensor,
    block_rows: gl.tensor,
    absent: gl.tensor,
    scale: gl.tensor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    NARROW: gl.constexpr,
    REGISTERS: gl.constexpr,
    SHARED: gl.constexpr,
) -> None:
    tile, head = gl.program_id(1), gl.program_id(0)
    count, start = gl.load(tile_counts + tile), gl.load(tile_starts + tile)
    chunk = (start, count, gl.load(tile_rows + tile).to(gl.int64))
    table = tables + gl.load(tile_slots + tile).to(gl.int64) * table_blocks
    end = start + count
    first, last, parts = 0, (end + TILE - 1) // TILE, 1
    if SPLIT:  # as part_of of kernels.attention.prefill
        parts = gl.maximum(gl.load(tile_parts + tile), 1)
        each = (last + parts - 1) // parts
        first = gl.load(tile_part + tile) * each
        last = gl.minimum(last, first + each)
    if count == 0:
        return
    span = (first, last, end)
    place = tile * KV_HEADS + head
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, DIM], SHARED)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, DIM], SHARED)
    buffers = (keys, values)
    full, free = (_barriers(STAGES, 1), _barriers(STAGES, 1)), (_barriers(STAGES, 2), _barriers(STAGES, 2))
    cleared = _barriers(1, 1)
    narrow, arrived = None, None
    if NARROW:
        narrow = (
            gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, DIM], kv.layout),
            gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, DIM], kv.layout),
        )
        arrived = (_barriers(STAGES, 1), _barriers(STAGES, 1))
    fence_async_shared()
    _thread_barrier()
    gl.warp_specialize(
        [
            (_compute, (
                query, out, partial, sums, queries, buffers, full, free, cleared, span, chunk, head,
                scale, parts, place, 0, KV_HEADS, GROUP, DIM, TILE, BLOCK_TOKENS, STAGES, SPLIT, NARROW,
            )),
            (_compute, (
                query, out, partial, sums, queries, buffers, full, free, cleared, span, chunk, head,
                scale, parts, place, 1, KV_HEADS, GROUP, DIM, TILE, BLOCK_TOKENS, STAGES, SPLIT, NARROW,
            )),
            (_fetch_narrow if NARROW else _fetch, (
                kv, table, narrow, arrived, buffers, full, free, span, layer_row, block_rows, absent,
                head * DIM, TILE, BLOCK_TOKENS, STAGES, DIM,
            )),
        ],
        [4, 4 if NARROW else 1],
        REGISTERS,
    )  # fmt: skip


def attend(
    query: Tensor,
    kv: Tensor,
    layer: int,
    tiles: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parts: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    out: Tensor,
    tile_tokens: int,
    stages: int,
) -> None:
    """`kernels.attention.prefill.attend_prefill` without the merge of parts, in bf16, for tiles of 128 rows
    and the sizes of `why_not_tma`. `kv` is contiguous, in bf16 or fp8.

    `tiles`: tables, slots, rows, starts, counts; `parts`: part, parts, partial, sums, or four times None."""
    _, heads, dim = query.shape
    blocks, layers, _, block_tokens, kv_heads, _ = kv.shape
    block_rows, width = layers * 2 * block_tokens, kv_heads * dim
    rows = blocks * block_rows
    narrow = kv.dtype == FP8
    layout = _SHARED_NARROW[dim] if narrow else _SHARED
    described = TensorDescriptor(kv, [rows, width], [width, 1], [block_tokens, dim], layout)
    _attend[(kv_heads, len(tiles[1]))](
        query, described, *tiles, *parts, out, tiles[0].shape[1], layer * 2 * block_tokens, block_rows,
        rows, dim**-0.5 * 1.4426950408889634, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim,
        TILE=tile_tokens, BLOCK_TOKENS=block_tokens, STAGES=stages, SPLIT=parts[0] is not None,
        NARROW=narrow, REGISTERS=_REGISTERS_NARROW if narrow else _REGISTERS, SHARED=_SHARED, num_warps=4,
    )  # fmt: skip
