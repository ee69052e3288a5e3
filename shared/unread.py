"""What came for one request and was not read yet. Bounded: a reader that is too slow is ended, so that
neither its memory nor its work is at the expense of the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shared.bus import Delivery
from shared.errors import HeadraceError

MAX_UNREAD_BYTES = 2_097_152  # of one request: some 10,000 frames, a hundred seconds of a fast stream


class SlowReader(HeadraceError):
    """More frames waited for their reader than are kept for it: its request was ended."""

    code, type = 408, "slow_reader"


class Unread:
    """A queue of at most MAX_UNREAD_BYTES and one message. What finds no room is the end: `on_full` is
    called at once, and the reader finds SlowReader in the place of all that waited."""

    __slots__ = ("_bytes", "_came", "_deliveries", "_failure", "_on_full", "count")

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._deliveries: deque[Delivery] = deque()
        self._bytes = 0
        self._failure: HeadraceError | None = None
        self._came = asyncio.Event()
        self.count = 0  # messages that came

    def put(self, delivery: Delivery) -> None:
        """Keep a message for the reader."""
        self.count += 1
        if self._failure is not None:
            return
        if self._bytes > MAX_UNREAD_BYTES:
            self._deliveries.clear()
            self.fail(
                SlowReader(
                    f"{MAX_UNREAD_BYTES} bytes of the answer waited to be read, and the request was ended: "
                    "read faster, or ask without `stream`"
                )
            )
            self._on_full()
        else:
            self._deliveries.append(delivery)
            self._bytes += len(delivery.data)
        self._came.set()

    def fail(self, error: HeadraceError) -> None:
        """Nothing more comes: the reader finds this error behind what is there."""
        self._failure = error
        self._came.set()

    async def get(self, timeout_s: float) -> Delivery:
        """The oldest message. Raises TimeoutError, and what `fail` was given."""
        while not self._deliveries:
            if self._failure is not None:
                raise self._failure
            self._came.clear()
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
        delivery = self._deliveries.popleft()
        self._bytes -= len(delivery.data)
        return delivery
