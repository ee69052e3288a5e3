"""Runs a layer's operators, or all layers in one call, in kernels compiled for this CPU. Needs Numba.

cpu/engine.py finds it by a table, and uses it only where Numba is installed and the kernels fit the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention import PLAIN, Scoring
from kernels.cpu_jit.attention import Sequences, attend, attention_call, can_attend, scoring_numbers
from kernels.cpu_jit.batched_launch import Launch
from kernels.cpu_jit.packed_weights import PackedMatrix, PackedProduct
from kernels.cpu_jit.rowwise import (
    GATES,
    add_rms_norm,
    norm_call,
    rotate_and_write,
    rotation_call,
    swiglu,
    swiglu_call,
)
from kernels.cpu_jit.thread_team import Call, Number, team_size
from services.executor.cpu.batch import Batch
from services.executor.cpu.layers import AddNorm, Attend, Gated, Product, StepValues
from services.executor.cpu.linear import Linear
from services.executor.model.program import Step

KEPT, KEPT_ROWS = 4, 64  # passes, of at most so many rows: a larger one needs much memory, and takes long


def at_once(steps: Sequence[Step], layers: int, head: Linear | None) -> Step | None:
    """The steps of all layers as one call, if each step of a layer has a kernel and all layers are alike. It
    computes the logits, too, of a batch whose rows are all sampled, if the head's matrix is packed."""
    period = len(steps) // layers
    columns = [steps[i::period] for i in range(period)]
    kinds = [type(column[0]) for column in columns]
    if len(steps) % layers or any(type(step) is not kinds[i % period] for i, step in enumerate(steps)):
        return None
    if not _ALIKE.keys() >= {*kinds}:
        return None
    found = [_ALIKE[kind](column) for kind, column in zip(kinds, columns, strict=True)]
    calls = [each for each in found if each is not None]
    packed = head.matrix if isinstance(head, PackedProduct) else None
    return _AtOnce(calls, layers, packed) if len(calls) == period else None


class CompiledOperators:
    """See services.executor.cpu.layers.Operators."""

    sequences = Sequences
    add_rms_norm, swiglu = staticmethod(add_rms_norm), staticmethod(swiglu)
    rotate_and_write, at_once = staticmethod(rotate_and_write), staticmethod(at_once)
    can_attend = staticmethod(can_attend)

    def attend(self, query: Tensor, kv: Tensor, layer: int, batch: Batch, scoring: Scoring) -> Tensor:
        attended = attend(query, kv, layer, batch.sequences, scoring)
        if batch.padding:
            attended[-batch.padding :] = 0  # no kernel wrote there
        return attended


class _Pass:
    """The calls of all layers, and of the head, for a number of rows and of threads; the memory of their
    values."""

    def __init__(
        self, operations: Sequence[_Operation], layers: int, head: PackedMatrix | None, values: StepValues
    ) -> None:
        self.threads, self.values, self.order = team_size(), values, np.arange(layers)
        self.x = self.normed = values.x  # every norm writes to one place: the next layer reads there
        self.residual = values.residual
        self._products: dict[int, Tensor] = {}  # by width: what a product has written is soon read
        self._others: list[Tensor] = []
        self._calls: list[Call] = []  # of one layer; they keep their intermediate memory
        self._inputs: list[tuple[int, _MakeCalls]] = []  # the place of calls that each step makes anew
        for operation in operations:
            operation(self)
        of_a_layer = len(self._calls)
        if head is not None:
            self.add_inputs(_head_calls(head, self.x))
        self._launch = Launch(self._calls[:of_a_layer], layers, self._calls[of_a_layer:])
        del self.values  # of this step alone; its logits may be large

    def add(self, calls: Iterable[Call]) -> None:
        """The next calls of a layer."""
        self._calls += calls

    def add_inputs(self, make: _MakeCalls) -> None:
        """The next calls of a layer, made anew for each step: they read its inputs."""
        self._inputs.append((len(self._calls), make))
        self.add(make(self.values))

    def product(self, width: int) -> Tensor:
        """Where a product writes."""
        found = self._products.get(width)
        if found is None or found is self.x:
            found = self._products[width] = self.other(width)
        return found

    def other(self, width: int) -> Tensor:
        """Where another operation writes."""
        self._others.append(self.x.new_empty(len(self.x), width))
        return self._others[-1]

    def set_inputs(self, values: StepValues) -> None:
        """The inputs of another step of as many rows."""
        self.normed.copy_(values.x)
        self.residual.copy_(values.residual)
        for first, make in self._inputs:
            for place, call in enumerate(make(values), first):
                self._calls[place] = call
                self._launch.put(place, call)

    def run(self, values: StepValues) -> None:
        """Compute the layers. The results stay until the next run."""
        self._launch.run()
        values.x, values.residual = self.x, self.residual


