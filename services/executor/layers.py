"""A layer of a model, with its matrices as products."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.executor.linear import Linear, Products
from services.executor.mlp import Mlp, mlp
from services.executor.operators import Operators
from services.executor.shapes import Shapes
from services.executor.weights import LayerWeights


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
