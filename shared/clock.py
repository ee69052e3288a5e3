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


def new_epoch(clock: Clock) -> int:
    """The incarnation number of a process: its start in wall microseconds, so a later one is larger."""
    return clock.wall_us()
