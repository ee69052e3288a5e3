"""Services read the time from a `Clock`, so that tests can replace it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks in microseconds: monotonic for decisions, wall for spans."""

    def now_us(self) -> int:
        """Monotonic time; meaningless between machines."""

    def wall_us(self) -> int:
        """Time since the Unix epoch."""


class SystemClock:
    """The machine's clocks."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


class FakeClock:
    """A clock that only `advance` moves."""

    def __init__(self, now_us: int = 1_000_000) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        return self._now_us

    def wall_us(self) -> int:
        return 1_700_000_000_000_000 + self._now_us

    def advance(self, by_us: int) -> None:
        """Let `by_us` microseconds pass."""
        self._now_us += by_us


def new_epoch(clock: Clock) -> int:
    """The incarnation number of a process: its start in wall microseconds, so a later one is larger."""
    return clock.wall_us()
