"""The client's clock, and waiting until a time of it.

Timers of an event loop are exact to a millisecond, which would be added to every latency. So the pacer wakes
early and yields until the time has come; other requests are read meanwhile.
"""

from __future__ import annotations

import asyncio

from shared.clock import Clock, SystemClock

EARLY_US = 1_000  # libuv counts whole milliseconds; a request costs at most two of them of one core


class Pacer:
    """Reads the clock and waits for a time of it. A clock of a test needs no waking early."""

    def __init__(self, clock: Clock | None = None, early_us: int = EARLY_US) -> None:
        self._clock = clock or SystemClock()
        self._early_us = early_us

    def now_us(self) -> int:
        """Monotonic time."""
        return self._clock.now_us()

    async def about(self, at_us: int) -> None:
        """Return at `at_us`, give or take a millisecond or two, or at once when it has passed."""
        wait_us = at_us - self.now_us()
        if wait_us > 0:
            await asyncio.sleep(wait_us / 1e6)

    async def until(self, at_us: int) -> None:
        """Return at `at_us`, or at once when it has passed."""
        await self.about(at_us - self._early_us)
        while self.now_us() < at_us:  # noqa: ASYNC110 - there is no event for a moment
            await asyncio.sleep(0)
