"""Logits processors are the extension point for custom sampling. See docs/design/processors.md.

A processor is a class of yours, loaded by name at start and built for each sequence that asks for it. It
sees a row of logits on the host before penalties, bias and sampling. Rows with one are *host-fed*: they are
computed again only after their result, so two halves of a batch take turns on the device and the host.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shared.errors import BadRequest, SetupError
from shared.messages import SlotOpen
from shared.processes import processor_targets

if TYPE_CHECKING:
    from torch import Tensor

MAX_WAIT_MS = 10_000
SIDE_BY_SIDE = 32  # rows whose processors wait at one time
MAX_WHY_BYTES = 160  # 256 of them fit in a result


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
    """Waits `ms` milliseconds a row and changes nothing: for tests and demonstrations of the host thread.
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
            "expected; see docs/design/processors.md"
        )
    make: MakeProcessor = found
    return make


@dataclass(frozen=True, slots=True)
class HostRow:
    """A sampled row for its slot's processors, which change `logits` `[vocab]` float32 in place. `tokens`
    are the sequence so far, with its prompt."""

    slot: int
    tokens: Sequence[int]
    logits: Tensor


@dataclass(slots=True)
class _Stage:
    """One processor of one slot."""

    name: str
    args: dict[str, Any]
    make: MakeProcessor | None
    processor: LogitsProcessor | None = None


@dataclass(frozen=True, slots=True)
class _Pipeline:
    prompt: Sequence[int]
    stages: tuple[_Stage, ...]
    waits: bool  # for something outside


class ProcessorPipelines:
    """The logits processors of open slots, and their run over the rows of a step.

    A slot's processors are built when its first row comes, on the host thread: what a constructor does must
    not stop the device. Whatever a plugin raises is that row's failure, said in words.

    Slots are opened and closed on the device thread while the host thread runs
    the rows of others: an entry is one slot's, and whoever changes a slot waits for its rows first."""

    def __init__(self, known: Mapping[str, MakeProcessor]) -> None:
        self._makers = known
        self._pipelines: dict[int, _Pipeline] = {}

    def open(self, opened: SlotOpen) -> None:
        """Take a slot's processors, if it has any."""
        self._pipelines.pop(opened.slot, None)
        if opened.processors:
            stages = tuple(self._stage(text) for text in opened.processors)
            waits = any(getattr(stage.make, "waits", False) for stage in stages)
            prompt = opened.tokens[: opened.prompt_tokens]
            self._pipelines[opened.slot] = _Pipeline(prompt, stages, waits)

    def close(self, slot: int) -> None:
        """Forget a slot. Closing an unknown slot does nothing."""
        self._pipelines.pop(slot, None)

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The indices of slots with processors."""
        return [i for i, slot in enumerate(slots) if slot in self._pipelines] if self._pipelines else []

    def run(
        self, rows: Sequence[HostRow], around: Callable[[], AbstractContextManager[object]]
    ) -> dict[int, str]:
        """Run the rows' processors, within what `around` makes for each thread that does. Returns why rows
        failed, by index; the logits of such a row mean nothing. Whether those of the others can be sampled
        from is for the caller to see, for all of them at once."""
        failures: dict[int, str] = {}
        waiting: deque[int] = deque()

        def run_row(i: int) -> None:
            with around():
                if why := _run(self._pipelines[rows[i].slot], rows[i]):
                    failures[i] = why

        for i, row in enumerate(rows):
            if self._pipelines[row.slot].waits:
                waiting.append(i)
            else:
                run_row(i)
        _side_by_side(waiting, run_row)
        return failures

    def with_row_errors(
        self, rows: Sequence[HostRow], failures: Mapping[int, str], sound: Sequence[bool]
    ) -> dict[int, str]:
        """`failures` of a run, and the rows whose logits were left without a finite largest one, in order."""
        found = dict(failures)
        for i, row in enumerate(rows):
            if not sound[i] and i not in found:
                names = ", ".join(stage.name for stage in self._pipelines[row.slot].stages)
                found[i] = _why(names, ValueError("it left NaN or infinity, or no token that may follow"))
        return dict(sorted(found.items()))

    def _stage(self, text: str) -> _Stage:
        try:
            asked = json.loads(text)
            name, args = str(asked["name"]), dict(asked["args"])
        except (ValueError, TypeError, LookupError, RecursionError):
            name, args = text[:40], {}  # no tokenizer sends that; its row says that it is unknown
        return _Stage(name, args, self._makers.get(name))


def _side_by_side(rows: deque[int], run_row: Callable[[int], None]) -> None:
    """Run rows that wait, on this thread and others. Those end with the step: a row that waits for ever must
    not keep the process from ending, as the threads of a pool would."""

    def work() -> None:
        while rows:
            try:
                row = rows.popleft()
            except IndexError:  # another thread was quicker
                return
            run_row(row)

    others = [
        threading.Thread(target=work, name="waiting-row", daemon=True)
        for _ in range(min(SIDE_BY_SIDE, len(rows)) - 1)
    ]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()


def _run(pipeline: _Pipeline, row: HostRow) -> str:
    """Empty, or why the row failed."""
    generated = row.tokens[len(pipeline.prompt) :]
    for stage in pipeline.stages:
        try:
            if stage.processor is None:
                stage.processor = _built(stage, pipeline.prompt)
            changed = stage.processor.process(generated, row.logits)
            if changed is not row.logits:
                _take(row.logits, changed)
        except BaseException as error:  # noqa: BLE001 - the sys.exit of a plugin must not end the engine
            return _why(stage.name, error)
    return ""


def _why(name: str, error: BaseException) -> str:
    return cut_why(f"logits processor {name}: {type(error).__name__}: {error}")


def cut_why(why: str) -> str:
    """Why a row failed, as short as MAX_WHY_BYTES."""
    return why.encode(errors="replace")[:MAX_WHY_BYTES].decode(errors="ignore")


def _built(stage: _Stage, prompt: Sequence[int]) -> LogitsProcessor:
    if stage.make is None:
        raise BadRequest("this executor has none of that name; add it to its setting logits_processors")
    return stage.make(dict(stage.args), prompt)


def _take(logits: Tensor, changed: Tensor) -> None:
    if getattr(changed, "shape", None) != logits.shape:
        shape = getattr(changed, "shape", type(changed).__name__)
        raise ValueError(f"it returned {shape!s:.40}, not a tensor of {tuple(logits.shape)}")
    logits.copy_(changed)
