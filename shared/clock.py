"""Services read the time from a `Clock`, so that tests can replace it. `timer_s` is for timers, `end_task`
cancels a task."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Protocol

TIMER_S = 0.001  # the finest delay of a timer of uvloop


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


def timer_s(wait_us: float) -> float:
    """The delay in seconds for a timer that must not fire early: whole milliseconds, rounded up. uvloop
    rounds to the nearest one: with a rest below half of one a timer would fire again and again."""
    return math.ceil(max(wait_us, 0) / 1e6 / TIMER_S) * TIMER_S


async def end_task(task: asyncio.Future[Any], again_s: float = 1.0) -> None:
    """Cancel `task`, every `again_s` until it has ended: in Python 3.11 asyncio.wait_for, which nats-py uses,
    loses a cancellation that arrives just as the awaited future ends, and the task goes on."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=again_s)
