"""The engine of encoders implements Backend, on a CPU or a GPU. The scheduler plans its texts like prompts.

A slot has its whole text when it is opened. The step that samples it computes it whole; the steps with chunks
before do nothing. So there are no KV blocks to read, to copy or to lose, and a hit in the prefix cache saves
nothing and harms nothing: block numbers are the scheduler's, without memory here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from services.executor import engine
from services.executor.checkpoint.config import pooling_of
from services.executor.checkpoint.loader import TorchOptions, device_of, sampled_digest, vocab_digests
from services.executor.checkpoint.stored import check_unchanged, states_of
from services.executor.checkpoint.weights import stored_hf
from services.executor.encoder.model import Encoder, is_encoder
from services.executor.sampling.sampler import vectors_of
from shared.errors import SetupError
from shared.kv_blocks import blocks_for
from shared.messages import SlotOpen, StepPlan, ints
from shared.processes import usable_threads

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
_NOT_FINITE = "the model computed a vector that is not finite"


class NoCopier:
    """See services.executor.engine.Copier: there are no blocks to copy."""

    piece_bytes = 1 << 20

    def attach(self, arena: engine.Arena, yield_device: engine.YieldDevice = engine.keep_device) -> None:
        return

    def detach(self) -> None:
        return

    def store(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        raise engine.ArenaError("an encoder has no KV blocks")

    load = store

    def finish(self) -> int:
        return 0


def of_model(folder: Path) -> Callable[[TorchOptions], EncoderBackend] | None:
    """What builds the engine of an encoder; None for any other model."""
    return build if is_encoder(folder) else None


def build(options: TorchOptions) -> EncoderBackend:
    """Load the model; takes seconds. Raises SetupError for options that cannot work."""
    return EncoderBackend(options)


class EncoderBackend:
    """See services.executor.engine.Backend. Made by `build`."""

    def __init__(self, options: TorchOptions) -> None:
        device = device_of(options.device)
        name = options.dtype if options.dtype != "auto" else "f32" if device.type == "cpu" else "bf16"
        if name not in _DTYPES or (name == "int8" and device.type != "cpu"):
            raise SetupError(f"dtype {name} is not for encoders on a {device.type}; use f32 or bf16")
        if options.kv_dtype != "auto" or options.dummy:
            raise SetupError("an encoder has no KV cache and no random weights: give the dtype alone")
        torch.set_num_threads(options.threads or usable_threads(1))
        files = states_of(options.model_path)
        self._model = Encoder(
            options.model_path,
            pooling_of(options.model_path, usual="pooling mean"),
            torch.empty(0, dtype=_DTYPES[name], device=device),
            kept_in="int8" if name == "int8" else "",
            deterministic=options.deterministic,
        )
        shapes = self._model.shapes
        if options.max_context > shapes.positions:
            raise SetupError(f"max_context {options.max_context} is over the model's {shapes.positions}")
        context = (options.max_context or shapes.positions) + 1  # the token that none generates has a place
        blocks = options.slots * blocks_for(context, options.block_tokens)
        facts = ("headrace-encoder-1", repr(shapes), name, str(options.deterministic))
        digest = sampled_digest(facts, stored_hf(options.model_path))
        vocab, tokens = vocab_digests(options)
        self.info = engine.BackendInfo(
            backend="torch",
            model=options.model_name,
            dtype=name,
            fingerprint=digest,
            vocab_digest=vocab,
            tokens_digest=tokens,
            vocab=shapes.vocab,
            blocks=options.blocks or blocks,
            block_tokens=options.block_tokens,
            bytes_per_block=0,
            slots=options.slots,
            max_step_tokens=options.max_step_tokens,
            max_context=context,
            model_digest=digest,
            weights=digest,
            memory_bytes=self._model.size_bytes,
            only_tier=True,
            hidden=shapes.hidden,
            generates=False,
        )
        check_unchanged(options.model_path, files)
        self._texts: dict[int, SlotOpen] = {}  # by slot
        self.copier = NoCopier()

    @torch.inference_mode()
    def warm_up(self) -> None:
        self._model.compile_products(min(engine.WARM_ROWS, self.info.max_step_tokens))
        self.vectors([[0] * min(engine.WARM_ROWS, self.info.max_context - 1)])

    def open_slot(self, opened: SlotOpen) -> None:
        self._texts[opened.slot] = opened

    def close_slot(self, slot: int) -> None:
        self._texts.pop(slot, None)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> engine.Pending:
        opened = [self._texts[slot] for slot in plan.sample_slots]
        if not opened:
            return engine.Pending(plan=plan)
        return engine.Pending(plan=plan, hidden=self.vectors([each.tokens for each in opened]))

    def sample(self, pending: engine.Pending) -> engine.StepOutput:
        slots, hidden = pending.plan.sample_slots, pending.hidden
        output = engine.StepOutput(ids=ints([0] * len(slots)), done=ints([1] * len(slots)))
        if hidden is None:
            return output
        finite = hidden.isfinite().all(1).tolist()
        for row, right in enumerate(finite):
            if not right:
                output.ids[row], output.done[row] = -1, 2
        asked = [(row, self._texts[slot].pooling) for row, slot in enumerate(slots)]
        wanted = [(row, numbers) for row, numbers in asked if numbers and finite[row]]
        errors = tuple((row, _NOT_FINITE) for row, right in enumerate(finite) if not right)
        return replace(output, vectors=vectors_of(hidden, wanted), row_errors=errors)

    def vectors(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The vectors `[texts, hidden]` of token ids, not yet of length 1, as a step computes them."""
        return self._model.vectors(texts)

    def reset(self) -> None:
        self._texts.clear()

    def close(self) -> None:
        self.reset()
        self.__dict__.pop("_model", None)  # frees the memory
