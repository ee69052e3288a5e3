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

from kernels.attention import PLAIN, Scoring
from kernels.elementwise import activate, layer_norm, rms_norm, rope_table, swiglu
from kernels.moe import (
    combine,
    dispatch,
    experts_mlp,
    permute,
    route,
    route_by_sigmoid,
    route_of_chosen,
)
from services.executor.model.description import (
    Activation,
    Add,
    Description,
    Experts,
    Gate,
    HeadNorm,
    Join,
    Keep,
    Norm,
    PostNorm,
    Projection,
    Residual,
    Shapes,
    weights_of,
)
from services.executor.parallel.coroutines import AllReduces, Collective

log = logging.getLogger("headrace.executor")


class Values(Protocol):
    """The values between the operations of a pass, `[tokens, width]` each. Engines add inputs of a step."""

    x: Tensor
    residual: Tensor
    kept: Tensor | None


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

    def maybe(self, weight: Any, dtype: torch.dtype) -> Tensor | None:
        """The same in a dtype; None without a Weight."""
        return None if weight is None else self.dense(weight).to(dtype)


class Step(Protocol):
    """Changes the Values of a pass; an engine's steps read its own inputs there, too."""

    def __call__(self, values: Any) -> None: ...


Pattern = tuple[type, ...]  # of Operations
Table = Mapping[Pattern, Callable[..., Step | None]]  # makes a step of Placed operations; None: cannot


def placed(
    description: Description, layers: list[dict[str, Any]], norm: Mapping[str, Any], *, keep: bool = False
) -> Iterator[Placed]:
    """Every operation in order, the norm at the end with the weights `norm`. Takes the layers out of `layers`
    one by one unless `keep`, so that a matrix is freed when its step has made its own copy."""
    for i, ops in enumerate(description.layers):
        weights = layers[i] if keep else layers.pop(0)
        for op in ops:
            yield Placed(op, i, {weight.name: weights[weight.name] for weight in weights_of(op)})
    yield Placed(description.norm, len(description.layers), norm)


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
        steps.append((step, _is_summed_before(waiting[0].op)))
        for _ in range(size):
            waiting.popleft()
    if in_torch:
        log.warning("this engine has no kernels for %s: torch computes them", ", ".join(sorted(in_torch)))
    return steps


def _is_summed_before(op: Any) -> bool:
    return isinstance(op, PostNorm) or (isinstance(op, Add) and not op.summed)


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


def rotations(shapes: Shapes, positions: int, device: torch.device) -> list[Tensor]:
    """The rotation of every position `[positions, 2, head_dim]`, for each of `Shapes.rope_tables`."""
    tables = [(torch.tensor(turns, dtype=torch.float64), gain) for turns, gain in shapes.rope_tables()]
    return [rope_table(turns, positions, gain).to(device) for turns, gain in tables]


def scoring_of(attention: Placed) -> Scoring:
    """How an Attention weighs; PLAIN if as Llama does."""
    op = attention.op
    sinks = attention.maybe(op.sinks, torch.float32)
    if not op.window and not op.scale and not op.cap and sinks is None:
        return PLAIN
    return Scoring(op.window, op.scale, op.cap, sinks)


def embedded(rows: Tensor, shapes: Shapes) -> Tensor:
    """Rows of the embedding as the first layer reads them. The scale is rounded to their dtype (Gemma)."""
    scale = shapes.options.embedding_scale
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype).item()


def shaped(logits: Tensor, shapes: Shapes) -> Tensor:
    """What the head gives, as a model's logits."""
    options = shapes.options
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    return torch.tanh(logits / options.logit_cap) * options.logit_cap if options.logit_cap else logits


