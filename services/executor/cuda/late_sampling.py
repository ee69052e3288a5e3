"""LateSampling queues the sampling of steps with grammars once their masks are made, beside their forward.

    device:  forward n-1, sample n-1 ──▶ forward n ────────────────────────▶ sample n ──▶ forward n+1
    host:           tokens n-1 are known ──▶ masks n ──▶ queue sample n ──▶ queue forward n+1

A mask depends on the token before, so sampling cannot be queued with its forward. All later work of the
device comes after it: the thread that samples a step calls `answer`, and the thread that queues forwards and
changes slots calls `flush` before either. The first of the two makes the masks. The CUDA engine owns it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from services.executor.engine import Masked, Pending
from services.executor.sampling.slot_tokens import append_sampled


class LateSampling:
    """The steps of one engine that have an `answer`."""

    def __init__(self, queue: Callable[[Pending], Masked]) -> None:
        """`queue` makes the masks of a step and queues its sampling."""
        self._queue = queue
        self._late: Pending | None = None
        self._queued: Pending | None = None  # the last one that was late
        self._one = threading.Lock()  # held while masks are made
        self._recording = threading.Lock()

    def put(self, pending: Pending) -> None:
        """Take over a step whose forward is queued. `flush` comes before the next forward."""
        self._late = pending

    def flush(self, of: Pending | None = None) -> None:
        """Queue the sampling of the step that waits for masks, if there is one, and if it is `of` or that is
        None. An error becomes that step's."""
        with self._one:
            pending = self._late
            if pending is None or pending.late is None or (of is not None and pending is not of):
                return
            self._late, before = None, self._queued
            try:
                if before is not None and before.late is not None and not before.late.recorded.is_set():
                    self._record(before)
                masked = self._queue(pending)
            except Exception as error:  # noqa: BLE001 - `answer` raises it
                pending.late.masked.set_exception(error)
                return
            self._queued = pending
            pending.late.masked.set_result(masked)

    def answer(self, pending: Pending) -> tuple[list[int], list[int], Masked]:
        """Wait for a step's ids and append them to its slots' tokens. Returns the columns `ids` and `done`,
        and what the masks took. Raises the error of `queue`."""
        if pending.late is None:
            return *self._record(pending), (0, {})
        self.flush(pending)
        masked = pending.late.masked.result()
        ids, done = self._record(pending)
        pending.late.recorded.set()
        return ids, done, masked

    def _record(self, pending: Pending) -> tuple[list[int], list[int]]:
        answer, ready = pending.answer, pending.forwarded
        assert answer is not None
        assert ready is not None
        ready.synchronize()
        ids, done = answer[:, : len(pending.plan.sample_rows)].tolist()
        with self._recording:  # a second time it changes nothing
            append_sampled(pending.tokens, ids, pending.positions)
        return ids, done
