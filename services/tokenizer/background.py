"""Long requests are prepared on a thread of their own: the event loop goes on beating and answering.

A megabyte of text takes one to three seconds to tokenize, as long as it takes to be declared dead. The
tokenizer library lets other threads run meanwhile. One thread: several would only share its cores; tenants
have it in turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.tokenizer.prepare import Cancels, Prepared, ServedModel, Submission, prepared
from shared.clock import Clock, SystemClock
from shared.errors import Overloaded
from shared.fair_share import Turns, finds_no_room

LONG_BYTES = 16_384  # 10 to 50 ms of work
MAX_WAITING_BYTES = 64 * 1024 * 1024
RETRY_AFTER_MS = 1_000


class BackgroundEncoder:
    """The long requests of one tokenizer; `done` is called on the event loop with each."""

    def __init__(
        self,
        model: ServedModel,
        done: Callable[[Prepared], None],
        clock: Clock | None = None,
        cancels: Cancels | None = None,
    ) -> None:
        self._model = model
        self._cancels = cancels
        self._clock = clock or SystemClock()
        self._done = done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-requests")
        self._queue: Turns[Submission] = Turns()
        self._bytes: Counter[str] = Counter()  # by tenant, of those not done yet
        self._working: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Requests not done yet; 0 when idle."""
        return len(self._queue) + (self._working is not None)

    def put(self, submission: Submission) -> None:
        """Prepare a request in its turn. Raises Overloaded when too many bytes wait already, and its tenant
        has its share of them, or twice as many."""
        own, size = self._bytes[submission.tenant], len(submission.body)
        if finds_no_room(own, size, self._bytes.total(), MAX_WAITING_BYTES, len(self._bytes)):
            raise Overloaded(
                f"{own} bytes of your long requests wait for this tokenizer: try again later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._bytes[submission.tenant] += size
        self._queue.put(submission.tenant, submission)
        if self._working is None:
            self._working = asyncio.get_running_loop().create_task(self._work(self._queue.pop()))

    async def drain(self) -> None:
        """Return when nothing waits."""
        while self._working is not None:
            await self._working
        self._thread.shutdown(wait=False)

    async def _work(self, submission: Submission) -> None:
        """Prepare it, and begin the next one."""
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self._take_up, submission)
        finally:
            self._bytes[submission.tenant] -= len(submission.body)
            self._bytes += Counter()  # without those of whom nothing is left
            self._working = loop.create_task(self._work(self._queue.pop())) if self._queue else None
        self._done(result)

    def _take_up(self, submission: Submission) -> Prepared:
        clock = self._clock
        handled = dataclasses.replace(submission, handled_wall_us=clock.wall_us(), handled_us=clock.now_us())
        return _prepared_long(handled, self._model, self._cancels)


def _prepared_long(submission: Submission, model: ServedModel, cancels: Cancels | None) -> Prepared:
    """`prepared`, without the collector: it would look at every object of a hostile body again and again,
    2.2 s for 8 MB of empty lists in the place of 0.6, and no other thread runs meanwhile."""
    gc.disable()
    try:
        return prepared(submission, model, cancels)
    finally:
        gc.enable()
