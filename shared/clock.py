"""Services read the time from a `Clock`, so that tests can replace it. `end_task` cancels a task."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol


class Clock(Protocol):
    """Two clocks in microseconds: monotonic for decisions, wall for spans and names. A wall clock may be set
    at any time, and differs between hosts: no decision compares those of two processes."""

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


async def end_task(task: asyncio.Future[Any], again_s: float = 1.0) -> None:
    """Cancel `task`, every `again_s` until it has ended: in Python 3.11 asyncio.wait_for, which nats-py uses,
    loses a cancellation that arrives just as the awaited future ends, and the task goes on."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=again_s)
