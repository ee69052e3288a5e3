"""Bytes in a block after a row's end are not attended to, at any value."""

from __future__ import annotations

import math

import torch
from support.executor.gpu_side import BLOCK, BLOCKS, DIM, HEADS, KV_HEADS, LAYERS

from kernels.attention.ref import attend_decode


def test_short_row_beside_a_long_one_reads_nothing_past_its_end() -> None:
    kv = torch.randn(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2))
    query = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    tables = torch.tensor([[3, 9, 4], [8, 1, 30]])
    past_end = torch.arange(3 * BLOCK) >= torch.tensor([BLOCK + 2, 3 * BLOCK])[:, None]
    mask = torch.zeros(2, 3 * BLOCK).masked_fill_(past_end, -math.inf)[:, None, None]
    wanted = attend_decode(query, kv, 1, tables, mask)
    kv[9, :, :, 2:], kv[4] = math.nan, math.inf  # of the blocks' owners before
    assert attend_decode(query, kv, 1, tables, mask).allclose(wanted, atol=1e-6)
    kv[9, 1, 1, 1] = math.nan  # its own last token
    assert attend_decode(query, kv, 1, tables, mask).isnan().any((1, 2)).tolist() == [True, False]
