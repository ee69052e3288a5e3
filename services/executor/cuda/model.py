"""CudaModel is the forward pass of the Llama family on a GPU: services.executor.cpu.engine in fused kernels.

    residual = embedding[ids]
    for each layer:  qkv │ rotate, write KV │ attention │ out │ add, norm │ gate, up │ swiglu │ down │ add …
    with experts:    router │ route │ permute │ dispatch │ gate, up │ swiglu │ down │ combine │ add …

A product of few rows may return parts that the next kernel adds up (kernels.gemm.gpu). Nothing here reads the
device or depends on lengths, so a graph can capture a pass of given sizes. graph_runner.py calls it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.decode import DecodeWork, attend_decode, plan_decode
from kernels.attention.decode import Tuning as DecodeTuning
from kernels.attention.prefill import attend_prefill
from kernels.collectives.gpu import MappedBuffers, Norm, all_gather, all_reduce_add_rms_norm_
from kernels.elementwise import rope_table
from kernels.elementwise.gpu import (
    HeadNorms,
    RopeInputs,
    add_rms_norm_,
    rms_norm,
    rms_norm_fp8,
    rope_write,
    swiglu,
    swiglu_fp8,
)
from kernels.gemm.gpu import layout_of, matmul, matmul_fixed
from kernels.moe.gpu import combine, dispatch, experts_mlp, permute, route
from kernels.quantised import Fp8Rows, Int4Groups
from kernels.quantised import gpu as int4
from kernels.quantised.gpu import Int4Weight, quantise_rows, scaled_mm
from services.executor.checkpoint.loader import Loaded
from services.executor.checkpoint.stored import Stored
from services.executor.checkpoint.weights import gathered_logits
from services.executor.cuda.kernel_configs import DeviceTuning, Layouts
from services.executor.cuda.optioned import ForwardStep, Operand, OptionedPass, Products
from services.executor.model import description as d
from services.executor.model.description import Shapes
from services.executor.model.program import embedded, shaped
from services.executor.parallel.coroutines import AllReduces, Collective, ForwardPass, run_alone
from services.executor.parallel.ranks import DistributedRanks, Ranks, if_mapped
from services.executor.parallel.step_split import Chunk
from services.executor.parallel.symmetric_memory import SymmetricMemory
from shared.errors import SetupError
from shared.processes import usable_cores

log = logging.getLogger("headrace.executor")


# humming-kernels is missing, finds no compiler or headers, has no such layout, or is another version.
_LIBRARY_ERRORS = (
    ImportError, RuntimeError, OSError, ValueError, AssertionError, AttributeError, TypeError,
)  # fmt: skip


# The layers that CudaModel computes, but for a HeadNorm before Rope, and the weights that it reads.
_ATTENTION = (d.Norm, d.Projection, d.Rope, d.Attention, d.Projection, d.Add, d.Norm)
_COMPUTED = ((*_ATTENTION, d.Projection, d.Gate, d.Projection, d.Add), (*_ATTENTION, d.Experts, d.Add))
_READ = frozenset({
    "attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "mlp_norm", "router",
    "gate_up", "down",
})  # fmt: skip


def check_layers(layers: Iterable[d.Layer]) -> None:
    """Raises SetupError for a layer that CudaModel would compute wrongly: its order is written by hand."""
    for layer in layers:
        kinds = tuple(type(each) for each in layer if not isinstance(each, d.HeadNorm))
        others = {weight.name for each in layer for weight in d.weights_of(each)} - _READ
        if kinds not in _COMPUTED or others:
            names = ", ".join([*(type(each).__name__ for each in layer), *sorted(others)])
            raise SetupError(f"the GPU engine does not compute a layer of {names}; run it with device=cpu")


class CudaModel:
    """A model on its device, for one thread in `torch.inference_mode`."""

    def __init__(
        self,
        loaded: Loaded,
        works: Mapping[DecodeTuning, DecodeWork],
        tuning: DeviceTuning,
        most: int,
        adapters: Any = None,
    ) -> None:
        """`most`: sampled rows in a step; `adapters`: see services.executor.adapters.device_places. Raises
        SetupError for a model that it does not compute."""
        shapes, weights, kv = loaded.shapes, loaded.weights, loaded.cache.tensor
        if adapters is not None and (shapes.has_options or loaded.kept_in or loaded.ranks.size > 1):
            raise SetupError(
                "lora_places: on a GPU adapters run beside plain weights of a model of Llama's operations, "
                "on one GPU; use dtype bf16 or f32, or lora_places 0"
            )
        if not shapes.has_options:
            check_layers(d.describe(shapes).layers)
        self._shapes, self._kv, self._works, self._tuning = shapes, kv, works, tuning
        self._ranks, self._most, self.adapters = loaded.ranks, most, adapters
        self._last = loaded.stage.last
        self._shared: SharedLogits | None = None
        if isinstance(loaded.ranks, DistributedRanks) and loaded.ranks.symmetric is not None:
            self._shared = if_mapped(
                loaded.ranks,
                lambda: SharedLogits(loaded.ranks, weights.head.values, most, shapes.vocab),
                "NCCL gathers logits, and is slower",
            )
        self._embedding, self._norm = weights.embedding.values, weights.norm
        self._head = weights.head.values
        self._layers: list[dict[str, Any]] = []
        began_s = time.monotonic()
        if loaded.kept_in == "int4":
            build_kernels(weights.layers)
        while weights.layers:  # one by one: operands in 4 bits are copies
            layer = weights.layers.pop(0)
            self._layers.append({name: operand_of(stored) for name, stored in layer.items()})
        if loaded.kept_in == "int4":
            log.info("weights in 4 bits laid out, their kernels built: %.1f s", time.monotonic() - began_s)
        self._product = products_of(tuning, kv.device)
        frequencies = torch.tensor(shapes.inverse_frequencies(), dtype=torch.float64)
        self._rotations = rope_table(frequencies, loaded.context + 1, shapes.rope_gain).to(kv.device)
        self._optioned: OptionedPass | None = None
        if shapes.has_options:
            self._optioned = OptionedPass(loaded, self._layers, self._product, works, tuning)

    def tensors(self) -> Iterator[Tensor]:
        """The weights in the memory of the device. Tied ones occur twice."""
        yield from (self._embedding, self._norm, self._head)
        for layer in self._layers:
            for operand in layer.values():
                yield from (operand,) if isinstance(operand, Tensor) else operand.tensors

    def hidden(self, step: ForwardStep, out: Tensor | None = None, received: Tensor | None = None) -> Tensor:
        """The head's input for every token, `[tokens, hidden]`, in `out` if given; on any stage but the last,
        the next stage's input. Writes KV. `received`: the rows from the stage before, which are overwritten;
        None on the first stage."""
        return run_alone(self.forward_pass(step, out=out, received=received))

    def forward_pass(
        self,
        step: ForwardStep,
        sums: AllReduces | None = None,
        out: Tensor | None = None,
        received: Tensor | None = None,
    ) -> ForwardPass:
        """`hidden` as a ForwardPass. `sums` are given for a micro-batch: it then uses no other collectives,
        and another micro-batch may compute meanwhile."""
        eps, layers = self._shapes.norm_eps, self._layers
        residual = received
        if residual is None:
            residual = embedded(self._embedding.index_select(0, step.resolved.ids), self._shapes)
        if self._optioned is not None:
            return (yield from self._optioned.run(step, residual, sums, out))
        layouts = self._tuning.layouts_of(len(step.positions))
        if step.decode is not None:
            plan_decode(self._works[layouts.decode], step.decode)
        chained = layouts.chained
        slot_mapping, dtype = step.resolved.slot_mapping, self._embedding.dtype
        inputs = RopeInputs(self._rotations, step.positions, slot_mapping, chained, dtype)
        adding = _ResidualAdd(self._ranks, sums, residual, eps, chained=chained)
        first = rms_norm_fp8 if is_fp8(layers[0]["qkv"]) else rms_norm
        normed: Any = first(residual, layers[0]["attention_norm"], eps, chained=chained)
        for i, layer in enumerate(layers):
            attended = self._attention(i, layer, normed, inputs, step)
            part = self._projected(i, "out", attended, step, layer.get("out_bias"), whole=adding.whole)
            normed = yield from adding.add(part, layer["mlp_norm"], turn=0, fp8=is_fp8(layer["gate_up"]))
            end = i + 1 == len(layers)
            norm = self._norm if end else layers[i + 1]["attention_norm"]
            part = self._mlp(i, normed, adding, step, chained=chained)
            fp8, target = not end and is_fp8(layers[i + 1]["qkv"]), out if end and self._last else None
            normed = yield from adding.add(part, norm, turn=1, out=target, fp8=fp8)
        if self._last:
            assert isinstance(normed, Tensor), "the head is not in fp8"
            return normed
        return residual if out is None else out.copy_(residual)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits `[samples, vocab]` of the token rows `rows`."""
        own = self._product(hidden.index_select(0, rows), self._head, whole=True)
        if self._shared is not None and 0 < len(own) <= self._most:
            found = self._shared.gather(own)
        else:
            found = gathered_logits(own, self._shapes.vocab, self._ranks)
        return found if self._optioned is None else shaped(found.float(), self._shapes)

    def _attention(
        self, index: int, layer: Mapping[str, Any], x: Operand, inputs: RopeInputs, step: ForwardStep
    ) -> Tensor:
        shapes = self._shapes
        qkv = self._projected(index, "qkv", x, step, layer.get("qkv_bias"), whole=bool(step.dense))
        norms = HeadNorms(layer.get("q_norm"), layer.get("k_norm"), shapes.norm_eps)
        query = rope_write(qkv, inputs, norms, self._kv, index, shapes.heads)
        out = torch.empty_like(query)
        if step.decode is not None:
            rows = len(step.decode.lengths) * step.decode.queries
            work = self._works[self._tuning.layouts_of(len(x)).decode]
            attend_decode(query[:rows], self._kv, index, step.decode, work, out[:rows])
        if step.tiles is not None:
            attend_prefill(query, self._kv, index, step.tiles, self._tuning.prefill, out)
        for chunk in step.dense:
            _attend_dense(query, qkv, chunk, self._shapes, out)
        return out.view(len(x), -1)

    def _projected(
        self, index: int, name: str, x: Any, step: ForwardStep, bias: Tensor | None = None, *, whole: bool
    ) -> Tensor:
        """A product of a layer, with what adapters add in a step with some."""
        weight = self._layers[index][name]
        if step.slots is None:
            return self._product(x, weight, bias, whole=whole)
        out = self._product(x, weight, bias, whole=True)
        self.adapters.add(name, index, x, out, step.slots)
        return out

    def _mlp(self, index: int, x: Any, adding: _ResidualAdd, step: ForwardStep, *, chained: bool) -> Tensor:
        layer = self._layers[index]
        if step.slots is not None and "router" not in layer:
            both = self._projected(index, "gate_up", x, step, whole=True)
            gated_rows = swiglu(both, x.dtype, chained=chained)
            return self._projected(index, "down", gated_rows, step, whole=adding.whole)
        if "router" not in layer:
            gate_up, fp8 = layer["gate_up"], is_fp8(layer["down"])
            wide = gated(self._product, self._tuning.layouts_of(len(x)), x, gate_up, chained=chained, fp8=fp8)
            return self._product(wide, layer["down"], whole=adding.whole)
        shapes = self._shapes.experts
        assert shapes is not None, "a router comes with experts"
        logits = self._product(x, layer["router"], whole=True)
        weights, chosen = route(logits, shapes.per_token, renormalise=shapes.renormalise)
        permuted = permute(chosen, shapes.first, len(layer["gate_up"]))  # other ranks' experts add nothing
        found = experts_mlp(dispatch(x, permuted), layer["gate_up"], layer["down"], permuted.bounds)
        return combine(found, permuted, weights)


