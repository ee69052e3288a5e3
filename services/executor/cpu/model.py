"""The forward pass of the Llama family, in one file.

x = embedding[ids]
for each layer:  x += out(attention(rope(qkv(norm(x)))))   K and V go through the paged cache
                 x += mlp(norm(x))                       down(swiglu(gate_up)), or experts
logits = head(norm(x))                                      of the sampled rows only

On each of several ranks, `out` and `down` compute a part of a sum over the ranks, and `head` some of the
logits. A stage of a pipeline has some of the layers and receives x from the stage before.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.cpu_jit
from kernels.attention import attend_prefill
from kernels.norm import rms_norm
from kernels.rope import rope_table
from services.executor.checkpoint.config import Shapes
from services.executor.checkpoint.kv_cache import KvCache
from services.executor.checkpoint.loader import Loaded
from services.executor.checkpoint.partition import gathered_logits
from services.executor.cpu.batch import Batch
from services.executor.cpu.layers import BatchedLayers, Layer, Operators, TorchOperators, layer_of
from services.executor.cpu.linear import ROW_TILE, Products
from services.executor.parallel.coroutines import Collective, ForwardPass, run_alone
from services.executor.parallel.ranks import Ranks

log = logging.getLogger("headrace.executor")

RunInterleaved = Callable[[Sequence[ForwardPass]], list[Tensor]]


class Model:
    """A model on its device, for one thread in `torch.inference_mode`."""

    def __init__(self, loaded: Loaded, operators: Operators, *, deterministic: bool = False) -> None:
        """`deterministic`: on a CPU the bits of a row's logits do not depend on the other rows. Takes the
        layers out of `loaded.weights`."""
        shapes, weights, stage = loaded.shapes, loaded.weights, loaded.stage
        self._shapes, self._operators, self._ranks, self._stage = shapes, operators, loaded.ranks, stage
        self._embedding = weights.embedding
        self._norm = weights.norm
        device = weights.embedding.device
        products = Products(weights.embedding.dtype, device, deterministic=deterministic, int8=loaded.int8)
        self._head = products.linear(weights.head, dtype=torch.float32) if stage.last else None
        self._layers = [
            layer_of(weights.layers.pop(0), shapes, products, operators, deterministic=deterministic)
            for _ in range(shapes.layers)
        ]
        self._batched_layers = batched_layers(self._layers, shapes, weights.norm, operators, loaded.ranks)
        self._deterministic = deterministic
        self._products = products
        frequencies = torch.tensor(shapes.inverse_frequencies(), dtype=torch.float64)
        self._rotations = rope_table(frequencies, loaded.context).to(device)

    @torch.inference_mode()
    def compile_products(self, most_rows: int) -> None:
        """Compile the kernels of the products for up to `most_rows` rows, so that no step waits for them. One
        layer of each kind stands for all, since their shapes are the same."""
        kinds = {type(layer.mlp): layer for layer in self._layers}
        hidden = self._embedding.shape[1]
        for rows in self._products.kernel_sizes(most_rows):
            x = self._embedding.new_zeros(rows, hidden)
            for layer in kinds.values():
                layer.qkv(x)
                layer.out(x.new_zeros(rows, self._shapes.heads * self._shapes.head_dim))
                layer.mlp.compile(x)

    def forward(self, batch: Batch, kv: Tensor) -> Tensor | None:
        """Writes the KV of all rows. Returns the logits of the sampled rows, `[samples, vocab]` float32, or
        None on any stage but the last."""
        found = run_alone(self._forward_pass(batch, kv))
        if self._stage.last:
            return self._logits(found)
        self._stage.send(found)
        return None

    def forward_micro_batches(
        self, micro_batches: Sequence[Batch], order: Tensor, kv: Tensor, run_interleaved: RunInterleaved
    ) -> Tensor:
        """The same for a split step: its logits in the `order` of parallel/step_split.py."""
        found = run_interleaved([self._forward_pass(batch, kv) for batch in micro_batches])
        return self._logits(torch.cat(found)[order])

    def _forward_pass(self, batch: Batch, kv: Tensor) -> ForwardPass:
        """The head's input for the sampled rows; on any stage but the last, the next stage's input."""
        stage = self._stage
        rotation = self._rotations[batch.positions]
        if stage.first:
            residual = self._embedding[batch.ids]
        else:
            residual = stage.receive(self._embedding.new_empty(len(batch.ids), self._shapes.hidden))
        normed = rms_norm(residual, self._layers[0].attention_norm, self._shapes.norm_eps)
        if self._batched_layers is not None:
            normed, residual = self._batched_layers(normed, residual, rotation, batch, kv)
        else:
            normed, residual = yield from self._one_by_one(normed, residual, rotation, batch, kv)
        return normed[batch.sampled] if stage.last else residual

    def _one_by_one(
        self, normed: Tensor, residual: Tensor, rotation: Tensor, batch: Batch, kv: Tensor
    ) -> Generator[Collective, None, tuple[Tensor, Tensor]]:
        """See BatchedLayers."""
        eps, ranks, add_rms_norm = self._shapes.norm_eps, self._ranks, self._operators.add_rms_norm
        for i, layer in enumerate(self._layers):
            part = self._attention(i, layer, normed, rotation, batch, kv)
            if ranks.size > 1:
                yield functools.partial(ranks.all_reduce, part)
            normed, residual = add_rms_norm(part, residual, layer.mlp_norm, eps)
            last = i + 1 == len(self._layers)
            norm = self._norm if last else self._layers[i + 1].attention_norm
            part = layer.mlp(normed)
            if ranks.size > 1:
                yield functools.partial(ranks.all_reduce, part)
            normed, residual = add_rms_norm(part, residual, norm, eps)
        return normed, residual

    def _logits(self, chosen: Tensor) -> Tensor:
        assert self._head is not None, "only the last stage has it"
        samples = len(chosen)
        if self._deterministic:
            chosen = F.pad(chosen, (0, 0, 0, -samples % ROW_TILE))
        return gathered_logits(self._head(chosen)[:samples], self._shapes.vocab, self._ranks).float()

    def _attention(
        self, index: int, layer: Layer, x: Tensor, rotation: Tensor, batch: Batch, kv: Tensor
    ) -> Tensor:
        shapes, heads = self._shapes, self._shapes.heads
        each = layer.qkv(x).view(len(x), -1, shapes.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key, value = torch.split(each, [heads, shapes.kv_heads, shapes.kv_heads], 1)
            query = rms_norm(query, layer.q_norm, shapes.norm_eps)
            each = torch.cat((query, rms_norm(key, layer.k_norm, shapes.norm_eps), value), 1)
        query = self._operators.rotate_and_write(each, rotation, kv, batch.rows[index], heads)
        return layer.out(self._attend(index, query, batch, kv).view(len(x), -1))

    def _attend(self, index: int, query: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """Attention of every token row, in order: decode groups, chunks, zeros for padding."""
        segments = []
        for group in batch.decode:
            rows = query[group.first : group.first + len(group.tables)]
            segments.append(self._operators.attend_decode(rows, kv, index, group))
        for chunk in batch.prefill:
            rows = query[chunk.first : chunk.first + chunk.count]
            segments.append(attend_prefill(rows, kv, index, chunk.table, chunk.mask))
        if batch.padding:
            segments.append(query.new_zeros(batch.padding, *query.shape[1:]))
        return segments[0] if len(segments) == 1 else torch.cat(segments)


def operators_for(cache: KvCache, *, deterministic: bool) -> Operators:
    """The fastest operators that work on this cache."""
    on_cpu = cache.tensor.device.type == "cpu"
    if on_cpu and cache.activations == cache.tensor.dtype and not deterministic:
        if not kernels.cpu_jit.available():
            log.warning("no Numba: torch's operators compute attention and norms, several times slower")
            return TorchOperators()
        from services.executor.cpu.compiled import CompiledOperators, can_attend

        if can_attend(cache.tensor):
            return CompiledOperators()
    return TorchOperators(deterministic=deterministic)


def batched_layers(
    layers: Sequence[Layer], shapes: Shapes, norm: Tensor, kinds: Operators, ranks: Ranks
) -> BatchedLayers | None:
    """All layers as one call, if the kernels can; `norm` follows the last layer."""
    if not isinstance(kinds, TorchOperators) and ranks.size == 1:
        from services.executor.cpu.compiled import compiled_layers

        return compiled_layers(layers, shapes, norm)
    return None