_MakeCalls = Callable[[StepValues], Sequence[Call]]
_Operation = Callable[[_Pass], None]  # adds the calls of one operation in all layers


class _AtOnce:
    """One batched launch (kernels.cpu_jit.batched_launch): to start the 270 kernels of a 135M model's decode
    step one by one from Python takes 3 of 13 ms. Building the table of calls takes 0.2 to 0.8 ms, so a later
    step with the same number of rows reuses the table and its memory."""

    def __init__(self, operations: Sequence[_Operation], layers: int, head: PackedMatrix | None) -> None:
        self._operations, self._layers, self._head = operations, layers, head
        # by rows, and whether they are all sampled, and some have adapters
        self._kept: dict[tuple[int, bool, bool], _Pass] = {}

    def __call__(self, values: StepValues) -> None:
        rows, sampled = len(values.x), values.batch.each_sampled
        key = rows, sampled, values.batch.adapted is not None
        found = self._kept.get(key)
        if found is None or found.threads != team_size():
            found = _Pass(self._operations, self._layers, self._head if sampled else None, values)
            if rows <= KEPT_ROWS:
                self._kept.pop(key, None)
                if len(self._kept) == KEPT:
                    del self._kept[next(iter(self._kept))]  # the oldest
                self._kept[key] = found
        else:
            found.set_inputs(values)
        found.run(values)


def _head_calls(head: PackedMatrix, x: Tensor) -> _MakeCalls:
    """The product that stores the logits of `x`, in memory of each step's own: a later step may run before
    they are sampled."""
    parts = [part.data_ptr() for part in head.parts]

    def calls(values: StepValues) -> Sequence[Call]:
        values.logits = x.new_empty(len(x), head.height, dtype=torch.float32)
        return head.calls(x, values.logits, parts)

    return calls


def _products(steps: Sequence[Product]) -> _Operation | None:
    """None for a product of a library, or with a bias."""
    found = [step.linear.matrix for step in steps if isinstance(step.linear, PackedProduct)]
    if len(found) < len(steps) or len({type(matrix) for matrix in found}) > 1:
        return None
    parts = [_addresses(of_all) for of_all in zip(*(matrix.parts for matrix in found), strict=True)]
    adapted, layers = steps[0].adapted, np.arange(len(steps))

    def add(to: _Pass) -> None:
        x, to.x = to.x, to.product(found[0].height)
        to.add(found[0].calls(x, to.x, parts))
        if adapted is not None and to.values.batch.adapted is not None:
            out = to.x
            to.add_inputs(lambda values: (adapted.call(x, out, values.batch.adapted, layers),))

    return add


def _norms(steps: Sequence[AddNorm]) -> _Operation:
    weights, eps = _addresses(step.weight for step in steps), steps[0].eps

    def add(to: _Pass) -> None:
        x, to.x = to.x, to.normed
        to.add([norm_call(x, to.residual, weights, eps, to.x)])

    return add


def _gates(steps: Sequence[Gated]) -> _Operation | None:
    act = steps[0].act
    if act not in GATES:
        return None

    def add(to: _Pass) -> None:
        x, to.x = to.x, to.other(to.x.shape[1] // 2)
        to.add([swiglu_call(x, to.x, act)])

    return add


def _attention(steps: Sequence[Attend]) -> _Operation:
    op = steps[0].op
    plain = all(step.scoring is PLAIN for step in steps)
    scoring = () if plain else scoring_numbers([step.scoring for step in steps], op.dim)
    tables = [step.table for step in steps]

    def add(to: _Pass) -> None:
        each, to.x = to.x.view(len(to.x), -1, op.dim), to.other(op.heads * op.dim)
        query, attended, order = each[:, : op.heads], to.x.view(len(to.x), op.heads, op.dim), to.order
        attended[len(attended) - to.values.batch.padding :] = 0  # no kernel writes there

        def calls(values: StepValues) -> tuple[Call, Call]:  # without `to`: a cycle would keep its memory
            batch, kv = values.batch, values.kv
            rows = batch.rows.data_ptr() + order * batch.rows[0].nbytes
            turns = [table.data_ptr() for table in values.rotations]
            turn = turns[0] if len(turns) == 1 else np.array([turns[table] for table in tables], np.int64)
            rotation = rotation_call(each, turn, kv, rows, op.heads)
            layer = order * kv.stride(1)
            return rotation, attention_call(query, kv, layer, batch.sequences, attended, scoring)

        to.add_inputs(calls)

    return add


_ALIKE: dict[type, Callable[[Any], _Operation | None]] = {
    Product: _products,
    AddNorm: _norms,
    Gated: _gates,
    Attend: _attention,
}


def _addresses(tensors: Iterable[Tensor]) -> Number:
    return np.array([each.data_ptr() for each in tensors], np.int64)
