"""HostRows applies logits processors and grammars to the rows of a step. The torch engines call it.

Rows with processors are copied to the host, processed and copied back. Then grammars forbid tokens: in the
kernel that chooses, by masks (`write_masks`), or after the choice by rejection (`choose`).

On a GPU a step's sampling must not queue after the next step's forward. So an event marks the end of each
forward, and sampling runs on a second stream after that event. This holds for steps without such rows, too:
the host thread may sample them when the next forward is queued already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.engine import HostRow, MakeProcessor, ReportGrammar, ignore_grammar_news
from services.executor.sampling.sampler import Sampler
from shared.messages import ROW_REFUSED, SlotOpen
from shared.vocab.vocabulary import Vocabulary

GRAMMARS = {  # the kind of Grammars that an engine has
    "llguidance": "services.executor.sampling.grammar_matchers:CompiledGrammars",
}
PROCESSORS = {  # what runs the logits processors of slots
    "python": "services.executor.sampling.logits_processors:ProcessorPipelines",
}
_NO_GRAMMARS = f"{ROW_REFUSED}this engine follows no grammar: ask one that does"
Tokens = Callable[[int], Sequence[int]]  # a slot's tokens so far
# Logits or ids by row, us on the host, and why rows failed, by index: what these rows have means nothing.
HostWork = tuple[Tensor, int, dict[int, str]]


class Grammars:
    """The grammars of open slots, of an engine that follows none: their rows fail. `build_grammars` makes
    those that are followed, with the same methods. `open` and `close` are for the device thread, the rest
    for the thread that samples."""

    def __init__(self) -> None:
        self._rows: dict[int, Any] = {}  # what a slot with a grammar has here

    def open(self, opened: SlotOpen) -> None:
        """Take over a slot's grammar, if it has one."""
        self.close(opened.slot)
        if opened.grammar:
            self._rows[opened.slot] = None

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""
        self._rows.pop(slot, None)

    def end(self) -> None:
        """End the compilations."""

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The indices of slots with a grammar."""
        return [i for i, slot in enumerate(slots) if slot in self._rows] if self._rows else []

    def write_masks(
        self, masks: NDArray[np.int32], places: dict[int, int], slots: Sequence[int], tokens: Tokens
    ) -> dict[int, str]:
        """Write which tokens may follow in row i of `places`, a bit each, to `masks[places[i]]`; `masks` is
        `[*, words]`, with at least a bit for each token. The masks of rows that failed or have ended allow
        all. Returns why rows failed, by index."""
        masks[[*places.values()]] = -1
        return dict.fromkeys(places, _NO_GRAMMARS)

    def forced(self, tokens: Tokens, slot: int, most: int) -> Sequence[int]:
        """At most so many tokens that a slot's grammar hardly leaves open, after its `tokens`. For a thread
        that no other one samples the slot beside."""
        return ()

    def choose(
        self, sampler: Sampler, logits: Tensor, slots: list[int], positions: list[int], tokens: Tokens
    ) -> HostWork:
        """Like Sampler.choose, within the slots' grammars."""
        failures = dict.fromkeys(self.rows_of(slots), _NO_GRAMMARS)
        return sampler.choose(logits, slots, positions), 0, failures


def build_grammars(
    load: Callable[[], Vocabulary], vocab: int, report: ReportGrammar = ignore_grammar_news
) -> Grammars:
    """The grammars of an engine, of the kind in GRAMMARS. `vocab` is the width of the logits. `report` is
    called on any thread when the compilation for an open slot has ended."""
    for kind in map(resolve_name, GRAMMARS.values()):
        return kind(load, vocab, report)  # type: ignore[no-any-return]  # found by its name
    return Grammars()


