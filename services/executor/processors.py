"""Logits processors: the extension point for custom sampling. See docs/processors.md.

A processor is a class of yours, loaded by name at start and built for each sequence that asks for it. It
sees a row of logits on the host before penalties, bias and sampling. Rows with one are *host-fed*: they are
computed again only after their result, so two halves of a batch take turns on the device and the host.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shared.errors import SetupError
from shared.plugins import processor_targets

if TYPE_CHECKING:
    from torch import Tensor

MAX_WAIT_MS = 10_000


class LogitsProcessor(Protocol):
    """One for each sequence and request entry. Called on the host thread of the executor, once a row; an
    error ends the request that it belongs to, and no other."""

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        """The logits to sample from: `logits` `[vocab]`, float32, on the CPU, changed in place or not, or
        another tensor of that shape. At least one must be finite, none may be NaN or +inf; -inf forbids a
        token. `generated` are the sequence's tokens after its prompt."""


# Called with the request's `args` and the prompt's tokens. A class attribute `waits = True` says that
# `process` waits for something outside rather than computes: rows then wait side by side, on other threads.
MakeProcessor = Callable[[dict[str, Any], Sequence[int]], LogitsProcessor]


class Wait:
    """Waits `ms` milliseconds a row and changes nothing: for tests and demonstrations of the host lane.
    Without `ms` a simulated engine takes the `host_row` of its setting `sim`."""

    waits = True

    def __init__(self, args: dict[str, Any], prompt_tokens: Sequence[int]) -> None:
        ms = args.get("ms")
        if ms is not None and (type(ms) not in (int, float) or not 0 <= ms <= MAX_WAIT_MS):
            raise ValueError(f"`ms`: a number from 0 to {MAX_WAIT_MS} is expected, not {ms!r:.40}")
        self.ms: float | None = ms

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        time.sleep((self.ms or 0.0) / 1e3)
        return logits


def load_processors(setting: str) -> Mapping[str, MakeProcessor]:
    """The processors of the setting `logits_processors`, imported. Raises SetupError."""
    return {name: _load(name, target) for name, target in processor_targets(setting).items()}


def _load(name: str, target: str) -> MakeProcessor:
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise SetupError(
            f"logits_processors: {name}={target} cannot be loaded: {type(error).__name__}: {error!s:.300}; "
            "install the module where the executor runs, or take it out of the setting"
        ) from error
    if not callable(found) or (isinstance(found, type) and not callable(getattr(found, "process", None))):
        raise SetupError(
            f"logits_processors: {name}={target} is no logits processor: a class with a method `process` is "
            "expected; see docs/processors.md"
        )
    make: MakeProcessor = found
    return make
