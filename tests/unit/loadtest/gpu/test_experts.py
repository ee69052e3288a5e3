"""Experts spread over gloo ranks against one process that has all, alone and two halves in turn."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.executor.gpu_side import normal
from support.executor.rank_side import on_ranks
from torch import Tensor

from kernels.moe import combine, dispatch, experts_mlp, permute, ref, route
from loadtest.gpu.comm_ways import GroupTalks, run_in_turn
from loadtest.gpu.experts import ExpertWeights, Gathered
from services.executor.model.description import ExpertShapes
from services.executor.parallel.coroutines import ForwardPass, run_alone
from services.executor.parallel.ranks import Ranks

SHAPES = ExpertShapes(count=8, per_token=3, width=24, renormalise=True)
HIDDEN, LAYERS = 16, 3


@cache
def _layers() -> list[tuple[Tensor, ExpertWeights]]:
    """Random layers: what stands for attention, and the experts."""
    count, width = SHAPES.count, SHAPES.width
    sizes = [(HIDDEN, HIDDEN), (count, HIDDEN), (count, 2 * width, HIDDEN), (count, HIDDEN, width)]
    drawn = [
        [0.3 * normal(*size, seed=10 * layer + i).cpu() for i, size in enumerate(sizes)]
        for layer in range(LAYERS)
    ]
    return [(mixed, ExpertWeights(router, gate_up, down)) for mixed, router, gate_up, down in drawn]


def _tokens(rank: int, count: int) -> Tensor:
    return normal(count, HIDDEN, seed=100 + rank).cpu()


def _attention(x: Tensor, weight: Tensor) -> Tensor:
    """Something that mixes a rank's own tokens, each with those before it."""
    return F.linear(x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None], weight)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,))


def _pass(x: Tensor, how: Gathered, group: GroupTalks) -> ForwardPass:
    here = SHAPES.count // group.size
    mine = slice(group.rank * here, (group.rank + 1) * here)
    for mixed, layer in _layers():
        x = x + _attention(_normed(x), mixed)
        part = ExpertWeights(layer.router, layer.gate_up[mine], layer.down[mine])
        x = x + (yield from how.mlp(_normed(x), part))
    return x


def _by_one(x: Tensor) -> Tensor:
    """The same with all experts in one process."""
    for mixed, layer in _layers():
        x = x + _attention(_normed(x), mixed)
        normed = _normed(x)
        weights, chosen = route(F.linear(normed, layer.router), SHAPES.per_token, renormalise=True)
        places = permute(chosen, 0, SHAPES.count)
        found = experts_mlp(dispatch(normed, places), layer.gate_up, layer.down, places.bounds)
        x = x + combine(found, places, weights)
    return x


COUNTS = (9, 5)  # tokens of a rank by batch


def _on_rank(ranks: Ranks) -> list[Tensor]:
    """A pass of the first batch alone, and one of both in turn."""
    group = GroupTalks()
    way = Gathered(SHAPES, group, ref)
    inputs = [_tokens(10 * batch + ranks.rank, count) for batch, count in enumerate(COUNTS)]
    return [run_alone(_pass(inputs[0], way, group)), *run_in_turn([_pass(x, way, group) for x in inputs])]


@pytest.mark.parametrize("size", [2, 4])
def test_experts_of_several_ranks_are_those_of_one(size: int) -> None:
    for rank, (one, *both) in enumerate(on_ranks(size, _on_rank)):
        for batch, found in enumerate(both):
            wanted = _by_one(_tokens(10 * batch + rank, COUNTS[batch]))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        assert torch.equal(one, both[0])
