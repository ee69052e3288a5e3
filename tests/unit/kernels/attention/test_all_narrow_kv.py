"""Kernels over KV that is kept narrower than the queries are: fp8 on a GPU; in Triton's interpreter, which
casts fp8 wrongly, float16 under float32, and fp8 only in decode, which moves bits. Against the references in
float64 over what the cache holds.

On a GPU: `pytest tests/unit/kernels/attention/test_all_narrow_kv.py`.
"""

from __future__ import annotations

import pytest
import torch
from support.executor.gpu_side import BLOCK, BLOCKS, DEVICE, LAYERS, far, normal, shuffled, words
from support.executor.references import write_rows

from kernels.attention import FP8, as_stored, write_kv
from kernels.attention import ref as attention
from kernels.attention.decode import DecodeRows, Tuning, attend_decode, decode_work, plan_decode
from kernels.attention.prefill import PrefillTiles, PrefillTuning, attend_prefill, tile_queries
from kernels.elementwise.gpu import HeadNorms, RopeInputs, rope_write
from kernels.elementwise.ref import apply_rope, rope_table

ON_GPU = torch.cuda.is_available()
# What keeps KV, what computes, and how far that is from float64, of the largest number.
CASES = (
    [(FP8, torch.bfloat16, 2e-2), (FP8, torch.float32, 1e-5)]
    if ON_GPU
    else [(torch.float16, torch.float32, 1e-5)]
)
SHAPES = [(9, 3, 24), (32, 8, 128), (4, 4, 64)] if ON_GPU else [(9, 3, 24)]  # heads, kv heads, head_dim

DECODES = CASES if ON_GPU else [*CASES, (FP8, torch.bfloat16, 2e-2), (FP8, torch.float32, 1e-5)]

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


@pytest.mark.parametrize(("kept", "dtype", "close"), DECODES, ids=lambda value: str(value)[-13:])
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
    rows = DecodeRows(slots, at, tables)
    plan_decode(work, rows)
    attend_decode(query, kv, 1, rows, work, out)
    for row, length in enumerate(lengths):
        if not length:
            assert out[row].isnan().all()
            continue
        table = tables[slots[row], : -(-length // BLOCK)].long()[None]
        mask = torch.zeros(1, 1, 1, length, dtype=torch.float64, device=DEVICE)
        wanted = attention.attend_decode(query[row : row + 1].double(), kv.float().double(), 1, table, mask)
        assert far(out[row], wanted[0]) < close


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decode_reads_every_number_of_fp8(dtype: torch.dtype) -> None:
    """The result of a row of one token is its V."""
    kv = torch.zeros(2, 1, 2, BLOCK, 4, 64, dtype=torch.uint8, device=DEVICE)
    kv[1, 0, 1, 0] = torch.arange(256, device=DEVICE).view(4, 64)
    out = decode(normal(1, 4, 64).to(dtype), kv.view(FP8), [1], words(1)[None])
    wanted = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8).float()  # two of them are NaN
    found = out.float().flatten()
    assert found.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert found.nan_to_num().equal(wanted.nan_to_num())


@pytest.mark.parametrize("factor", [1.0, 2.0**20, 2.0**100])
def test_decode_over_fp8_takes_queries_of_any_size(factor: float) -> None:
    """Beyond float16, too; other heads of the row have other sizes."""
    dim, lengths = 64, [40, 17]
    kv = as_stored(normal(BLOCKS, LAYERS, 2, BLOCK, 1, dim) * 30, FP8)
    query = normal(2, 4, dim, seed=2)
    query *= torch.tensor([factor, 1.0, 0.0, factor], device=DEVICE)[:, None]
    query, tables = query.to(torch.bfloat16), shuffled(2)
    out = decode(query, kv, lengths, tables)
    for row, length in enumerate(lengths):
        mask = torch.zeros(1, 1, 1, length, dtype=torch.float64, device=DEVICE)
        table = tables[row, : -(-length // BLOCK)].long()[None]
        wanted = attention.attend_decode(query[row : row + 1].double(), kv.float().double(), 1, table, mask)
        for head in range(4):
            assert far(out[row, head], wanted[0, head]) < 2e-2


def test_a_number_of_k_that_is_nan_reaches_the_result() -> None:
    """So a sequence whose KV is broken ends with an error, and not with other tokens."""
    kv = torch.zeros(BLOCKS, LAYERS, 2, BLOCK, 2, 64, dtype=torch.uint8, device=DEVICE)
    kv[1, 1, 0, 3, 1, 9] = 0xFF
    out = decode(normal(1, 4, 64).to(torch.bfloat16), kv.view(FP8), [5], words(1)[None])
    assert out.isnan().all(-1).tolist() == [[False, False, True, True]]


def decode(query: torch.Tensor, kv: torch.Tensor, lengths: list[int], tables: torch.Tensor) -> torch.Tensor:
    """KV of layer 1, or the only one; row i has slot i."""
    work = decode_work(kv, query.shape[1], len(lengths), 2, Tuning(tile_tokens=16, per_sm=1))
    out, at = torch.full_like(query, torch.nan), words(*lengths)
    rows = DecodeRows(words(*range(len(lengths))), at, tables)
    plan_decode(work, rows)
    attend_decode(query, kv, min(1, kv.shape[1] - 1), rows, work, out)
    return out


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