def split_heads(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[tokens, heads, dim]` of `x` `[tokens, (heads + 2 * kv_heads) * dim]`."""
    each = x.view(len(x), heads + 2 * kv_heads, -1)
    query, key, value = torch.split(each, [heads, kv_heads, kv_heads], 1)
    return query, key, value


def _norm(placed: Placed, values: Values) -> None:
    op, x = placed.op, values.residual
    weight, bias = placed.dense(op.weight), placed.maybe(op.bias, x.dtype)
    if op.centred:
        values.x = layer_norm(x, weight, bias, op.eps)
    else:
        values.x = rms_norm(x, weight.to(x.dtype), op.eps)


def _post_norm(placed: Placed, values: Values) -> None:
    values.x = rms_norm(values.x, placed.dense(placed.op.weight).to(values.x.dtype), placed.op.eps)


def _residual(placed: Placed, values: Values) -> None:
    values.x = values.residual


def _projection(placed: Placed, values: Values) -> None:
    op, kind = placed.op, values.x.dtype
    values.x = F.linear(values.x, placed.dense(op.weight).to(kind), placed.maybe(op.bias, kind))


def _head_norm(placed: Placed, values: Values) -> None:
    op, kind = placed.op, values.x.dtype
    *parts, value = split_heads(values.x, op.heads, op.kv_heads)
    for i, weight in enumerate((op.query, op.key)):
        x, by = parts[i], placed.dense(weight).to(kind)
        if op.centred:
            parts[i] = layer_norm(x, by, None, op.eps)
        elif op.whole:
            parts[i] = rms_norm(x.reshape(len(x), -1), by, op.eps).view(x.shape)
        else:
            parts[i] = rms_norm(x, by, op.eps)
    values.x = torch.cat((*parts, value), 1).view(values.x.shape)


def _gate(placed: Placed, values: Values) -> None:
    values.x = swiglu(values.x, placed.op.act)


def _activation(placed: Placed, values: Values) -> None:
    values.x = activate(values.x, placed.op.act)


def routed(op: Experts, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights and the numbers of the experts of each row of `logits`, as `kernels.moe.route`. `bias`: of
    the router."""
    by = op.routing
    if by is not None and by.sigmoid:
        assert bias is not None, "a router of sigmoids has a bias"
        groups = by.groups, by.top_groups
        return route_by_sigmoid(logits, op.per_token, bias, *groups, by.scale, renormalise=op.renormalise)
    logits = logits if bias is None else logits + bias
    if by is not None and by.chosen_softmax:
        return route_of_chosen(logits, op.per_token)
    return route(logits, op.per_token, renormalise=op.renormalise)


def _experts(placed: Placed, values: Values) -> None:
    op, x = placed.op, values.x
    gate_up, down, router = (placed.dense(each) for each in (op.gate_up, op.down, op.router))
    weights, chosen = routed(op, F.linear(x, router.to(x.dtype)), placed.maybe(op.router_bias, x.dtype))
    permuted = permute(chosen, op.first, len(gate_up))
    biases = placed.maybe(op.gate_up_bias, x.dtype), placed.maybe(op.down_bias, x.dtype)
    found = experts_mlp(dispatch(x, permuted), gate_up, down, permuted.bounds, op.act, biases)
    values.x = combine(found, permuted, weights)


def _keep(placed: Placed, values: Values) -> None:
    values.kept = values.x


def _join(placed: Placed, values: Values) -> None:
    assert values.kept is not None, "a Join comes after a Keep"
    values.x = values.x + values.kept


def _add(placed: Placed, values: Values) -> None:
    x = values.x if placed.op.scale == 1.0 else values.x * placed.op.scale
    values.residual = values.residual + x


_DEFINITIONS = {
    Norm: _norm,
    PostNorm: _post_norm,
    Residual: _residual,
    Projection: _projection,
    HeadNorm: _head_norm,
    Gate: _gate,
    Activation: _activation,
    Experts: _experts,
    Keep: _keep,
    Join: _join,
    Add: _add,
}
REFERENCE: Table = {(kind,): partial(partial, run) for kind, run in _DEFINITIONS.items()}
