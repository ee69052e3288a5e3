"""The MLP of a layer: one for all tokens, or a mixture of experts, of which a token sees a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import route
from services.executor.linear import ROW_TILE, Linear, Products
from services.executor.shapes import ExpertShapes, Shapes
from services.executor.weights import LayerWeights


class Mlp(Protocol):
    """`[rows, hidden]` to the same."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def compile(self, x: Tensor) -> None:
        """Have the kernels of every product of as many rows as `x` has."""
        ...


def mlp(
    layer: LayerWeights,
    shapes: Shapes,
    products: Products,
    gate: Callable[[Tensor], Tensor],
    *,
    deterministic: bool = False,
) -> Mlp:
    """The MLP of a layer. With `deterministic` a row's result does not depend on the other rows."""
    if layer.router is None:
        return Dense(products.linear(layer.gate_up), gate, products.linear(layer.down))
    assert shapes.experts is not None, "a router comes with experts"
    experts = [
        Dense(products.linear(gate_up), gate, products.linear(down))
        for gate_up, down in zip(layer.gate_up, layer.down, strict=True)
    ]
    tile = ROW_TILE if deterministic else 1
    return _Experts(products.linear(layer.router), experts, shapes.experts, tile)


class Dense:
    """`down(gate(gate_up(x)))`."""

    def __init__(self, gate_up: Linear, gate: Callable[[Tensor], Tensor], down: Linear) -> None:
        self.gate_up, self._gate, self.down = gate_up, gate, down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._gate(self.gate_up(x)))

    def compile(self, x: Tensor) -> None:
        self(x)


class _Experts:
    """Goes through the experts here that have tokens, in order: a token's sum is in one order in any batch.
    Of several ranks each gives its experts' part of the sum."""

    def __init__(self, router: Linear, experts: list[Dense], shapes: ExpertShapes, tile: int) -> None:
        """Products come in multiples of `tile` rows."""
        self._router, self._experts, self._shapes, self._tile = router, experts, shapes, tile

    def __call__(self, x: Tensor) -> Tensor:
        count, renormalise = self._shapes.per_token, self._shapes.renormalise
        weights, chosen = route(self._router(x), count, renormalise=renormalise)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        first = self._shapes.first
        here = range(first, first + len(self._experts))
        for expert in sorted({*chosen.flatten().tolist()}.intersection(here)):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            padded = F.pad(x[rows], (0, 0, 0, -len(rows) % self._tile))
            found = self._experts[expert - first](padded)[: len(rows)].float()
            out[rows] += found * weights[rows, slots, None]
        return out.to(x.dtype)

    def compile(self, x: Tensor) -> None:
        self._router(x)
        self._experts[0].compile(x)
