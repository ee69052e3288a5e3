"""Attention with windows, sinks, caps and scales on a CPU against float64, from the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import Scoring
from kernels.attention.ref import attend_decode, attend_prefill
from kernels.cpu_jit import attention

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16
TOKENS = 300
SCORINGS = {
    "window": Scoring(window=150),
    "small window": Scoring(window=7),
    "window of a token": Scoring(window=1),
    "cap": Scoring(cap=2.0, scale=0.4),
    "sinks": Scoring(sinks=torch.linspace(-2.0, 3.0, HEADS)),
    "all": Scoring(window=129, scale=0.5, cap=5.0, sinks=torch.linspace(-2.0, 3.0, HEADS)),
}
CHUNKS = [(0, 1), (1, 5), (6, 122), (128, 1), (129, 170), (299, 1)]  # tokens before, tokens


def exact(query: Tensor, key: Tensor, value: Tensor, by: Scoring) -> Tensor:
    """One sequence in float64: `[tokens, heads, dim]`, `[tokens, kv_heads, dim]` twice."""
    shared = HEADS // KV_HEADS
    key, value = (each.double().repeat_interleave(shared, 1) for each in (key, value))
    out = torch.empty(query.shape, dtype=torch.float64)
    for i, rows in enumerate(query.double()):
        first = max(0, i + 1 - by.window) if by.window else 0
        scores = (rows * key[first : i + 1]).sum(-1) * (by.scale or DIM**-0.5)  # [seen, heads]
        if by.cap:
            scores = by.cap * torch.tanh(scores / by.cap)
        if by.sinks is not None:
            scores = torch.cat((scores, by.sinks.double()[None]))
        weights = scores.softmax(0)[: i + 1 - first]
        out[i] = (weights[..., None] * value[first : i + 1]).sum(0)
    return out


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache of two sequences, and their tables."""
    blocks = -(-TOKENS // BLOCK)
    kv = torch.randn(2 * blocks, 1, 2, BLOCK, KV_HEADS, DIM).to(dtype)
    query = torch.randn(TOKENS, HEADS, DIM).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    return query, kv, torch.randperm(2 * blocks).view(2, blocks)


def rows_of(tables: Tensor, *rows: tuple[int, int]) -> attention.Sequences:
    starts, counts = np.array(rows).T
    return attention.Sequences(
        np.ascontiguousarray(tables.numpy()), np.cumsum(counts) - counts, starts, counts
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCORINGS)
def test_scored_attention_is_that_of_its_definition_in_any_chunk(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    by, (query, kv, (own, other)) = SCORINGS[name], given(dtype)
    keys, values = (kv[own][:, 0, i].flatten(0, 1)[:TOKENS] for i in (0, 1))
    wanted = exact(query, keys, values, by)
    whole = attention.attend(query, kv, 0, rows_of(own[None], (0, TOKENS)), by)
    assert (whole - wanted).abs().max() < (0.03 if dtype == torch.bfloat16 else 1e-5)
    for before, count in CHUNKS:
        rows = query[before : before + count]
        alone = attention.attend(rows, kv, 0, rows_of(own[None], (before, count)), by)
        assert alone.equal(whole[before : before + count])
        both = torch.cat((query[:77], rows))
        beside = rows_of(torch.stack((other, own)), (200, 77), (before, count))
        assert attention.attend(both, kv, 0, beside, by)[77:].equal(alone)


@pytest.mark.parametrize("name", SCORINGS)
def test_the_reference_of_scored_attention_is_its_definition(name: str) -> None:
    torch.manual_seed(3)
    by, (query, kv, (own, _)) = SCORINGS[name], given(torch.float32)
    keys, values = (kv[own][:, 0, i].flatten(0, 1)[:TOKENS] for i in (0, 1))
    wanted = exact(query, keys, values, by)
    assert (attend_prefill(query[:100], kv, 0, own[:7], None, by) - wanted[:100]).abs().max() < 1e-5
    later = torch.arange(200) > torch.arange(130, 200)[:, None]
    mask = torch.zeros(later.shape).masked_fill_(later, -torch.inf)
    assert (attend_prefill(query[130:200], kv, 0, own[:13], mask, by) - wanted[130:200]).abs().max() < 1e-5
    past_end = torch.arange(250) >= torch.tensor([1, 40, 250])[:, None]
    mask = torch.zeros(past_end.shape).masked_fill_(past_end, -torch.inf)[:, None, None]
    kv[own[-1]] = torch.nan  # old contents
    found = attend_decode(query[[0, 39, 249]], kv, 0, own[:16].expand(3, -1), mask, by)
    assert (found - wanted[[0, 39, 249]]).abs().max() < 1e-5
