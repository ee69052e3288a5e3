"""A layer consists of matrix products, an MLP or experts, and the operators between the products.

cpu/model.py builds the layers and calls them. The operators are torch's here, compiled in cpu/compiled.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import swiglu, swiglu_by_row
from kernels.attention import attend_decode, write_kv
from kernels.moe import route
from kernels.norm import add_rms_norm
from kernels.rope import apply_rope
from services.executor.checkpoint.config import ExpertShapes, Shapes
from services.executor.checkpoint.weights import LayerWeights
from services.executor.cpu.batch import Batch, DecodeGroup
from services.executor.cpu.linear import ROW_TILE, Linear, Products


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Its products keep the matrices in their own format; the plain ones are freed with
    Weights."""

    attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    qkv: Linear
    out: Linear
    mlp: Mlp


def layer_of(
    weights: LayerWeights, shapes: Shapes, products: Products, operators: Operators, *, deterministic: bool
) -> Layer:
    return Layer(
        attention_norm=weights.attention_norm,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        mlp_norm=weights.mlp_norm,
        qkv=products.linear(weights.qkv, weights.qkv_bias),
        out=products.linear(weights.out),
        mlp=mlp(weights, shapes, products, operators.swiglu, deterministic=deterministic),
    )


class Mlp(Protocol):
    """`[rows, hidden]` to `[rows, hidden]`: one MLP for all tokens, or a mixture of experts."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def compile(self, x: Tensor) -> None:
        """Compile the kernels of every product for as many rows as `x` has."""


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
    """Computes this rank's experts that have tokens, in order: a token's sum has one order in any batch. With
    several ranks the result is this rank's part of the sum."""

    def __init__(self, router: Linear, experts: list[Dense], shapes: ExpertShapes, tile: int) -> None:
        """Rows are padded to multiples of `tile`."""
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


class Operators(Protocol):
    """A layer's operators between its matrix products, on a CPU; kernels/*/ref.py defines them. Our compiled
    kernels need one pass where torch needs several, and attention reads the blocks in place: 2 to 8 times
    faster. Torch's operators stay for KV in fp8, odd head sizes, deterministic mode, and without Numba."""

    ragged: bool  # tokens of decode rows and of chunks go into one group

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """May put the sum into `residual`."""

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        """Rotate the queries and keys of `x` `[tokens, heads + 2 * kv_heads, head_dim]` (queries, keys,
        values), store keys and values at `rows` `[K|V, tokens]` of `write_rows`, and return the queries."""

    def attend_decode(self, query: Tensor, kv: Tensor, layer: int, group: DecodeGroup) -> Tensor: ...


class BatchedLayers(Protocol):
    """All layers of a model."""

    def __call__(
        self, normed: Tensor, residual: Tensor, rotation: Tensor, batch: Batch, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first layer's input, `normed` and plain (`residual`), `[tokens, hidden]` each, to both after
        the last layer. May overwrite the arguments."""


class TorchOperators:
    """Torch's operators. With `deterministic` a row's result does not depend on the other rows."""

    ragged = False

    def __init__(self, *, deterministic: bool = False) -> None:
        self._swiglu = swiglu_by_row if deterministic else swiglu

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._swiglu(gate_up)

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        kv_heads = (x.shape[1] - heads) // 2
        rotated = apply_rope(x[:, : heads + kv_heads], rotation)
        query, key = torch.split(rotated, [heads, kv_heads], 1)
        write_kv(kv, rows, key, x[:, heads + kv_heads :])
        return query

    def attend_decode(self, query: Tensor, kv: Tensor, layer: int, group: DecodeGroup) -> Tensor:
        assert group.mask is not None, "not ragged"
        return attend_decode(query, kv, layer, group.tables, group.mask)
