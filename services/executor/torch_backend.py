"""The torch engine behind the Backend protocol: weights, paged KV, slots, forward pass and sampler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.executor.backend import BackendInfo, Copier, Pending, StepOutput
from services.executor.batch import BatchBuilder
from services.executor.cuda_copies import CudaCopier
from services.executor.fingerprint import fingerprint
from services.executor.host_copies import HostCopier
from services.executor.host_rows import HostRows
from services.executor.kv_cache import KvCache, allocate, block_bytes, fitting_blocks
from services.executor.logprobs import logprobs
from services.executor.model import Model
from services.executor.processors import MakeProcessor
from services.executor.sampler import Sampler
from services.executor.shapes import Shapes
from services.executor.slots import Slots
from services.executor.warm_up import warm_up_steps
from services.executor.weights import Weights
from services.executor.weights_gguf import load_gguf
from services.executor.weights_hf import load_hf
from shared.blocks import blocks_for
from shared.errors import EngineError, SetupError
from shared.messages import SlotOpen, StepPlan, ints
from shared.model_files import ModelFiles
from shared.vocabulary import load_vocabulary

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """What to serve and how. Zeros and "auto" are worked out at start."""

    model_path: Path  # a .gguf file, or a folder with config.json and *.safetensors
    model_name: str
    dtype: str = "auto"  # bf16, f32; auto: f32 on a CPU, bf16 on a GPU
    device: str = "auto"  # cpu, cuda; auto: cuda where there is one
    blocks: int = 0  # 0: from the free memory, 1 GiB on a CPU
    block_tokens: int = 16
    slots: int = 64
    max_step_tokens: int = 256
    max_context: int = 0  # 0: the model's
    threads: int = 0  # 0: the cores
    deterministic: bool = False  # on a CPU: a row's logits do not depend on its batch
    processors: Mapping[str, MakeProcessor] = field(default_factory=dict)  # by the names requests give


def build(options: TorchOptions) -> TorchBackend:
    """Load the model and allocate the cache; takes seconds. Raises SetupError for what cannot work."""
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for each context length: 82 ms a step, not 4
    if options.model_path.suffix == ".gguf":
        shapes, weights = load_gguf(options.model_path, dtype, device)
    else:
        shapes, weights = load_hf(options.model_path, dtype, device)
    wanted = _context_tokens(shapes, options.max_context)
    size = block_bytes(shapes, options.block_tokens, dtype)
    blocks = options.blocks or fitting_blocks(
        size, device, options.slots * blocks_for(wanted, options.block_tokens)
    )
    context = min(wanted, blocks * options.block_tokens)
    if context < options.max_context:
        raise SetupError(
            f"{blocks} KV blocks of {options.block_tokens} tokens hold no sequence of {options.max_context}; "
            "raise kv_blocks or lower max_context"
        )
    cache = allocate(shapes, blocks, options.block_tokens, dtype, device)
    return TorchBackend(options, shapes, weights, cache, context)


class TorchBackend:
    """See services.executor.backend.Backend. Made by `build`."""

    def __init__(
        self, options: TorchOptions, shapes: Shapes, weights: Weights, cache: KvCache, context: int
    ) -> None:
        device, exact = weights.embedding.device, options.deterministic
        self._cache = cache
        digest = fingerprint(options.model_name, shapes, weights, cache.block_tokens)
        self._model = Model(shapes, weights, context, deterministic=exact)
        self._slots = Slots(
            options.slots, blocks_for(context, cache.block_tokens), cache.spare, context, device
        )
        self._sampler = Sampler(options.slots, shapes.vocab, device, deterministic=exact)
        self._batches = BatchBuilder(self._slots, cache, deterministic=exact)
        self._host_rows = HostRows(options.processors, device)
        self._asked: dict[int, int] = {}  # logprobs by slot
        self._computed: torch.cuda.Event | None = None  # the newest forward's end, on a GPU
        on_gpu = device.type == "cuda"
        self._copier: Copier = CudaCopier(cache, lambda: self._computed) if on_gpu else HostCopier(cache)
        self._info = BackendInfo(
            backend="torch",
            model=options.model_name,
            dtype="bf16" if cache.tensor.dtype == torch.bfloat16 else "f32",
            fingerprint=digest,
            vocab_digest=_vocab_digest(options),
            vocab=shapes.vocab,
            blocks=cache.blocks,
            block_tokens=cache.block_tokens,
            bytes_per_block=cache.bytes_per_block,
            slots=options.slots,
            max_step_tokens=options.max_step_tokens,
            max_context=context,
        )

    @property
    def info(self) -> BackendInfo:
        return self._info

    def warm_up(self) -> None:
        for opened, plans in warm_up_steps(self._info):
            self.open_slot(opened)
            for plan in plans:
                self.sample(self.forward(plan))
        self.reset()

    def open_slot(self, opened: SlotOpen) -> None:
        self._slots.open(opened)
        self._sampler.open(opened)
        self._host_rows.open(opened)
        self._asked[opened.slot] = opened.logprobs

    def close_slot(self, slot: int) -> None:
        self._slots.close(slot)
        self._sampler.close(slot)
        self._host_rows.close(slot)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Pending:
        self._slots.apply_tables(plan)
        self._cache.copy(plan.copy_from, plan.copy_to)
        if not plan.slots:
            return Pending(plan=plan, forwarded=self._host_rows.forwarded())
        batch = self._batches.build(plan)
        logits = self._model.forward(batch, self._cache.tensor)
        forwarded = self._host_rows.forwarded()
        return Pending(plan=plan, logits=logits, padding_rows=batch.padding, forwarded=forwarded)

    @torch.inference_mode()
    def sample(self, pending: Pending) -> StepOutput:
        plan, logits, slots = pending.plan, pending.logits, list(pending.plan.sample_slots)
        self._computed = pending.forwarded
        if not slots:
            return StepOutput(ids=ints(), done=ints(), padding_rows=pending.padding_rows)
        if logits is None or len(logits) != len(slots):
            raise EngineError(f"step {plan.step} samples rows that its forward pass did not compute")
        positions = [plan.starts[row] + plan.counts[row] for row in plan.sample_rows]
        with self._host_rows.beside(pending.forwarded):
            processed = self._host_rows.process(logits, slots, self._slots.tokens)
            self._slots.end([slots[row] for row in processed.failures])
            chosen = self._sampler.choose(processed.logits, slots, positions)
            ids, done = self._slots.advance(slots, chosen, positions)
            found = logprobs(logits, chosen, [self._asked[slot] for slot in slots])
        return StepOutput(
            ids=ids,
            done=done,
            padding_rows=pending.padding_rows,
            logprobs=found.chosen,
            top_counts=found.top_counts,
            top_ids=found.top_ids,
            top_logprobs=found.top_values,
            host_us=processed.host_us,
            row_errors=tuple(processed.failures.items()),
        )

    def copier(self) -> Copier:
        return self._copier

    def reset(self) -> None:
        for slot in range(self._info.slots):
            self.close_slot(slot)
        self._computed = self._host_rows.forwarded()

    def close(self) -> None:
        for name in ("_model", "_cache", "_batches", "_slots", "_sampler", "_host_rows", "_copier"):
            self.__dict__.pop(name, None)  # the memory goes with the last reference


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "device is cuda, but torch sees no GPU; install a CUDA build of torch or use device cpu"
        )
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise SetupError(f"dtype {name!r} is not supported; use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _context_tokens(shapes: Shapes, asked: int) -> int:
    """The longest sequence: what is asked for, at most what the model can do without a sliding window."""
    most, why = shapes.max_context, "its context"
    if 0 < shapes.sliding_window < most:
        most, why = shapes.sliding_window, "its attention window, and sliding windows are not supported"
    if asked > most:
        raise SetupError(f"max_context {asked} is over {most} tokens, {why}; lower max_context")
    return asked or most


def _vocab_digest(options: TorchOptions) -> str:
    path = options.model_path
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        return "none"  # weights alone: nobody can send it text
    return load_vocabulary(ModelFiles(options.model_name, path)).digest
