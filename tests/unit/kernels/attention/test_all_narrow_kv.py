"""Kernels over KV that is kept narrower than the queries are: fp8 on a GPU; in Triton's interpreter, which
casts fp8 wrongly, float16 under float32. Against the references in float64 over what the cache holds.

On a GPU: `pytest tests/unit/kernels/attention/test_all_narrow_kv.py`.
"""

from __future__ import annotations

import pytest
import torch
from support.executor.gpu_side import BLOCK, BLOCKS, DEVICE, LAYERS, far, normal, shuffled, words

from kernels.attention import FP8, as_stored, write_kv, write_rows
from kernels.attention import ref as attention
from kernels.attention.decode import DecodeRows, Tuning, attend_decode, decode_work, plan_decode
from kernels.attention.prefill import PrefillTiles, PrefillTuning, attend_prefill, tile_queries
from kernels.rope.gpu import HeadNorms, RopeInputs, rope_write
from kernels.rope.ref import apply_rope, rope_table

ON_GPU = torch.cuda.is_available()
# What keeps KV, what computes, and how far that is from float64, of the largest number.
CASES = (
    [(FP8, torch.bfloat16, 2e-2), (FP8, torch.float32, 1e-5)]
    if ON_GPU
    else [(torch.float16, torch.float32, 1e-5)]
)
SHAPES = [(9, 3, 24), (32, 8, 128), (4, 4, 64)] if ON_GPU else [(9, 3, 24)]  # heads, kv heads, head_dim

over = pytest.mark.parametrize(("kept", "dtype", "close"), CASES, ids=lambda value: str(value)[-13:])
shaped = pytest.mark.parametrize("shape", SHAPES, ids=str)


def cache(kept: torch.dtype, shape: tuple[int, int, int]) -> torch.Tensor:
    _, kv_heads, dim = shape
    return as_stored(normal(BLOCKS, LAYERS, 2, BLOCK, kv_heads, dim) * 3, kept)


@over
@shaped
def test_rotation_keeps_what_the_reference_keeps(
    shape: tuple[int, int, int], kept: torch.dtype, dtype: torch.dtype, close: float
) -> None:
    heads, kv_heads, dim = shape
    kv = torch.zeros(BLOCKS, LAYERS, 2, BLOCK, kv_heads, dim, dtype=kept, device=DEVICE)
    wanted = kv.clone()
    qkv = (normal(3, (heads + 2 * kv_heads) * dim) * 200).to(dtype)  # some of it over the largest of fp8
    table = rope_table(torch.rand(dim // 2, dtype=torch.float64), 64).to(DEVICE)
    positions, blocks = words(3, 17, 40), torch.tensor([4, 7, 9], device=DEVICE)
    query, key, value = torch.split(qkv.view(3, -1, dim), [heads, kv_heads, kv_heads], 1)
    rotation = table[positions.long()]
    query, key = apply_rope(query, rotation), apply_rope(key, rotation)
    rows = write_rows(wanted, blocks, positions.long() % BLOCK)[1]
    write_kv(wanted, rows, key, value)
    placed = RopeInputs(table, positions, (blocks * BLOCK + positions % BLOCK).int(), dtype=dtype)
    found = rope_write(qkv, placed, HeadNorms(None, None, 1e-5), kv, 1, heads)
    assert found.dtype == dtype
    assert far(found, query) < close
    step = wanted.float().abs() / 8 + 2.0**-9  # between neighbours of fp8: another last bit may end there
    assert ((kv.float() - wanted.float()).abs() <= step).all()
    same = (kv.float() == wanted.float())[wanted.float() != 0].float().mean()
    assert same > (0.99 if kept == FP8 else 0.9)
    if kept == FP8:
        assert kv.float().abs().max() == 448.0


@over
@shaped
@pytest.mark.parametrize("processors", [1, 9])
def test_decode_over_what_the_cache_holds(
    processors: int, shape: tuple[int, int, int], kept: torch.dtype, dtype: torch.dtype, close: float
) -> None:
    heads, _, dim = shape
    lengths, kv, tables = [1, 0, 77, 20], cache(kept, shape), shuffled(4)
    slots = words(2, 0, 1, 3)
    query = normal(len(lengths), heads, dim, seed=2).to(dtype)
    work = decode_work(kv, heads, 8, processors, Tuning(tile_tokens=16, per_sm=1))
    out, at = torch.full_like(query, torch.nan), words(*lengths)
    plan_decode(work, at)
    attend_decode(query, kv, 1, DecodeRows(slots, at, tables), work, out)
    for row, length in enumerate(lengths):
        if not length:
            assert out[row].isnan().all()
            continue
        table = tables[slots[row], : -(-length // BLOCK)].long()[None]
        mask = torch.zeros(1, 1, 1, length, dtype=torch.float64, device=DEVICE)
        wanted = attention.attend_decode(query[row : row + 1].double(), kv.float().double(), 1, table, mask)
        assert far(out[row], wanted[0]) < close


@over
@shaped
def test_chunks_over_what_the_cache_holds(
    shape: tuple[int, int, int], kept: torch.dtype, dtype: torch.dtype, close: float
) -> None:
    heads, kv_heads, dim = shape
    kv, tables, tuning = cache(kept, shape), shuffled(4), PrefillTuning(32, 16, 1, 4)
    size, slot, start, count = tile_queries(heads, kv_heads, tuning), 2, 30, 12
    tiles = [(slot, at, start + at, min(size, count - at)) for at in range(0, count, size)]
    columns = (words(*column) for column in zip(*tiles, strict=True))
    query = normal(count, heads, dim, seed=2).to(dtype)
    out = torch.full_like(query, torch.nan)
    attend_prefill(query, kv, 1, PrefillTiles(*columns, tables), tuning, out)
    end = start + count
    later = torch.arange(end)[None] > torch.arange(start, end)[:, None]
    mask = torch.zeros(count, end, dtype=torch.float64).masked_fill_(later, -torch.inf).to(DEVICE)
    table = tables[slot, : -(-end // BLOCK)].long()
    assert far(out, attention.attend_prefill(query.double(), kv.float().double(), 1, table, mask)) < close
