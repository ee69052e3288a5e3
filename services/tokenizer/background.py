"""Long requests are prepared on a thread of their own: the event loop goes on beating and answering.

A megabyte of text takes one to three seconds to tokenize, as long as it takes to be declared dead. The
tokenizer library lets other threads run meanwhile. One thread: several would only share its cores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.tokenizer.prepare import Cancels, Prepared, ServedModel, Submission, prepared
from shared.clock import Clock, SystemClock
from shared.errors import Overloaded

LONG_BYTES = 16_384  # 10 to 50 ms of work
MAX_WAITING_BYTES = 64 * 1024 * 1024
RETRY_AFTER_MS = 1_000


class Beside:
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0

    @property
    def waiting(self) -> int:
        """Requests not done yet; 0 when idle."""
        return len(self._tasks)

    def put(self, submission: Submission) -> None:
        """Prepare a request in its turn. Raises Overloaded when too many bytes wait already."""
        size = len(submission.body)
        if self._bytes + size > MAX_WAITING_BYTES:
            raise Overloaded(
                f"{self._bytes} bytes of long requests wait for this tokenizer: try again later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._bytes += size
        task = asyncio.get_running_loop().create_task(self._prepare(submission))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Return when nothing waits."""
        await asyncio.gather(*self._tasks)
        self._thread.shutdown(wait=False)

    async def _prepare(self, submission: Submission) -> None:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self._take_up, submission)
        finally:
            self._bytes -= len(submission.body)
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
