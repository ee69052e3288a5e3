"""What is due when. Pure; an entry can be moved and dropped."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """At most one deadline for each thing."""

    def __init__(self) -> None:
        self._due: dict[T, int] = {}
        self._heap: list[tuple[int, int, T]] = []
        self._serial = 0  # ties are due in the order in which they were set

    def set(self, what: T, due_us: int) -> None:
        """`what` is due at `due_us`, whenever it was due before."""
        self._due[what] = due_us
        self._serial += 1
        heapq.heappush(self._heap, (due_us, self._serial, what))

    def drop(self, what: T) -> None:
        """It is not due any more."""
        self._due.pop(what, None)

    def pop(self, now_us: int) -> T | None:
        """The next thing that is due, None if there is none."""
        while (next_us := self.next_us()) is not None and next_us <= now_us:
            what = heapq.heappop(self._heap)[2]
            del self._due[what]
            return what
        return None

    def next_us(self) -> int | None:
        """When the next is due."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
