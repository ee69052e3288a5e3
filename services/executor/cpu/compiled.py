"""Runs a layer's operators, or all layers in one call, in kernels compiled for this CPU. Needs Numba.

cpu/model.py imports it only where Numba is installed and the kernels fit the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from kernels.cpu_jit import batched_launch
from kernels.cpu_jit.attention import attend_decode, can_attend, decode_call
from kernels.cpu_jit.packed_weights import PackedMatrix, PackedProduct
from kernels.cpu_jit.rowwise import (
    add_rms_norm,
    norm_call,
    rotate_and_write,
    rotation_call,
    swiglu,
    swiglu_call,
)
from kernels.cpu_jit.thread_team import Call, Number
from services.executor.checkpoint.config import Shapes
from services.executor.cpu.batch import Batch, DecodeGroup
from services.executor.cpu.layers import Dense, Layer
from services.executor.cpu.linear import Linear

__all__ = ["CompiledOperators", "can_attend"]


class CompiledOperators:
    """See services.executor.cpu.layers.Operators."""

    ragged = True

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        return rotate_and_write(x, rotation, kv, rows, heads)

    def attend_decode(self, query: Tensor, kv: Tensor, layer: int, group: DecodeGroup) -> Tensor:
        return attend_decode(query, kv, layer, group.tables, group.lengths)


def compiled_layers(layers: Sequence[Layer], shapes: Shapes, norm: Tensor) -> CompiledLayers | None:
    """All layers as one call. None if a layer has a part without a kernel: a bias, norms of queries and keys,
    experts, or a product of a library."""
    mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, Dense)]
    if len(mlps) < len(layers) or any(layer.q_norm is not None for layer in layers):
        return None
    qkv, out = [layer.qkv for layer in layers], [layer.out for layer in layers]
    kinds = (qkv, out, [mlp.gate_up for mlp in mlps], [mlp.down for mlp in mlps])
    found = [product for kind in kinds if (product := _together(kind)) is not None]
    return CompiledLayers(layers, found, shapes, norm) if len(found) == len(kinds) else None


class CompiledLayers:
    """See services.executor.cpu.layers.BatchedLayers. One batched launch (kernels.cpu_jit.batched_launch):
    to start the 270 kernels of a 135M model's decode step one by one from Python takes 3 of 13 ms."""

    def __init__(
        self, layers: Sequence[Layer], products: Sequence[_Product], shapes: Shapes, norm: Tensor
    ) -> None:
        """`products`: qkv, out, gate_up, down."""
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
        batched_launch.run(calls, len(self._order))
        return normed, residual


class _Product:
    """The same product in every layer."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self._like = matrices[0]
        self.height = self._like.height
        by_layer = [matrix.parts for matrix in matrices]
        self._parts = [_addresses(of_all) for of_all in zip(*by_layer, strict=True)]

    def calls(self, x: Tensor, out: Tensor) -> tuple[Call, ...]:
        return self._like.calls(x, out, self._parts)


def _together(products: Sequence[Linear]) -> _Product | None:
    matrices = [product.matrix for product in products if isinstance(product, PackedProduct)]
    alike = len({type(matrix) for matrix in matrices}) == 1
    return _Product(matrices) if alike and len(matrices) == len(products) else None


def _addresses(tensors: Iterable[Tensor]) -> Number:
    return np.array([each.data_ptr() for each in tensors], np.int64)
