"""The operations of a model on a CPU: products, attention, experts, and the operators between them.

cpu/engine.py runs them. The operators are torch's here, compiled in cpu/compiled.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import Scoring, attend_decode, attend_prefill, write_kv
from kernels.elementwise import add_rms_norm, apply_rope, swiglu, swiglu_by_row
from services.executor.checkpoint.stored import Dense
from services.executor.cpu.batch import Batch, MakeSequences
from services.executor.cpu.linear import ROW_TILE, Linear, Products
from services.executor.model import description
from services.executor.model.program import REFERENCE, Placed, Step, Table, Values, routed, scoring_of


@dataclass(slots=True)
class StepValues:
    """See services.executor.model.program.Values; and the inputs of a step."""

    x: Tensor
    residual: Tensor
    rotations: Sequence[Tensor]  # of the step's positions, by table (Shapes.rope_tables)
    batch: Batch
    kv: Tensor
    kept: Tensor | None = None
    logits: Tensor | None = None  # of all rows, where the layers' call computes them, too


class Operators(Protocol):
    """A layer's operators between its matrix products, on a CPU; kernels/*/ref.py defines them. Our compiled
    kernels need one pass where torch needs several, and attention reads the blocks in place: 2 to 8 times
    faster. Torch's operators stay for KV in fp8, odd head sizes, and without Numba."""

    @property
    def sequences(self) -> MakeSequences | None:
        """Makes what `attend` needs to take all rows at once; None: it takes groups and chunks."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """May put the sum into `residual`."""

    def swiglu(self, gate_up: Tensor, act: str = ...) -> Tensor: ...

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        """Rotate the queries and keys of `x` `[tokens, heads + 2 * kv_heads, head_dim]` (queries, keys,
        values), store keys and values at `rows` `[K|V, tokens]` as `write_kv`, and return the queries."""

    def attend(self, query: Tensor, kv: Tensor, layer: int, batch: Batch, scoring: Scoring) -> Tensor:
        """Attention of every token row of a batch: the shape of `query`."""

    def at_once(self, steps: Sequence[Step], layers: int, head: Linear | None) -> Step | None:
        """The steps of all layers as one call, which may compute the logits, too; None: there is none."""


class TorchOperators:
    """Torch's operators. With `deterministic` a row's result does not depend on the other rows."""

    sequences = None
    add_rms_norm = staticmethod(add_rms_norm)

    def __init__(self, *, deterministic: bool = False) -> None:
        self.swiglu = swiglu_by_row if deterministic else swiglu

    def rotate_and_write(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Tensor, heads: int) -> Tensor:
        kv_heads = (x.shape[1] - heads) // 2
        rotated = apply_rope(x[:, : heads + kv_heads], rotation)
        query, key = torch.split(rotated, [heads, kv_heads], 1)
        write_kv(kv, rows, key, x[:, heads + kv_heads :])
        return query

    def attend(self, query: Tensor, kv: Tensor, layer: int, batch: Batch, scoring: Scoring) -> Tensor:
        segments = []  # of every token row, in order: decode groups, chunks, zeros for padding
        for group in batch.decode:
            rows = query[group.first : group.first + len(group.tables)]
            segments.append(attend_decode(rows, kv, layer, group.tables, group.mask, scoring))
        for chunk in batch.prefill:
            rows = query[chunk.first : chunk.first + chunk.count]
            segments.append(attend_prefill(rows, kv, layer, chunk.table, chunk.mask, scoring))
        if batch.padding:
            segments.append(query.new_zeros(batch.padding, *query.shape[1:]))
        return segments[0] if len(segments) == 1 else torch.cat(segments)

    def at_once(self, steps: Sequence[Step], layers: int, head: Linear | None) -> None:
        """There is none."""


# The matrices, beside the head, whose inputs keep 16 bits with `packed8`: two fifths of a layer's work, and
# most of the error (docs/guides/accuracy.md). A few inputs of `down` are far larger than their neighbours.
_SENSITIVE = ("qkv", "down")


# What torch computes as fast, or seldom.
_IN_TORCH = (
    description.Norm, description.HeadNorm, description.PostNorm, description.Residual,
    description.Activation, description.Keep, description.Join, description.Add,
)  # fmt: skip


def table(products: Products, operators: Operators, *, deterministic: bool, adapters: Any = None) -> Table:
    """What this engine takes. With `deterministic` a row's result does not depend on the other rows.
    `adapters`: those of its slots, see services.executor.adapters.places."""

    def projection(placed: Placed) -> Product:
        bias = placed.op.bias
        added = None if bias is None else placed.dense(bias)
        name = placed.op.weight.name
        adapted = None if adapters is None else adapters.product(placed.op.weight)
        linear = products.linear(placed.weights[name], added, sensitive=name in _SENSITIVE)
        return Product(linear, adapted, placed.layer)

    def add_norm(add: Placed, norm: Placed) -> AddNorm | None:
        if add.op.scale != 1.0 or norm.op.centred:
            return None
        return AddNorm(operators, norm.dense(norm.op.weight), norm.op.eps)

    def attention(rope: Placed, attention: Placed) -> Attend:
        return Attend(operators, attention.op, attention.layer, rope.op.table, scoring_of(attention))

    def experts(placed: Placed) -> _Experts:
        return _Experts(placed, products, operators, ROW_TILE if deterministic else 1)

    return {
        (description.Projection,): projection,
        (description.Rope, description.Attention): attention,
        (description.Gate,): lambda placed: Gated(operators, placed.op.act),
        (description.Experts,): experts,
        **{(kind,): REFERENCE[kind,] for kind in _IN_TORCH},
        (description.Add, description.Norm): add_norm,
    }


@dataclass(frozen=True, slots=True)
class Product:
    """Keeps its matrix in a format of its own; the plain one is freed."""

    linear: Linear
    adapted: Any = None  # what adapters add to it
    layer: int = 0

    def __call__(self, values: StepValues) -> None:
        x = values.x
        values.x = self.linear(x)
        if self.adapted is not None and values.batch.adapted is not None:
            self.adapted.add(x, values.x, values.batch.adapted, self.layer)


@dataclass(frozen=True, slots=True)
class AddNorm:
    operators: Operators
    weight: Tensor
    eps: float

    def __call__(self, values: Values) -> None:
        found = self.operators.add_rms_norm(values.x, values.residual, self.weight, self.eps)
        values.x, values.residual = found


@dataclass(frozen=True, slots=True)
class Gated:
    operators: Operators
    act: str = description.SILU

    def __call__(self, values: Values) -> None:
        values.x = self.operators.swiglu(values.x, self.act)


@dataclass(frozen=True, slots=True)
class Attend:
    """The rotation, the write of K and V, and attention."""

    operators: Operators
    op: Any  # Attention
    layer: int
    table: int
    scoring: Scoring

    def __call__(self, values: StepValues) -> None:
        tokens, batch, kv, layer = len(values.x), values.batch, values.kv, self.layer
        each = values.x.view(tokens, -1, self.op.dim)
        rows = batch.rows[layer]
        query = self.operators.rotate_and_write(each, values.rotations[self.table], kv, rows, self.op.heads)
        values.x = self.operators.attend(query, kv, layer, batch, self.scoring).reshape(tokens, -1)


class _Experts:
    """Computes this rank's experts that have tokens, in order: a token's sum has one order in any batch. With
    several ranks the result is this rank's part of the sum."""

    def __init__(self, placed: Placed, products: Products, operators: Operators, tile: int) -> None:
        """Rows are padded to multiples of `tile`."""
        self._op, self._gate, self._tile = placed.op, operators.swiglu, tile
        op, count = placed.op, len(placed.dense(placed.op.gate_up))
        self._router = products.linear(placed.weights[op.router.name])
        self._router_bias = placed.maybe(op.router_bias, torch.float32)

        def linears(weight: Any, bias: Any) -> list[Linear]:
            biases = [None] * count if bias is None else list(placed.dense(bias))
            return list(map(products.linear, map(Dense.of, placed.dense(weight)), biases))

        first, second = linears(op.gate_up, op.gate_up_bias), linears(op.down, op.down_bias)
        self._experts = list(zip(first, second, strict=True))

    def __call__(self, values: Values) -> None:
        x, op = values.x, self._op
        weights, chosen = routed(op, self._router(x).float(), self._router_bias)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        here = range(op.first, op.first + len(self._experts))
        for expert in sorted({*chosen.flatten().tolist()}.intersection(here)):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            padded = F.pad(x[rows], (0, 0, 0, -len(rows) % self._tile))
            gate_up, down = self._experts[expert - op.first]
            found = down(self._gate(gate_up(padded), op.act))[: len(rows)].float()
            out[rows] += found * weights[rows, slots, None]
        values.x = out.to(x.dtype)
