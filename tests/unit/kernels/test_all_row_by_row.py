"""The kernels of deterministic mode: a row's bits do not depend on the rows beside it, nor on its chunk.

In Triton's interpreter in float32 and float16; on a GPU in float32 and bfloat16. There all layouts, which go
by the number of rows, must give the same bits, too, and a row at any place of its tile. The interpreter adds
with BLAS, which sums some rows of a matrix in another order: there a row keeps its place.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.executor.gpu_side import (
    BLOCK,
    BLOCKS,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    far,
    normal,
    shuffled,
    words,
)

from kernels.attention import ref as attention
from kernels.attention.prefill import PrefillTiles, PrefillTuning, attend_prefill, tile_queries
from kernels.gemm.gpu import FixedTuning, layout_of, matmul_fixed
from services.executor.cuda.kernel_configs import WIDE, device_tuning, row_by_row

ON_GPU = DEVICE == "cuda"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # which the interpreter knows
ULPS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = FixedTuning(64, 32, 32, 2)


def layouts(dtype: torch.dtype) -> tuple[FixedTuning, ...]:
    """The kernels of one order of adding up: on a GPU all that serve there, in the interpreter (where BLAS
    adds) one."""
    if not ON_GPU:
        return (SMALL,)
    name = torch.cuda.get_device_name()
    return (WIDE if dtype == torch.float32 else device_tuning(name)).fixed


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("width", "inner"), [(96, 160), (131, 72)])
def test_a_row_of_a_product_is_the_same_bits_among_any_others(
    dtype: torch.dtype, width: int, inner: int
) -> None:
    x, weight, bias = normal(200, inner), normal(width, inner, seed=1), normal(width, seed=2)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    wanted = x.double() @ weight.double().T + bias.double()
    whole = matmul_fixed(x, weight, bias, layouts(dtype)[0])
    assert far(whole, wanted) < ULPS[dtype]
    for rows, tuning in itertools.product((1, 7, 64, 65, 200), layouts(dtype)):
        assert torch.equal(matmul_fixed(x[:rows], weight, bias, tuning), whole[:rows])
    for at in (7, 71, *((3, 90) if ON_GPU else ())):  # in other company
        moved = torch.cat((x[40:47], x[at : at + 1], x[90:100]))
        assert torch.equal(matmul_fixed(moved, weight, bias, layouts(dtype)[-1])[7], whole[at])
    assert far(matmul_fixed(x[:3], weight, None, SMALL), wanted[:3] - bias.double()) < ULPS[dtype]


def test_many_row_tiles_are_all_computed() -> None:
    x, weight = normal(700, 16), normal(40, 16, seed=1)
    found = matmul_fixed(x, weight, None, FixedTuning(32, 32, 16, 2))
    assert far(found, x.double() @ weight.double().T) < ULPS[torch.float32]


def test_layouts_go_by_the_programs_that_they_give() -> None:
    large, middle, narrow = (FixedTuning(rows, tile, 64) for rows, tile in ((128, 256), (64, 64), (64, 32)))
    offered = (large, middle, narrow)
    assert layout_of(1, 128_256, 132, offered) is middle
    assert layout_of(64, 4096, 132, offered) is narrow
    assert layout_of(128, 4096, 132, offered) is middle
    assert layout_of(8192, 4096, 132, offered) is large


def attended(
    query: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, chunks: tuple[tuple[int, int], ...]
) -> torch.Tensor:
    """Attention of the chunks (start, end) of a sequence, one launch each; NaN elsewhere."""
    tuning = PrefillTuning(32, 16, 1, 4, one_loop=True)
    size = tile_queries(HEADS, KV_HEADS, tuning)
    out = torch.full_like(query, torch.nan)
    for start, end in chunks:
        firsts = range(start, end, size)
        tiles = PrefillTiles(
            words(*[0] * len(firsts)), words(*firsts), words(*firsts),
            words(*(min(size, end - first) for first in firsts)), table,
        )  # fmt: skip
        attend_prefill(query, kv, 1, tiles, tuning, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_query_is_the_same_bits_in_any_chunk_and_as_a_decode(dtype: torch.dtype) -> None:
    length = 45
    kv = normal(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM).to(dtype)
    query = normal(length, HEADS, DIM, seed=2).to(dtype)
    table = shuffled(4)[:1]
    whole = attended(query, kv, table, ((0, length),))
    later = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu_(1)
    mask = torch.zeros(length, length, dtype=torch.float64, device=DEVICE).masked_fill_(later, -torch.inf)
    wanted = attention.attend_prefill(query.double(), kv.double(), 1, table[0, :6].long(), mask)
    assert far(whole, wanted) < 3 * ULPS[dtype]
    # Tiles of 10 queries that end early: they see less of the same KV, or nothing of a tile that others see.
    cuts = [((0, 1), (10, 11), (20, 23), (30, 37), (40, 41))]
    if ON_GPU:
        ends = ((0, 16, length), (0, 5, 22, 23, length), (0, 1, 2, 3, 17, 33, 44, length))
        cuts += [tuple(itertools.pairwise(each)) for each in ends]
    for chunks in cuts:
        found = attended(query, kv, table, chunks)
        for start, end in chunks:
            assert torch.equal(found[start:end], whole[start:end]), (chunks, start)


def test_layouts_of_deterministic_mode_are_the_devices_own() -> None:
    for tuning in (WIDE, device_tuning("NVIDIA H200"), device_tuning("another")):
        exact = row_by_row(tuning)
        assert (exact.by_row, exact.prefill.one_loop, exact.fixed) == (True, True, tuning.fixed)
        assert not tuning.by_row
        assert all(exact.layouts_of(rows).product(4096, 4096, rows) is None for rows in (1, 32, 33))
        assert not exact.layouts_of(1).chained
