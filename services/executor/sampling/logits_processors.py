"""Logits processors are the extension point for custom sampling. See docs/design/processors.md.

A processor is a class of the operator, loaded by name at start and built for each sequence that requests it.
It changes a row of logits on the host before penalties, bias and sampling. Rows with a processor are
*host-fed*: their next step starts after their result, so the two halves of two_batch take turns on the device
and the host.
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
from typing import TYPE_CHECKING, Any

from services.executor.engine import HostRow, LogitsProcessor, MakeProcessor, cut_why
from shared.errors import BadRequest, SetupError
from shared.messages import SlotOpen
from shared.processes import processor_targets

if TYPE_CHECKING:
    from torch import Tensor

MAX_WAIT_MS = 10_000
SIDE_BY_SIDE = 32  # rows with waiting processors that run at once


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
    waits: bool  # see MakeProcessor


class ProcessorPipelines:
    """The logits processors of open slots.

    A slot's processors are built at its first row, on the host thread: a slow constructor must not stop the
    device. Any exception of a plugin fails that row. The device thread opens and closes slots while the host
    thread runs rows of other slots; it waits for a slot's rows before it changes the slot."""

    def __init__(self, known: Mapping[str, MakeProcessor]) -> None:
        self._makers = known
        self._pipelines: dict[int, _Pipeline] = {}

    def open(self, opened: SlotOpen) -> None:
        """Take over a slot's processors, if it has any."""
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
        """Run the rows' processors, each row within a context `around()` on its thread. Returns why rows
        failed, by index; the logits of a failed row mean nothing. The caller checks that the other logits are
        finite, for all rows at once."""
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
        """`failures` of a run plus the rows that are not `sound` (their largest logit is not finite), in
        order."""
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
            name, args = text[:40], {}  # no tokenizer sends this; the row fails with an unknown processor
        return _Stage(name, args, self._makers.get(name))


def _side_by_side(rows: deque[int], run_row: Callable[[int], None]) -> None:
    """Run waiting rows on this and other threads. The others are daemons of this step: the threads of a pool
    would keep the process alive while a row waits for ever."""

    def work() -> None:
        while rows:
            try:
                row = rows.popleft()
            except IndexError:  # another thread took the last row
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
    """Why the row failed, or empty."""
    generated = row.tokens[len(pipeline.prompt) :]
    for stage in pipeline.stages:
        try:
            if stage.processor is None:
                stage.processor = _built(stage, pipeline.prompt)
            changed = stage.processor.process(generated, row.logits)
            if changed is not row.logits:
                _copy_changed(row.logits, changed)
        except BaseException as error:  # noqa: BLE001 - the sys.exit of a plugin must not end the engine
            return _why(stage.name, error)
    return ""


def _why(name: str, error: BaseException) -> str:
    return cut_why(f"logits processor {name}: {type(error).__name__}: {error}")


def _built(stage: _Stage, prompt: Sequence[int]) -> LogitsProcessor:
    if stage.make is None:
        raise BadRequest("this executor has none of that name; add it to its setting logits_processors")
    return stage.make(dict(stage.args), prompt)


def _copy_changed(logits: Tensor, changed: Tensor) -> None:
    if getattr(changed, "shape", None) != logits.shape:
        shape = getattr(changed, "shape", type(changed).__name__)
        raise ValueError(f"it returned {shape!s:.40}, not a tensor of {tuple(logits.shape)}")
    logits.copy_(changed)
