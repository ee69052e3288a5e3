"""All layers of a model on a CPU from one call of machine code: see kernels.cpu.program.

Started one by one from Python, the 270 kernels of a decode step of a 135M model take 3 of 13 ms to start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from kernels.cpu import program
from kernels.cpu.team import Call, Number
from kernels.matmul.panels import Matrix
from kernels.paged_attention.cpu import decode_call
from kernels.rms_norm.cpu import norm_call
from kernels.rope.cpu import rotation_call
from kernels.swiglu.cpu import swiglu_call
from services.executor.batch import Batch
from services.executor.compiled_products import PanelProduct
from services.executor.layers import Layer
from services.executor.linear import Linear
from services.executor.mlp import Dense
from services.executor.shapes import Shapes


def compiled_layers(layers: Sequence[Layer], shapes: Shapes, norm: Tensor) -> CompiledLayers | None:
    """None where a layer has what there is no kernel for: a bias, norms of queries and keys, experts, or
    products of a library."""
    normed = any(layer.q_norm is not None for layer in layers)
    if normed or not all(isinstance(layer.mlp, Dense) for layer in layers):
        return None
    kinds = [_together([kind(layer) for layer in layers]) for kind in (_qkv, _out, _gate_up, _down)]
    found = [kind for kind in kinds if kind is not None]
    return CompiledLayers(layers, found, shapes, norm) if len(found) == len(kinds) else None


class CompiledLayers:
    """See services.executor.operators.LayersInOne."""

    def __init__(
        self, layers: Sequence[Layer], products: Sequence[_Product], shapes: Shapes, norm: Tensor
    ) -> None:
        """`products`: those of the layers, in the order of their use."""
        self._shapes = shapes
        self._products = products
        following = [layer.attention_norm for layer in layers[1:]] + [norm]
        self._kept = [layer.mlp_norm for layer in layers], following
        self._mlp_norms, self._next_norms = (_addresses(each) for each in self._kept)
        self._order = np.arange(len(layers))

    def __call__(
        self, normed: Tensor, residual: Tensor, rotation: Tensor, batch: Batch, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        shapes, tokens, empty = self._shapes, len(normed), normed.new_empty
        by_qkv, by_out, by_gate_up, by_down = self._products
        qkv, gate_up = empty(tokens, by_qkv.height), empty(tokens, by_gate_up.height)
        heads = qkv.view(tokens, -1, shapes.head_dim)
        query, attended = heads[:, : shapes.heads], empty(tokens, shapes.heads, shapes.head_dim)
        added, gated = empty(normed.shape), empty(tokens, by_gate_up.height // 2)
        rows = batch.rows.data_ptr() + self._order * batch.rows[0].nbytes
        (group,) = batch.decode
        starts = self._order * kv.stride(1)
        calls = (
            *by_qkv.calls(normed, qkv),
            rotation_call(heads, rotation, kv, rows, shapes.heads),
            decode_call(query, kv, starts, group.tables, group.lengths, attended),
            *by_out.calls(attended.view(tokens, -1), added),
            norm_call(added, residual, self._mlp_norms, shapes.norm_eps, normed),
            *by_gate_up.calls(normed, gate_up),
            swiglu_call(gate_up, gated),
            *by_down.calls(gated, added),
            norm_call(added, residual, self._next_norms, shapes.norm_eps, normed),
        )
        program.run(calls, len(self._order))
        return normed, residual


class _Product:
    """The same product in every layer."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._like = matrices[0]
        self.height = self._like.height
        by_layer = [matrix.parts for matrix in matrices]
        self._parts = [_addresses(of_all) for of_all in zip(*by_layer, strict=True)]

    def calls(self, x: Tensor, out: Tensor) -> tuple[Call, ...]:
        return self._like.calls(x, out, self._parts)


def _together(products: Sequence[Linear]) -> _Product | None:
    matrices = [product.matrix for product in products if isinstance(product, PanelProduct)]
    alike = len({type(matrix) for matrix in matrices}) == 1
    return _Product(matrices) if alike and len(matrices) == len(products) else None


def _addresses(tensors: Iterable[Tensor]) -> Number:
    return np.array([each.data_ptr() for each in tensors], np.int64)


def _qkv(layer: Layer) -> Linear:
    return layer.qkv


def _out(layer: Layer) -> Linear:
    return layer.out


def _gate_up(layer: Layer) -> Linear:
    assert isinstance(layer.mlp, Dense)
    return layer.mlp.gate_up


def _down(layer: Layer) -> Linear:
    assert isinstance(layer.mlp, Dense)
    return layer.mlp.down
