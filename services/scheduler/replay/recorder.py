"""Records what a scheduler is told and what it answers. Stands where the core stands.

A record is written when its event has been handled; one that the core fails on is kept as well, since it
is the one that somebody will ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from services.scheduler.core import Scheduler
from services.scheduler.events import Event, Send
from services.scheduler.replay import log
from services.scheduler.replay.freeze import snapshot, state_hash
from services.scheduler.state import State

HASH_EVERY = 1_000  # events, and as many for each sequence that is held:
HASH_EVERY_PER_SEQUENCE = (
    10  # the hash of a state takes about 90 us for each, so that it costs 10 us an event
)
SNAPSHOT_EVERY = 100_000  # events


class Sink(Protocol):
    """Where the bytes of a log go."""

    def begin(self) -> None:
        """What is written next can be read without what came before."""

    def write(self, data: bytes, now_us: int) -> None:
        """Take whole frames. Does not wait."""

    def flush(self, now_us: int) -> None:
        """Pass on what has waited long enough."""

    def close(self) -> None:
        """Pass on everything."""


class Recorder:
    """A core with a log."""

    def __init__(self, core: Scheduler, sink: Sink, facts: Mapping[str, Any]) -> None:
        self._core = core
        self._sink = sink
        self._facts = facts
        self._events = 0
        self._hashed = 0  # events until the last hash
        self._begun = False

    @property
    def state(self) -> State:
        """Of the core."""
        return self._core.state

    @property
    def idle(self) -> bool:
        """As the core's."""
        return self._core.idle

    def handle(self, event: Event, now_us: int) -> list[Send]:
        """As the core's."""
        if not self._begun:
            self.begin(now_us)
        commands: list[Send] = []
        try:
            commands = self._core.handle(event, now_us)
        finally:
            self._events += 1
            self._sink.write(log.happened(now_us, event, commands), now_us)
        if self._events - self._hashed >= HASH_EVERY + HASH_EVERY_PER_SEQUENCE * len(self.state.sequences):
            self._hashed = self._events
            self._sink.write(log.state_hash(self._events, state_hash(self.state)), now_us)
        if self._events % SNAPSHOT_EVERY == 0:
            self.begin(now_us)
        return commands

    def begin(self, now_us: int) -> None:
        """Begin a stretch: a header and a snapshot, from which a reader who has just come can go on."""
        self._begun = True
        self._sink.begin()
        self._sink.write(log.header(self._facts), now_us)
        for page in log.snapshot_pages(self._events, snapshot(self.state)):
            self._sink.write(page, now_us)

    def upkeep(self, now_us: int) -> None:
        """Once a beat."""
        self._sink.flush(now_us)

    def close(self) -> None:
        """The last word; the log is complete."""
        self._sink.close()
