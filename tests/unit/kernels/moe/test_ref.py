"""The ops of a mixture of experts against plain loops in float64."""

from __future__ import annotations

import pytest
import torch
from support.executor.gpu_side import normal, words

from kernels.elementwise.ref import swiglu
from kernels.moe import combine, dispatch, experts_mlp, gpu, permute, route

TOKENS, EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 29, 10, 3, 16, 24


def by_loops(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Token by token and expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for slot, expert in enumerate(chosen[token].tolist()):
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            found = down[expert].double() @ (gate / (1 + torch.exp(-gate)) * up)
            out[token] += weights[token, slot].double() * found
    return out


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_most_probable_experts_and_their_share(renormalise: bool) -> None:
    logits = normal(TOKENS, EXPERTS).cpu()
    weights, chosen = route(logits, PER_TOKEN, renormalise=renormalise)
    probable = torch.exp(logits.double()) / torch.exp(logits.double()).sum(1, keepdim=True)
    for token in range(TOKENS):
        order = sorted(range(EXPERTS), key=lambda expert: -probable[token, expert].item())[:PER_TOKEN]
        assert chosen[token].tolist() == order
        wanted = probable[token, order]
        if renormalise:
            wanted = wanted / wanted.sum()
        torch.testing.assert_close(weights[token].double(), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("first", "count"), [(0, EXPERTS), (0, 4), (4, 6), (9, 1)])
def test_pairs_lie_by_expert_and_token(first: int, count: int) -> None:
    chosen = route(normal(TOKENS, EXPERTS).cpu(), PER_TOKEN, renormalise=True)[1]
    places = permute(chosen, first, count)
    pairs = [
        (expert, token, slot)
        for token in range(TOKENS)
        for slot, expert in enumerate(chosen[token].tolist())
        if first <= expert < first + count
    ]
    wanted = torch.full((TOKENS, PER_TOKEN), -1, dtype=torch.int32)
    for row, (_, token, slot) in enumerate(sorted(pairs)):
        wanted[token, slot] = row
    assert torch.equal(places.rows, wanted)
    until = [sum(expert <= first + i for expert, _, _ in pairs) for i in range(count)]
    assert places.bounds.tolist() == [0, *until]


def test_shares_of_the_experts_add_up_to_the_mlp_of_each() -> None:
    x, gate_up, down = (
        normal(*shape, seed=seed).cpu()
        for seed, shape in enumerate(
            [(TOKENS, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
        )
    )
    weights, chosen = route(normal(TOKENS, EXPERTS, seed=9).cpu(), PER_TOKEN, renormalise=False)
    found = torch.zeros_like(x)
    for first, count in ((0, 3), (3, 7)):
        places = permute(chosen, first, count)
        rows = experts_mlp(
            dispatch(x, places), gate_up[first : first + count], down[first : first + count], places.bounds
        )
        rows[places.bounds[-1] :] = torch.nan  # undefined: it must not be read
        found += combine(rows, places, weights)
    torch.testing.assert_close(
        found.double(), by_loops(x, chosen, weights, gate_up, down), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_gpu_routes_alike(renormalise: bool) -> None:
    logits = normal(TOKENS, EXPERTS)
    for found, wanted in zip(
        gpu.route(logits, PER_TOKEN, renormalise=renormalise),
        route(logits, PER_TOKEN, renormalise=renormalise),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("first", "count"), [(0, EXPERTS), (0, 4), (4, 6), (9, 1)])
@pytest.mark.parametrize("tokens", [1, TOKENS, 1000])
def test_the_gpu_places_alike(first: int, count: int, tokens: int) -> None:
    chosen = normal(tokens, EXPERTS).topk(PER_TOKEN).indices.int()
    found, wanted = gpu.permute(chosen, first, count), permute(chosen, first, count)
    assert torch.equal(found.rows, wanted.rows)
    assert torch.equal(found.bounds, wanted.bounds)


def test_the_gpu_spreads_gates_and_combines_alike() -> None:
    x, logits = normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS, seed=9)
    weights, chosen = route(logits, PER_TOKEN, renormalise=False)
    places = permute(chosen, 2, 5)
    count = int(places.bounds[-1])
    rows = gpu.dispatch(x, places)
    assert torch.equal(rows[:count], dispatch(x, places)[:count])
    gate_up = normal(len(rows), 2 * WIDTH)
    torch.testing.assert_close(gpu._gate(gate_up, places.bounds)[:count], swiglu(gate_up)[:count])
    y = normal(len(rows), HIDDEN, seed=3)
    y[count:] = torch.nan
    torch.testing.assert_close(gpu.combine(y, places, weights), combine(y, places, weights))


def test_grouped_products_equal_the_products_of_each_expert() -> None:
    shapes = [(TOKENS, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    x, gate_up, down = (normal(*shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes))
    bounds = words(0, 0, 3, 3, 4, 9, 16, 16, 20, 21, 25)
    found, wanted = gpu.experts_mlp(x, gate_up, down, bounds), experts_mlp(x, gate_up, down, bounds)
    torch.testing.assert_close(found[:25], wanted[:25], atol=0.5, rtol=0.02)
