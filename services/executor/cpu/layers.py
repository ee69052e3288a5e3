"""A layer of a model has its matrices as products, an MLP, and operators between the products."""

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
    """Products hold the matrices as they want them: the plain ones go with the `Weights`."""

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
    """The layer of these weights."""
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
    """Of a layer, one MLP for all tokens or experts, of which a token sees a few: `[rows, hidden]` to the
    same."""

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


class Operators(Protocol):
    """What a layer does between its matrix products, on a CPU: in torch's operators, or in kernels of our
    own. See the torch functions of the same names for what they do. The kernels do in one pass what torch
    does in several, and attention reads the blocks where they lie: 2 to 8 times faster. Torch's operators are
    what the kernels mean (kernels/*/ref.py), and stay for what the kernels cannot do: KV in fp8, odd head
    sizes, deterministic mode (whose bits are those of the operators), no Numba."""

    ragged: bool  # tokens of decode rows and of chunks go into one group, whatever their lengths

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """May put the sum into `residual`."""

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        """Of `x` `[tokens, heads + 2 * kv_heads, head_dim]`, queries, keys and values, rotate queries and
        keys by `rotation`; store keys and values at `rows` `[K|V, tokens]` of `write_rows`. The queries."""

    def attend_decode(self, query: Tensor, kv: Tensor, layer: int, group: DecodeGroup) -> Tensor: ...


class BatchedLayers(Protocol):
    """All layers of a model."""

    def __call__(
        self, normed: Tensor, residual: Tensor, rotation: Tensor, batch: Batch, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """From the norm of the first layer's input, and that input, to those behind the last: `[tokens,
        hidden]` each, which may take the place of what is given."""


class TorchOperators:
    """See Operators. With `deterministic` a row's result does not depend on the other rows."""

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
