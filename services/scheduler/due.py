"""What has a time limit: a heap of when each thing is looked at again.

An entry is a lower bound: who is asked at its time and is not due yet says when to ask again. So a limit
that moves costs nothing until it comes up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class Due:
    """Times in us, the earliest first."""

    heap: list[tuple[int, int]] = field(default_factory=list)  # at_us, sequence

    def watch(self, at_us: int, seq: int) -> None:
        """Look at a sequence at `at_us`."""
        heapq.heappush(self.heap, (at_us, seq))

    def pop(self, now_us: int) -> int | None:
        """A sequence whose time has come."""
        return heapq.heappop(self.heap)[1] if self.heap and self.heap[0][0] <= now_us else None
