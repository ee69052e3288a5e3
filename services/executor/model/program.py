"""A program is a model's operations as one engine runs them, in order.

An engine's table has a pattern of operations for each kernel, and the longest that fits is taken:

    description   Norm  Projection  Rope  Attention  Projection  Add  Norm  Projection …
    patterns      Norm  Projection  Rope · Attention Projection  Add · Norm Projection …

An operation that is in no pattern of the engine runs in torch (reference.py), which is logged once.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from torch import Tensor

from services.executor.model.description import Add, Description, weights_of
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