class HostRows:
    """The processors and grammars of open slots. `open`, `close` and `forwarded` are for the device thread,
    the rest for the host thread."""

    def __init__(self, known: Mapping[str, MakeProcessor], grammars: Grammars, device: torch.device) -> None:
        self._pipelines = resolve_name(PROCESSORS["python"])(known)
        self._grammars = grammars
        self._stream: torch.cuda.Stream | None = None
        self._marks = device.type == "cuda"
        if device.type == "cuda" and known:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no annotations in torch

    def open(self, opened: SlotOpen) -> None:
        """Take over a slot's processors and grammar, if it has any."""
        self._pipelines.open(opened)
        self._grammars.open(opened)

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""
        self._pipelines.close(slot)
        self._grammars.close(slot)

    def end(self) -> None:
        """End the compilation of grammars."""
        self._grammars.end()

    def forwarded(self) -> torch.cuda.Event | None:
        """Mark the end of a forward, on a GPU. Copies of its blocks also wait for the event."""
        if not self._marks:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # no annotations in torch
        event.record()
        return event

    def overlapping(self, forwarded: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """The context to sample in: on the second stream, after that forward."""
        if forwarded is None or self._stream is None:
            return nullcontext()
        self._stream.wait_event(forwarded)
        return torch.cuda.stream(self._stream)

    def process(
        self, logits: Tensor, slots: Sequence[int], tokens: Tokens, masks: NDArray[np.int32]
    ) -> HostWork:
        """Run the processors of the rows and write the masks of their slots; `tokens` returns a slot's tokens
        so far. Row i belongs to `slots[i]`. `logits` stays unchanged."""
        processed, host_us, failures = self._through_processors(logits, slots, tokens)
        more_us, failed = self.write_masks(slots, tokens, masks)
        return processed, host_us + more_us, {**failures, **failed}

    def has_work(self, slots: Sequence[int]) -> bool:
        """Whether a slot of these has a processor or a grammar."""
        return bool(self._pipelines.rows_of(slots) or self._grammars.rows_of(slots))

    def has_grammar(self, slots: Sequence[int]) -> bool:
        """Whether a slot of these has a grammar."""
        return bool(self._grammars.rows_of(slots))

    def forced(self, tokens: Tokens, slot: int, most: int) -> Sequence[int]:
        """See Grammars.forced."""
        return self._grammars.forced(tokens, slot, most)

    def write_masks(
        self, slots: Sequence[int], tokens: Tokens, masks: NDArray[np.int32]
    ) -> tuple[int, dict[int, str]]:
        """Write what may follow in slots with a grammar to their rows of `masks` `[slots, words]`. Returns
        the time in us, and why rows failed, by index."""
        rows = self._grammars.rows_of(slots)
        if not rows:
            return 0, {}
        began_ns = time.monotonic_ns()
        failures = self._grammars.write_masks(masks, {row: slots[row] for row in rows}, slots, tokens)
        return (time.monotonic_ns() - began_ns) // 1000, failures

    def choose(
        self, sampler: Sampler, logits: Tensor, slots: list[int], positions: list[int], tokens: Tokens
    ) -> HostWork:
        """Run the processors, then choose a token for each row within the grammars."""
        processed, host_us, failures = self._through_processors(logits, slots, tokens)
        ids, more_us, failed = self._grammars.choose(sampler, processed, slots, positions, tokens)
        return ids, host_us + more_us, {**failures, **failed}

    def _through_processors(self, logits: Tensor, slots: Sequence[int], tokens: Tokens) -> HostWork:
        rows = self._pipelines.rows_of(slots)
        if not rows:
            return logits, 0, {}
        at = torch.tensor(rows, device=logits.device)
        host = self._to_host(logits[at])
        began_ns = time.monotonic_ns()
        hosted = [HostRow(slots[row], tokens(slots[row]), host[k]) for k, row in enumerate(rows)]
        failed = self._pipelines.run(hosted, torch.inference_mode)
        host_us = (time.monotonic_ns() - began_ns) // 1000
        back = host.to(logits.device, non_blocking=True)
        failed = self._pipelines.with_row_errors(hosted, failed, back.amax(-1).isfinite().tolist())
        for k in failed:
            back[k] = 0  # the token drawn from it is not used
        changed = logits.clone()
        changed[at] = back
        return changed, host_us, {rows[k]: why for k, why in failed.items()}

    def _to_host(self, logits: Tensor) -> Tensor:
        """A copy, pinned if the logits are on a GPU. Measured on an H200, 256 rows of 128,256 logits, both
        ways and sampling: 7 to 9 ms; through pageable memory 139 ms (one run)."""
        if self._stream is None:
            return logits.cpu()
        return torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True).copy_(logits)
