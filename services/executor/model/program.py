"""A program is a model's operations as one engine runs them, in order.

An engine's table has a pattern of operations for each kernel, and the longest that fits is taken:

    description   Norm  Projection  Rope  Attention  Projection  Add  Norm  Projection …
    patterns      Norm  Projection  Rope · Attention Projection  Add · Norm Projection …

An operation that is in no pattern of the engine runs in torch (program.py), which is logged once.

The operations in torch: the definition of each, and what an engine without a kernel of its own runs.

They compute in the dtype of x. Attention reads a cache, whose layout is an engine's; so it is not here.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import rms_norm, swiglu
from kernels.moe import combine, dispatch, experts_mlp, permute, route
from services.executor.model.description import (
    Add,
    Description,
    Experts,
    Gate,
    HeadNorm,
    Norm,
    Projection,
    weights_of,
)
from services.executor.parallel.coroutines import AllReduces, Collective

log = logging.getLogger("headrace.executor")


class Values(Protocol):
    """The values between the operations of a pass, `[tokens, width]` each. Engines add inputs of a step."""

    x: Tensor
    residual: Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """An operation of a layer, with its weights by name."""

    op: Any  # an Operation
    layer: int
    weights: Mapping[str, Any]  # Stored: checkpoint/stored.py

    def dense(self, weight: Any) -> Tensor:
        """The values of a Weight of the operation."""
        values: Tensor = self.weights[weight.name].values
        return values


class Step(Protocol):
    """Changes the Values of a pass; an engine's steps read its own inputs there, too."""

    def __call__(self, values: Any) -> None: ...


Pattern = tuple[type, ...]  # of Operations
Table = Mapping[Pattern, Callable[..., Step | None]]  # makes a step of Placed operations; None: cannot


def placed(
    description: Description, layers: list[dict[str, Any]], norm: Any, *, keep: bool = False
) -> Iterator[Placed]:
    """Every operation in order, the norm at the end with the weight `norm`. Takes the layers out of `layers`
    one by one unless `keep`, so that a matrix is freed when its step has made its own copy."""
    for i, ops in enumerate(description.layers):
        weights = layers[i] if keep else layers.pop(0)
        for op in ops:
            yield Placed(op, i, {weight.name: weights[weight.name] for weight in weights_of(op)})
    yield Placed(description.norm, len(description.layers), {description.norm.weight.name: norm})


def steps_of(operations: Iterable[Placed], table: Table, reference: Table) -> list[tuple[Step, bool]]:
    """The steps of an engine with `table`, each with whether x must first be summed over the ranks."""
    source, waiting = iter(operations), deque[Placed]()
    longest = max(len(pattern) for pattern in table)
    steps, in_torch = list[tuple[Step, bool]](), set[str]()
    while True:
        waiting.extend(islice(source, longest - len(waiting)))
        if not waiting:
            break
        step, size = _first(list(waiting), table)
        if step is None:
            step, size = _first([waiting[0]], reference)
            in_torch.add(type(waiting[0].op).__name__)
        assert step is not None, f"no reference of {type(waiting[0].op).__name__}"
        steps.append((step, isinstance(waiting[0].op, Add)))
        for _ in range(size):
            waiting.popleft()
    if in_torch:
        log.warning("this engine has no kernels for %s: torch computes them", ", ".join(sorted(in_torch)))
    return steps


def _first(waiting: Sequence[Placed], table: Table) -> tuple[Step | None, int]:
    kinds = tuple(type(each.op) for each in waiting)
    for size in range(len(kinds), 0, -1):
        make = table.get(kinds[:size])
        if make is not None and (step := make(*waiting[:size])) is not None:
            return step, size
    return None, 0


def run(
    steps: Sequence[tuple[Step, bool]], values: Values, sums: AllReduces, size: int
) -> Generator[Collective, None, None]:
    """Run the steps, with the sums over `size` ranks between them."""
    for step, summed in steps:
        if summed and size > 1:
            yield functools.partial(sums.all_reduce, values.x)
        step(values)


def split_heads(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[tokens, heads, dim]` of `x` `[tokens, (heads + 2 * kv_heads) * dim]`."""
    each = x.view(len(x), heads + 2 * kv_heads, -1)
    query, key, value = torch.split(each, [heads, kv_heads, kv_heads], 1)
    return query, key, value


def _norm(placed: Placed, values: Values) -> None:
    weight = placed.dense(placed.op.weight)
    values.x = rms_norm(values.residual, weight.to(values.residual.dtype), placed.op.eps)


def _projection(placed: Placed, values: Values) -> None:
    op, kind = placed.op, values.x.dtype
    bias = None if op.bias is None else placed.dense(op.bias).to(kind)
    values.x = F.linear(values.x, placed.dense(op.weight).to(kind), bias)


def _head_norm(placed: Placed, values: Values) -> None:
    op, kind = placed.op, values.x.dtype
    query, key, value = split_heads(values.x, op.heads, op.kv_heads)
    query = rms_norm(query, placed.dense(op.query).to(kind), op.eps)
    key = rms_norm(key, placed.dense(op.key).to(kind), op.eps)
    values.x = torch.cat((query, key, value), 1).view(values.x.shape)


def _gate(placed: Placed, values: Values) -> None:
    values.x = swiglu(values.x)


def _experts(placed: Placed, values: Values) -> None:
    op, x = placed.op, values.x
    gate_up, down, router = (placed.dense(each) for each in (op.gate_up, op.down, op.router))
    weights, chosen = route(F.linear(x, router.to(x.dtype)), op.per_token, renormalise=op.renormalise)
    permuted = permute(chosen, op.first, len(gate_up))
    found = experts_mlp(dispatch(x, permuted), gate_up, down, permuted.bounds)
    values.x = combine(found, permuted, weights)


def _add(placed: Placed, values: Values) -> None:
    values.residual = values.residual + values.x


_DEFINITIONS = {
    Norm: _norm,
    Projection: _projection,
    HeadNorm: _head_norm,
    Gate: _gate,
    Experts: _experts,
    Add: _add,
}
REFERENCE: Table = {(kind,): partial(partial, run) for kind, run in _DEFINITIONS.items()}
