"""Requests wait here for their turn, one in each turn of the event loop: between two of them beats,
cancels and answers get through, and each request is stamped as it comes, not as it is taken up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shared.bus import Delivery
from shared.clock import Clock
from shared.errors import Overloaded

RETRY_AFTER_MS = 1_000
MAX_WAITING = 8_192  # as many as the bus keeps unread

Take = Callable[[Delivery, int], None]  # with the wall stamp of its arrival


class Mailbox:
    """The requests that one tokenizer has received and not looked at."""

    def __init__(self, clock: Clock, take: Take) -> None:
        self._clock = clock
        self._take = take
        self._waiting: deque[tuple[Delivery, int]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, delivery: Delivery) -> None:
        """Queue a request. Raises Overloaded when MAX_WAITING do wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} requests wait for this tokenizer: try again later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        wall_us = self._clock.wall_us()
        if not self._empty.is_set():
            self._waiting.append((delivery, wall_us))
            return
        self._empty.clear()
        asyncio.get_running_loop().call_soon(self._next)
        self._take(delivery, wall_us)

    async def drain(self) -> None:
        """Return when all have had their turn."""
        await self._empty.wait()

    def __len__(self) -> int:
        return len(self._waiting)

    def _next(self) -> None:
        if not self._waiting:
            self._empty.set()
            return
        asyncio.get_running_loop().call_soon(self._next)
        self._take(*self._waiting.popleft())
