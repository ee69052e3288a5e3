"""The forward pass on a CPU: the embedding, the steps of a model's description, the head of the sampled rows.

On each of several ranks the head computes some of the logits. A stage of a pipeline has some of the layers
and receives the residual from the stage before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.cpu_jit
from kernels.attention import FP8
from kernels.rope import rope_table
from services.executor.checkpoint.kv_cache import KvCache
from services.executor.checkpoint.loader import Loaded
from services.executor.checkpoint.partition import gathered_logits
from services.executor.checkpoint.stored import Dense
from services.executor.cpu.batch import Batch
from services.executor.cpu.layers import Operators, StepValues, TorchOperators, table
from services.executor.cpu.linear import ROW_TILE, Products
from services.executor.model.description import describe
from services.executor.model.program import Step, placed, run, steps_of
from services.executor.model.reference import REFERENCE
from services.executor.parallel.coroutines import ForwardPass, run_alone

log = logging.getLogger("headrace.executor")

RunInterleaved = Callable[[Sequence[ForwardPass]], list[Tensor]]


class Model:
    """A model on its device, for one thread in `torch.inference_mode`."""

    def __init__(self, loaded: Loaded, operators: Operators, *, deterministic: bool = False) -> None:
        """`deterministic`: on a CPU the bits of a row's logits do not depend on the other rows. Takes the
        layers out of `loaded.weights`."""
        shapes, weights, stage = loaded.shapes, loaded.weights, loaded.stage
        self._shapes, self._ranks, self._stage = shapes, loaded.ranks, stage
        self._like, device = weights.norm, weights.norm.device
        products = Products(weights.norm.dtype, device, deterministic=deterministic, kept_in=loaded.kept_in)
        self._head = None
        if stage.last:
            self._head = products.linear(weights.head, dtype=torch.float32, sensitive=True)
        operations = placed(describe(shapes), weights.layers, Dense.of(weights.norm))
        takes = table(products, operators, deterministic=deterministic)
        self._steps = steps_of(operations, takes, REFERENCE)
        self._at_once: Step | None = None  # all steps but the first norm in one call, if the kernels can
        if not isinstance(operators, TorchOperators) and loaded.ranks.size == 1:
            from services.executor.cpu.compiled import at_once

            self._at_once = at_once([step for step, _ in self._steps[1:]], shapes.layers, self._head)
        self._embedding = weights.embedding.for_rows()
        self._deterministic = deterministic
        self._products = products
        frequencies = torch.tensor(shapes.inverse_frequencies(), dtype=torch.float64)
        self._rotations = rope_table(frequencies, loaded.context, shapes.rope_gain).to(device)

    def compile_products(self, most_rows: int) -> None:
        """Compile the kernels of the products for up to `most_rows` rows, so that no step waits for them."""
        self._products.compile(most_rows, self._like)

    def forward(self, batch: Batch, kv: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Writes the KV of all rows. Returns the logits of the sampled rows, `[samples, vocab]` float32, and
        their hidden states, `[samples, hidden]`; None on any stage but the last."""
        values = self._inputs(batch, kv)
        x = run_alone(self._layers(values))
        if not self._stage.last:
            self._stage.send(values.residual.clone())  # while it is sent, the next step overwrites it
            return None, None
        found = x[batch.sampled]
        return self._logits(found) if values.logits is None else values.logits, found

    def forward_micro_batches(
        self, micro_batches: Sequence[Batch], order: Tensor, kv: Tensor, run_interleaved: RunInterleaved
    ) -> tuple[Tensor, Tensor]:
        """The same for a split step, in the `order` of parallel/step_split.py."""
        computed = run_interleaved([self._layers(self._inputs(batch, kv)) for batch in micro_batches])
        rows = [x[batch.sampled] for x, batch in zip(computed, micro_batches, strict=True)]
        found = torch.cat(rows)[order]
        return self._logits(found), found

    def _inputs(self, batch: Batch, kv: Tensor) -> StepValues:
        """The embedding of the tokens, or what the stage before has computed."""
        if self._stage.first:
            residual = self._embedding.rows(batch.ids).values
        else:
            residual = self._stage.receive(self._like.new_empty(len(batch.ids), self._shapes.hidden))
        return StepValues(residual, residual, self._rotations[batch.positions], batch, kv)

    def _layers(self, values: StepValues) -> ForwardPass:
        """The head's input for all rows."""
        if self._at_once is not None:
            self._steps[0][0](values)
            self._at_once(values)
        else:
            yield from run(self._steps, values, self._ranks, self._ranks.size)
        return values.x

    def _logits(self, chosen: Tensor) -> Tensor:
        assert self._head is not None, "only the last stage has it"
        samples = len(chosen)
        if self._deterministic:
            chosen = F.pad(chosen, (0, 0, 0, -samples % ROW_TILE))
        return gathered_logits(self._head(chosen)[:samples], self._shapes.vocab, self._ranks).float()


def operators_for(cache: KvCache, *, deterministic: bool) -> Operators:
    """The fastest operators that work on this cache."""
    on_cpu = cache.tensor.device.type == "cpu"
    if on_cpu and cache.tensor.dtype != FP8:  # no kernel here reads fp8
        if not kernels.cpu_jit.available():
            log.warning("no Numba: torch's operators compute attention and norms, several times slower")
            return TorchOperators(deterministic=deterministic)
        from services.executor.cpu.compiled import CompiledOperators, can_attend

        if can_attend(cache.tensor, cache.activations):
            return CompiledOperators()
    return TorchOperators(deterministic=deterministic)
