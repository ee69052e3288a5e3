"""OptionedPass is the forward pass on a GPU of a model that computes something beside Llama's.

The description's operations run one after the other, by the table of this engine (model/program.py):
products, rotation, attention, experts and norms in the kernels of CudaModel, the others in torch. Products
return no splits, and no launch is chained to one of another operation, so this is slower than CudaModel at
few rows.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.attention.decode import DecodeRows, DecodeWork, attend_decode, plan_decode, windowed
from kernels.attention.decode import Tuning as DecodeTuning
from kernels.attention.prefill import PrefillTiles, attend_prefill
from kernels.elementwise import ref as elementwise
from kernels.elementwise.gpu import (
    HeadNorms,
    Resolved,
    RopeInputs,
    add_rms_norm_,
    rms_norm,
    rope_write,
    swiglu,
)
from kernels.moe.gpu import combine, dispatch, experts_mlp, grouped, permute, route
from kernels.quantised import Fp8Rows
from kernels.quantised.gpu import Int4Weight
from services.executor.checkpoint.loader import Loaded
from services.executor.checkpoint.stored import Dense
from services.executor.cuda.kernel_configs import DeviceTuning
from services.executor.model import description as d
from services.executor.model.program import (
    REFERENCE,
    Placed,
    Step,
    Table,
    placed,
    rotations,
    routed,
    run,
    scoring_of,
    steps_of,
)
from services.executor.parallel.coroutines import AllReduces, Collective
from services.executor.parallel.step_split import Chunk

Operand = Tensor | Fp8Rows | Int4Weight  # of a product


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """The inputs of a pass. Decode rows come first among the token rows."""

    resolved: Resolved
    positions: Tensor  # [tokens] int32
    decode: DecodeRows | None
    tiles: PrefillTiles | None
    dense: tuple[Chunk, ...] = ()  # chunks that start their sequence, for cuDNN
    slots: Tensor | None = None  # [tokens] int32, of a step with adapters


class Products(Protocol):
    """Matrix products with the weights: the fastest for the number of rows, or the same bits for any number.

    `x @ weight.T + bias` of `x` `[rows, inner]` and `weight` `[width, inner]`, as `[rows, width]`; unless
    `whole`, it may be `[splits, rows, width]` float32, which the reader adds up. A weight in fp8 takes fp8
    rows, and quantises plain ones; one in 4 bits takes plain ones."""

    def __call__(
        self, x: Operand, weight: Operand, bias: Tensor | None = None, *, whole: bool = False
    ) -> Tensor: ...


@dataclass(slots=True)
class _Values:
    """See services.executor.model.program.Values; and the inputs of a step."""

    x: Any
    residual: Tensor
    step: ForwardStep
    ropes: list[RopeInputs]  # by table of Shapes.rope_tables
    works: Mapping[int, DecodeWork]  # by window
    kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Operand:
    """A weight in the place of a Stored, as products take it."""

    operand: Any

    @property
    def values(self) -> Tensor:
        return Dense.of(self.operand).values


class OptionedPass:
    """See services.executor.cuda.model.CudaModel, which calls it."""

    def __init__(
        self,
        loaded: Loaded,
        layers: list[dict[str, Any]],
        product: Products,
        works: Mapping[DecodeTuning, DecodeWork],
        tuning: DeviceTuning,
    ) -> None:
        """`layers`: the weights as products take them."""
        shapes, device = loaded.shapes, loaded.cache.tensor.device
        self._shapes, self._ranks, self._last = shapes, loaded.ranks, loaded.stage.last
        self._kv, self._product, self._tuning = loaded.cache.tensor, product, tuning
        norms = {name: _Operand(stored.values) for name, stored in loaded.weights.norms.items()}
        weights = [{name: _Operand(each) for name, each in layer.items()} for layer in layers]
        self._steps = steps_of(placed(d.describe(shapes), weights, norms), self._table(), REFERENCE)
        self._tables = rotations(shapes, loaded.context + 1, device)
        windows = {shapes.window_of(layer) for layer in range(shapes.layers)}
        plain = {each: replace(work, tuning=replace(each, chained=False)) for each, work in works.items()}
        self._by_window = {
            each: {window: windowed(work) for window in windows} for each, work in plain.items()
        }

    def run(
        self, step: ForwardStep, residual: Tensor, sums: AllReduces | None, out: Tensor | None
    ) -> Generator[Collective, None, Tensor]:
        """See CudaModel.forward_pass; `residual`: the rows of the embedding, or those received."""
        works = self._by_window[self._tuning.layouts_of(len(step.positions)).decode]
        if step.decode is not None:
            for window, work in works.items():
                plan_decode(work, step.decode, window)
        rows, dtype = step.resolved.slot_mapping, residual.dtype
        ropes = [RopeInputs(table, step.positions, rows, False, dtype) for table in self._tables]
        values = _Values(residual, residual, step, ropes, works)
        yield from run(self._steps, values, self._ranks if sums is None else sums, self._ranks.size)
        found: Tensor = values.x if self._last else values.residual
        return found if out is None else out.copy_(found)

    def _table(self) -> Table:
        shapes = self._shapes

        def projection(placed: Placed) -> Step:
            op = placed.op
            weight = placed.weights[op.weight.name].operand
            bias = None if op.bias is None else placed.dense(op.bias)

            def step(values: _Values) -> None:
                values.x = self._product(values.x, weight, bias, whole=True)

            return step

        def attention(*parts: Placed) -> Step | None:
            *norms, rope, attend = parts
            if any(each.op.centred or each.op.whole for each in norms):
                return None
            by_head = HeadNorms(None, None, shapes.norm_eps)
            for each in norms:
                by_head = HeadNorms(each.dense(each.op.query), each.dense(each.op.key), each.op.eps)
            return partial(self._attend, attend, rope.op.table, by_head, scoring_of(attend))

        def norm(placed: Placed) -> Step | None:
            if placed.op.centred:
                return None
            weight, eps = placed.dense(placed.op.weight), placed.op.eps

            def step(values: _Values) -> None:
                values.x = rms_norm(values.residual, weight, eps)

            return step

        def post_norm(placed: Placed) -> Step:
            weight, eps = placed.dense(placed.op.weight), placed.op.eps

            def step(values: _Values) -> None:
                values.x = rms_norm(values.x, weight, eps)

            return step

        def add_norm(add: Placed, norm: Placed) -> Step | None:
            if add.op.scale != 1.0 or norm.op.centred:
                return None
            weight, eps = norm.dense(norm.op.weight), norm.op.eps

            def step(values: _Values) -> None:
                values.x = add_rms_norm_(values.x, values.residual, weight, eps)

            return step

        def gate(placed: Placed) -> Step | None:
            if placed.op.act != d.SILU:
                return None

            def step(values: _Values) -> None:
                values.x = swiglu(values.x)

            return step

        return {
            (d.Projection,): projection,
            (d.Rope, d.Attention): attention,
            (d.HeadNorm, d.Rope, d.Attention): attention,
            (d.Norm,): norm,
            (d.PostNorm,): post_norm,
            (d.Add, d.Norm): add_norm,
            (d.Gate,): gate,
            (d.Experts,): lambda placed: partial(self._experts, placed),
            **{(kind,): REFERENCE[kind,] for kind in (d.HeadNorm, d.Residual, d.Keep, d.Join, d.Add)},
        }

    def _attend(self, attention: Placed, table: int, norms: HeadNorms, scoring: Any, values: _Values) -> None:
        step, op, layer = values.step, attention.op, attention.layer
        query = rope_write(values.x, values.ropes[table], norms, self._kv, layer, op.heads)
        out = torch.empty_like(query)
        if step.decode is not None:
            rows = len(step.decode.lengths) * step.decode.queries
            work = values.works[op.window]
            attend_decode(query[:rows], self._kv, layer, step.decode, work, out[:rows], scoring)
        if step.tiles is not None:
            attend_prefill(query, self._kv, layer, step.tiles, self._tuning.prefill, out, scoring)
        values.x = out.view(len(query), -1)

    def _experts(self, placed: Placed, values: _Values) -> None:
        op, x = placed.op, values.x
        gate_up, down, router = (
            placed.weights[each.name].operand for each in (op.gate_up, op.down, op.router)
        )
        logits = self._product(x, router, whole=True)
        if op.routing is None and op.router_bias is None:
            weights, chosen = route(logits, op.per_token, renormalise=op.renormalise)
        else:
            weights, chosen = routed(op, logits.float(), placed.maybe(op.router_bias, torch.float32))
        permuted = permute(chosen, op.first, len(gate_up))  # other ranks' experts add nothing
        rows, bounds = dispatch(x, permuted), permuted.bounds
        if op.act == d.SILU and op.gate_up_bias is None:
            found = experts_mlp(rows, gate_up, down, bounds)
        else:
            at = torch.arange(len(rows), device=x.device)
            expert = torch.searchsorted(bounds[1:], at, right=True).clamp_(max=len(gate_up) - 1)

            def product(inner: Tensor, weight: Any, bias: d.Weight | None) -> Tensor:
                wide = grouped(inner, weight, bounds)
                return wide if bias is None else wide + placed.dense(bias)[expert]

            wide = elementwise.swiglu(product(rows, gate_up, op.gate_up_bias), op.act)
            found = product(wide, down, op.down_bias)
        values.x = combine(found, permuted, weights)
