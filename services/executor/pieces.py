"""What two halves of a step did when: their compute, and their talks under it. For traces.

Only the first ones of a step are noted: they show how it went on, and a step of a deep model has hundreds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST = 32  # pieces: of some four layers
COMPUTE, COMM = (0, 1), (2, 3)  # the lanes of A and B, see shared.messages.steps.PIECE_LANES


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that lasted, from the step's start on."""

    lane: int
    from_us: int
    took_us: int


class Notes:
    """Of one step. A lane may be noted on a thread of its own."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._noted: list[tuple[int, int, int]] = []

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        """Note what is done within this."""
        began_ns = self._now_ns()
        try:
            yield
        finally:
            self._noted.append((lane, began_ns, self._now_ns()))

    def pieces(self) -> tuple[Piece, ...]:
        """The first ones, in the order of their beginnings."""
        first = sorted(self._noted, key=lambda noted: noted[1])[:MOST]
        return tuple(
            Piece(lane, (began - self._began_ns) // 1000, (ended - began) // 1000)
            for lane, began, ended in first
        )
