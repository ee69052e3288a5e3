"""Replays a log and compares: every command and every hash must be equal."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from loadtest.simulator.replay.compare import differences
from services.scheduler.core import Scheduler
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import LogError, freeze, restore, state_hash
from services.scheduler.state.requests import Send
from services.scheduler.state.state import State

MAX_SHOWN = 20  # commands of the event that differs


@dataclass(slots=True)
class Difference:
    """The first thing that came out otherwise."""

    what: str  # commands, state, failure
    event: int  # number in the log; for a state: after it
    at_us: int  # since the beginning of the log
    expected: str  # digest in the log
    got: str
    equal_until: int  # the last event whose hash was compared and equal
    details: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What a rerun found."""

    facts: dict[str, Any] = field(default_factory=dict)
    first_event: int = 0
    events: int = 0
    commands: int = 0
    hashes: int = 0
    snapshots: int = 0
    virtual_us: int = 0
    wall_us: int = 0
    difference: Difference | None = None

    @property
    def body(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def rerun_file(path: Path, *, last_only: bool = False) -> Report:
    """Rerun the log in a file, all of it or from its last snapshot on. Raises LogError."""
    with open_log(path) as stream:
        if last_only:
            stream.seek(event_log.stretches(stream)[-1])
        return rerun(event_log.read(stream))


def open_log(path: Path) -> BinaryIO:
    """A log to read. Raises LogError when it is not there, or empty."""
    try:
        stream = path.open("rb")
        if not stream.read(1):
            raise LogError(f"{path} is empty: no event was recorded, or it is still in the recorder's buffer")
        stream.seek(0, io.SEEK_SET)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None
    return stream


def core_of(data: bytes) -> Scheduler:
    """A scheduler as it was at a snapshot. Raises FreezeError."""
    state = restore(data)
    core = Scheduler(state.limits)
    core.state = state
    return core


def rerun(records: Iterable[event_log.Record]) -> Report:
    """Recompute every command and hash until the first difference. Raises LogError for a log without a
    snapshot."""
    run = _Rerun()
    started = time.perf_counter_ns()
    for record in records:
        if run.advance(record):
            break
    run.report.wall_us = (time.perf_counter_ns() - started) // 1000
    if run.core is None:
        raise LogError("the log has no whole snapshot, or is none: nothing can be computed from it")
    return run.report


class _Rerun:
    def __init__(self) -> None:
        self.report = Report()
        self.core: Scheduler | None = None
        self._began_us = -1
        self._number = self._now_us = self._equal_until = 0

    def advance(self, record: event_log.Record) -> bool:
        """True when nothing more is to be learnt."""
        match record:
            case event_log.Header(facts):
                self.report.facts = dict(facts)
            case event_log.Snapshot(number, data):
                return self._snapshot(number, data)
            case event_log.LoggedEvent() if self.core is not None:
                return self._happened(self.core, record)
            case event_log.StateHash(number, digest) if (
                self.core is not None and self.report.difference is None
            ):
                self.report.hashes += 1
                self._compare_state(self.core.state, digest)
        return False

    def _snapshot(self, number: int, data: bytes) -> bool:
        """The first one is the start; a later one shows which part of the state differs."""
        self.report.snapshots += 1
        if self.core is None:
            self.core, self._number, self._equal_until = core_of(data), number, number
            self.report.first_event = number + 1
            return False
        there = restore(data)
        if self.report.difference is None and not self._compare_state(self.core.state, state_hash(there)):
            return False
        if (difference := self.report.difference) is not None:
            difference.details += differences(freeze(there), freeze(self.core.state))
        return True

    def _happened(self, core: Scheduler, record: event_log.LoggedEvent) -> bool:
        if self._began_us < 0:
            self._began_us = record.now_us
        self._number, self._now_us = record.number, record.now_us
        try:
            commands = core.handle(record.event, record.now_us)
        except Exception as error:  # noqa: BLE001 - the core may have failed then as it does now
            self._differs("failure", record.digest, b"", [f"{type(record.event).__name__}: {error!r}"])
            return True
        if self.report.difference is not None:
            return False  # on to a snapshot that shows where the states differ
        self.report.events += 1
        self.report.commands += len(commands)
        self.report.virtual_us = record.now_us - self._began_us
        if (digest := event_log.digest_of(commands)) == record.digest:
            return False
        details = [f"event {record.event!r:.300}", *map(_shown, commands[:MAX_SHOWN])]
        self._differs("commands", record.digest, digest, details)
        return True

    def _compare_state(self, state: State, expected: bytes) -> bool:
        """True when the state differs."""
        if (got := state_hash(state)) == expected:
            self._equal_until = self._number
            return False
        self._differs("state", expected, got, [])
        return True

    def _differs(self, what: str, expected: bytes, got: bytes, details: list[str]) -> None:
        self.report.difference = Difference(
            what=what,
            event=self._number,
            at_us=self._now_us - max(self._began_us, 0),
            expected=expected.hex(),
            got=got.hex(),
            equal_until=self._equal_until,
            details=details,
        )


def _shown(command: Send) -> str:
    return f"command to {command.to}: {command.message!r:.300}"
