"""A clock that only a test moves, and an event loop whose time is virtual.

The loop's time passes only when nothing else is left to do, and then at once. What runs on it takes exactly
as long as the clock does. Sockets work, where the other end is in the same process and needs no time: a Unix
socket has at once what was written to it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Looks whether something is ready; if not, lets the time pass in the place of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and no time would change that"
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 0."""

    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now_s


class FakeClock:
    """A clock that only `advance` moves."""

    def __init__(self, now_us: int = 1_000_000) -> None:
        self._now_us = now_us
        self.offset_us = 1_700_000_000_000_000  # of the wall clock

    def now_us(self) -> int:
        return self._now_us

    def wall_us(self) -> int:
        return self.offset_us + self._now_us

    def advance(self, by_us: int) -> None:
        """Let `by_us` microseconds pass."""
        self._now_us += by_us


class LoopClock(FakeClock):
    """The running loop's time, in µs."""

    def now_us(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e6)

    def wall_us(self) -> int:
        return super().wall_us() + self.now_us()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
