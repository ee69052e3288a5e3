"""Runs a layer's operators, or all layers in one call, in kernels compiled for this CPU. Needs Numba.

cpu/model.py imports it only where Numba is installed and the kernels fit the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu_jit import batched_launch
from kernels.cpu_jit.attention import Sequences, attend, attention_call, can_attend
from kernels.cpu_jit.packed_weights import PackedProduct
from kernels.cpu_jit.rowwise import (
    add_rms_norm,
    norm_call,
    rotate_and_write,
    rotation_call,
    swiglu,
    swiglu_call,
)
from kernels.cpu_jit.thread_team import Call, Number
from services.executor.cpu.batch import Batch
from services.executor.cpu.layers import AddNorm, Attend, Gated, Product, StepValues
from services.executor.model.program import Step

__all__ = ["CompiledOperators", "can_attend"]


class CompiledOperators:
    """See services.executor.cpu.layers.Operators."""

    sequences = Sequences

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        return rotate_and_write(x, rotation, kv, rows, heads)

    def attend(self, query: Tensor, kv: Tensor, layer: int, batch: Batch) -> Tensor:
        return attend(query, kv, layer, batch.sequences)


def at_once(steps: Sequence[Step], layers: int) -> Step | None:
    """The steps of all layers as one call, if each step of a layer has a kernel and all layers are alike."""
    period = len(steps) // layers
    columns = [steps[i::period] for i in range(period)]
    kinds = [type(column[0]) for column in columns]
    if len(steps) % layers or any(type(step) is not kinds[i % period] for i, step in enumerate(steps)):
        return None
    if not _ALIKE.keys() >= {*kinds}:
        return None
    found = [_ALIKE[kind](column) for kind, column in zip(kinds, columns, strict=True)]
    calls = [each for each in found if each is not None]
    return _AtOnce(calls, layers) if len(calls) == period else None


class _Run:
    """The values of a pass while the calls of a layer are collected; their memory stays to the end."""

    def __init__(self, values: StepValues, order: Number) -> None:
        self.values, self.order = values, order
        self.x = self.normed = values.x  # every norm writes to one place: the next layer reads there
        self._products: dict[int, Tensor] = {}  # by width: what a product has written is soon read
        self._kept: list[Tensor] = []

    def product(self, width: int) -> Tensor:
        """Where a product writes."""
        found = self._products.get(width)
        if found is None or found is self.x:
            found = self._products[width] = self.other(width)
        return found

    def other(self, width: int) -> Tensor:
        """Where another operation writes."""
        self._kept.append(self.x.new_empty(len(self.x), width))
        return self._kept[-1]


_Calls = Callable[[_Run], Iterable[Call]]  # of one operation in all layers


class _AtOnce:
    """One batched launch (kernels.cpu_jit.batched_launch): to start the 270 kernels of a 135M model's decode
    step one by one from Python takes 3 of 13 ms."""

    def __init__(self, operations: Sequence[_Calls], layers: int) -> None:
        self._operations, self._layers = operations, layers
        self._order = np.arange(layers)

    def __call__(self, values: StepValues) -> None:
        now = _Run(values, self._order)
        calls = [call for operation in self._operations for call in operation(now)]
        batched_launch.run(calls, self._layers)
        values.x = now.x


def _products(steps: Sequence[Product]) -> _Calls | None:
    """None for a product of a library, or with a bias."""
    found = [step.linear.matrix for step in steps if isinstance(step.linear, PackedProduct)]
    if len(found) < len(steps) or len({type(matrix) for matrix in found}) > 1:
        return None
    parts = [_addresses(of_all) for of_all in zip(*(matrix.parts for matrix in found), strict=True)]

    def calls(now: _Run) -> Iterable[Call]:
        x, now.x = now.x, now.product(found[0].height)
        return found[0].calls(x, now.x, parts)

    return calls


def _norms(steps: Sequence[AddNorm]) -> _Calls:
    weights, eps = _addresses(step.weight for step in steps), steps[0].eps

    def calls(now: _Run) -> Iterable[Call]:
        x, now.x = now.x, now.normed
        yield norm_call(x, now.values.residual, weights, eps, now.x)

    return calls


def _gates(steps: Sequence[Gated]) -> _Calls:
    def calls(now: _Run) -> Iterable[Call]:
        x, now.x = now.x, now.other(now.x.shape[1] // 2)
        yield swiglu_call(x, now.x)

    return calls


def _attention(steps: Sequence[Attend]) -> _Calls:
    op = steps[0].op

    def calls(now: _Run) -> Iterable[Call]:
        batch, kv = now.values.batch, now.values.kv
        each, now.x = now.x.view(len(now.x), -1, op.dim), now.other(op.heads * op.dim)
        rows = batch.rows.data_ptr() + now.order * batch.rows[0].nbytes
        yield rotation_call(each, now.values.rotation, kv, rows, op.heads)
        attended, starts = now.x.view(len(now.x), op.heads, op.dim), now.order * kv.stride(1)
        yield attention_call(each[:, : op.heads], kv, starts, batch.sequences, attended)

    return calls


_ALIKE: dict[type, Callable[[Any], _Calls | None]] = {
    Product: _products,
    AddNorm: _norms,
    Gated: _gates,
    Attend: _attention,
}


def _addresses(tensors: Iterable[Tensor]) -> Number:
    return np.array([each.data_ptr() for each in tensors], np.int64)
