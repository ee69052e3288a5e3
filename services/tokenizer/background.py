"""`BackgroundEncoder` prepares long requests on a thread: the event loop stays free for heartbeats.

A megabyte of text takes one to three seconds to tokenize, long enough to be declared dead. The tokenizer
library releases the GIL and uses all cores, so one thread is enough; tenants take turns.
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
        """Queue a request. Raises Overloaded when the queue is full for its tenant (see finds_no_room)."""
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
        """Prepare a request on the thread, then start on the next one."""
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self._prepare, submission)
        finally:
            self._bytes[submission.tenant] -= len(submission.body)
            self._bytes += Counter()  # drops the zeros
            self._working = loop.create_task(self._work(self._queue.pop())) if self._queue else None
        self._done(result)

    def _prepare(self, submission: Submission) -> Prepared:
        """`prepared`, without garbage collection: with it 8 MB of empty lists take 2.2 s instead of 0.6, and
        no other thread runs meanwhile."""
        clock = self._clock
        handled = dataclasses.replace(submission, handled_wall_us=clock.wall_us(), handled_us=clock.now_us())
        gc.disable()
        try:
            return prepared(handled, self._model, self._cancels)
        finally:
            gc.enable()