def operand_of(stored: Stored) -> Operand:
    """A weight as the products take it. Raises SetupError for one in 4 bits whose kernels cannot be built."""
    operand: Operand | Int4Groups = stored.operand
    if not isinstance(operand, Int4Groups):
        return operand
    try:
        return int4.prepare(operand, stored.shape[0] if len(stored.shape) == 3 else 0)
    except _LIBRARY_ERRORS as error:
        raise SetupError(
            f"humming-kernels cannot multiply weights in 4 bits here ({type(error).__name__}: {error}); "
            "check its install (pip install 'headrace[int4]', CUDA's headers), or use dtype fp8 or bf16"
        ) from error


def build_kernels(layers: Iterable[Mapping[str, Stored]]) -> None:
    """Build the kernels of all shapes of matrices in 4 bits at once, one on each core: those of one shape
    alone occupy all cores only at first, and each takes most of a GiB. Raises SetupError as `operand_of`."""
    firsts: dict[tuple[object, ...], Stored] = {}
    for stored in (stored for layer in layers for stored in layer.values()):
        matrix = stored.operand
        if isinstance(matrix, Int4Groups):
            kind = stored.shape, matrix.group, matrix.bits, matrix.e2m1, matrix.zeros is None
            firsts.setdefault(kind, stored)
    log.info("building the kernels of %d shapes of matrices in 4 bits, once for a machine …", len(firsts))
    count = max(1, len(firsts))
    with int4.building(int(usable_cores()) // count), ThreadPoolExecutor(count) as pool:
        list(pool.map(operand_of, firsts.values()))


def is_fp8(weight: Operand) -> bool:
    """Whether products of a weight take fp8 rows."""
    return isinstance(weight, Fp8Rows)


class _ResidualAdd:
    """Adds the sum of all ranks' parts to a pass's residual, and norms it."""

    def __init__(
        self, ranks: Ranks, sums: AllReduces | None, residual: Tensor, eps: float, *, chained: bool
    ) -> None:
        rows, row_bytes = len(residual), residual.shape[1] * residual.element_size()
        # Not for micro-batches: two passes must not use the buffers at once.
        buffers = ranks.symmetric if isinstance(ranks, DistributedRanks) and sums is None else None
        self._buffers: MappedBuffers | None = (
            buffers.for_rows(rows, row_bytes) if buffers is not None else None
        )
        self._sums: AllReduces = ranks if sums is None else sums
        self._residual, self._eps, self._chained = residual, eps, chained
        self.whole = ranks.size > 1 and self._buffers is None  # products must not return splits

    def add(
        self, part: Tensor, weight: Tensor, *, turn: int, out: Tensor | None = None, fp8: bool = False
    ) -> Generator[Collective, None, Any]:
        """See kernels.elementwise; `fp8`: as fp8 rows where a kernel can. `turn` alternates between 0 and 1;
        the last call of a pass has 1."""
        buffers, residual, eps, chained = self._buffers, self._residual, self._eps, self._chained
        if buffers is not None:
            return all_reduce_add_rms_norm_(part, residual, Norm(weight, eps, chained), buffers, turn, out)
        if self.whole:
            yield functools.partial(self._sums.all_reduce, part)
        if fp8:
            return rms_norm_fp8(part, weight, eps, residual, chained=chained)
        return add_rms_norm_(part, residual, weight, eps, out, chained=chained)


def _attend_dense(query: Tensor, qkv: Tensor, chunk: Chunk, shapes: Shapes, out: Tensor) -> None:
    """Attend a chunk that starts its sequence by cuDNN, on the joined q, k, v. With an fp8 cache it reads K
    and V before they are rounded; later tokens read the cache."""
    rows = slice(chunk.first, chunk.first + chunk.count)
    joined = qkv[rows].view(chunk.count, -1, shapes.head_dim)
    key, value = torch.split(joined[:, shapes.heads :], shapes.kv_heads, 1)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query[rows], key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out[rows] = found[0].transpose(0, 1)


def products_of(tuning: DeviceTuning, device: torch.device) -> Products:
    """The products of an engine on this device, by its tuning."""
    if tuning.by_row:
        return _by_row(tuning, torch.cuda.get_device_properties(device).multi_processor_count)
    return _tuned(tuning)


def gated(
    product: Products, layouts: Layouts, x: Any, gate_up: Operand, *, chained: bool, fp8: bool = False
) -> Operand:
    """`silu(gate) * up` of the joined product, in one kernel if its layout is `gated`. `fp8`: as fp8 rows if
    the weight is in fp8, too."""
    plain = isinstance(gate_up, Tensor)
    if not isinstance(gate_up, Int4Weight):
        if not plain and isinstance(x, Tensor):
            x = quantise_rows(x, chained=chained)
        chosen = layouts.product(len(gate_up), gate_up.shape[1], len(x), fp8=not plain)
        if chosen is not None and chosen.gated and (not plain or x.dtype == torch.bfloat16):
            wide = matmul(x, gate_up, chosen)
            return quantise_rows(wide, chained=chained) if fp8 else wide
    wide = product(x, gate_up, whole=not plain)
    if fp8:
        return swiglu_fp8(wide, chained=chained)
    return swiglu(wide, x.dtype if plain else None, chained=chained)


def _tuned(tuning: DeviceTuning) -> Products:
    """The library's product, or our kernel where that is faster."""

    def product(x: Any, weight: Any, bias: Tensor | None = None, *, whole: bool = False) -> Tensor:
        if isinstance(weight, Int4Weight):
            return int4.product(x, weight, bias)
        rows, fp8 = len(x), isinstance(weight, Fp8Rows)
        layouts = tuning.layouts_of(rows)
        chosen = layouts.product(weight.shape[0], weight.shape[1], rows, fp8=fp8)
        if chosen is not None and chosen.gated:  # for `gated` alone: it returns no product
            chosen = None
        split = chosen is not None and whole and chosen.splits > 1
        if fp8 and isinstance(x, Tensor):
            x = quantise_rows(x, chained=layouts.chained)
        if chosen is None or split or bias is not None or not (fp8 or x.dtype == torch.bfloat16):
            return scaled_mm(x, weight, bias) if fp8 else F.linear(x, weight, bias)
        return matmul(x, weight, chosen)

    return product


def _by_row(tuning: DeviceTuning, processors: int) -> Products:
    """Products in which a row's bits depend on neither the number of rows nor its index."""

    def product(x: Any, weight: Any, bias: Tensor | None = None, *, whole: bool = False) -> Tensor:
        return matmul_fixed(x, weight, bias, layout_of(len(x), weight.shape[0], processors, tuning.fixed))

    return product


class SharedLogits:
    """Gathers logits of several GPUs: each rank stores the logits of its part of the vocabulary to the memory
    of all ranks. It uses no NVLink multicast.

    The memory holds `[rows, vocab]` on every rank, and the next `gather` of any rank overwrites it. This is
    safe: after the readers of one gather, all ranks meet in a sum of the next step before the next gather."""

    def __init__(self, ranks: Ranks, like: Tensor, rows: int, vocab: int) -> None:
        """For logits of the dtype and device of `like`; all ranks create it at once. Raises torch's errors if
        GPUs cannot map each other's memory."""
        self._memory = SymmetricMemory(rows * vocab * like.element_size(), like.device)
        self._rank, self._vocab, self._dtype = ranks.rank, vocab, like.dtype
        one = torch.Size([1])
        addresses = [self._memory.view(rank, one, like.dtype).data_ptr() for rank in range(ranks.size)]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=like.device)

    def gather(self, own: Tensor) -> Tensor:
        """Logits `[rows, vocab]` from every rank's `[rows, head_rows]`, without the padding at the end."""
        all_gather(own, self._addresses, self._rank, self._vocab)
        self._memory.barrier()
        return self._memory.view(self._rank, torch.Size([len(own), self._vocab]), self._dtype)
