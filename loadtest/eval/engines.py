"""The engines under comparison: the settings of this machine, each with its own changes.

An engine is written as its changes, `bf16,device=cuda`; a first word without `=` is the dtype. The dtype
`llama.cpp` is llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.executor.build import engine_builder
from shared.config import load
from shared.errors import BadRequest, SetupError
from shared.kv_blocks import blocks_for
from shared.vocab.files import resolve

if TYPE_CHECKING:
    from loadtest.eval.llama_cpp import LlamaCpp
    from services.executor.engine import Backend


SIDE_BY_SIDE = 8  # windows that a decoding engine takes at once


@dataclass(frozen=True, slots=True)
class Arm:
    """An engine to be built."""

    name: str
    changes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, text: str) -> Arm:
        """From `dtype,setting=value,...`. Raises BadRequest."""
        first, *others = text.split(",")
        parts = [first if "=" in first else f"dtype={first}", *others]
        pairs = [(name, value) for name, _, value in (part.partition("=") for part in parts)]
        if not all(name and value for name, value in pairs):
            raise BadRequest(f"an engine is written as DTYPE,SETTING=VALUE,..., not {text!r}")
        return cls(text, tuple(pairs))

    def open(self, model: str, context: int) -> Backend | LlamaCpp:
        """The engine, or llama.cpp if that is the dtype. Raises SetupError as `build`, and as LlamaCpp."""
        changes = {"model": model, **dict(self.changes)}
        if changes.get("dtype") != "llama.cpp":
            return self.build(model, context)
        from loadtest.eval.llama_cpp import LlamaCpp

        settings = load(flags={"model": changes["model"] or None}).settings
        return LlamaCpp(resolve(settings.model, settings.cache_dir).path, context)

    def build(self, model: str, context: int) -> Backend:
        """The engine, warmed up, with room for windows of `context` tokens. Raises SetupError for settings
        that do not exist or cannot work."""
        flags: dict[str, Any] = {
            "model": model or None,
            "slots": SIDE_BY_SIDE,
            "step_tokens": context,
            "max_context": context,
            **dict(self.changes),
        }
        settings = load(flags=flags).settings
        if settings.backend == "sim":
            raise SetupError("the simulated engine has no logits: choose backend torch or dummy")
        blocks = SIDE_BY_SIDE * blocks_for(context, settings.block_tokens)
        engine = engine_builder(settings.model_copy(update={"kv_blocks": blocks}))()
        engine.warm_up()
        return engine
