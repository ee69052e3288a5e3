"""The host thread finishes steps after their forward: processors, sampling and result, off the device thread.

    device thread: forward A ─┬─ forward B ───────┬─ forward A' ...
    host thread:                └ processors, sample, result A ┘ └ ... B

DeviceThread puts the steps; they leave in the same order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

MAX_PENDING = 2  # the two steps of two_batch; with more, results would only wait longer here


@dataclass(frozen=True, slots=True)
class _Pending:
    slots: frozenset[int]  # their next tokens are not chosen yet
    since_us: int
    finish: Callable[[], None]


class HostThread:
    """The thread starts with the first step. Only one other thread may call `put`."""

    def __init__(self, most: int = MAX_PENDING) -> None:
        self._most = most
        self._pending: deque[_Pending] = deque()  # the first one runs
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """True until the result of every step has been delivered. No lock: only the caller adds."""
        return bool(self._pending)

    @property
    def since_us(self) -> int:
        """When the oldest step here began, 0 without one."""
        with self._changed:
            return self._pending[0].since_us if self._pending else 0

    def put(self, slots: Collection[int], since_us: int, finish: Callable[[], None]) -> None:
        """Call `finish` on the host thread; it must not raise. Waits while `most` steps are here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host-thread", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) < self._most)
            self._pending.append(_Pending(frozenset(slots), since_us, finish))
            self._changed.notify_all()

    def wait_for(self, slots: Collection[int]) -> None:
        """Wait until no step here chooses a token of one of `slots`."""
        with self._changed:
            self._changed.wait_for(lambda: all(step.slots.isdisjoint(slots) for step in self._pending))

    def drain(self) -> None:
        """Wait until every step has left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def close(self) -> None:
        """End the thread after its steps."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                step = self._pending[0]
            try:
                step.finish()
            finally:
                with self._changed:
                    self._pending.popleft()
                    self._changed.notify_all()
