"""When L2 is not asked. Pure.

    closed ──3 failures in a row──▶ open ──a canary that works──▶ closed

While it is open nothing of a request touches L2. A canary (put, get, compare, over new connections) goes
out about once a second. One that hangs keeps its thread, so few may hang at a time: a server that wakes
up answers one of those, and the next canary goes out at once.
"""

from __future__ import annotations

FAILURES = 3
PROBE_US = 1_000_000
HANGING_PROBES = 3  # beyond these the next one waits PATIENCE_US
PATIENCE_US = 60_000_000
PROMPT_US = 500_000  # a canary slower than this says that L2 is back, not that it is well


class Breaker:
    """Counts failures, says when to probe."""

    def __init__(self) -> None:
        self.open = False
        self.opened = 0  # times
        self._failures = 0
        self._next_us = 0
        self._probes: dict[int, int] = {}  # call -> start

    def succeeded(self) -> None:
        """A call worked."""
        self._failures = 0

    def failed(self, now_us: int) -> bool:
        """A call failed or took too long; True when that opened the breaker."""
        self._failures += 1
        if self.open or self._failures < FAILURES:
            return False
        self.open = True
        self.opened += 1
        self._next_us = now_us + PROBE_US
        return True

    def next_us(self) -> int | None:
        """When the next canary is due, None while none is."""
        return self._next_us if self.open else None

    def probing(self, call: int, now_us: int) -> None:
        """Canary `call` goes out."""
        self._probes[call] = now_us
        self._next_us = now_us + (PROBE_US if len(self._probes) < HANGING_PROBES else PATIENCE_US)

    def probed(self, call: int, ok: bool, now_us: int) -> bool:
        """Canary `call` has ended; True when that closed the breaker."""
        began_us = self._probes.pop(call, None)
        if began_us is None or not self.open:
            return False
        if ok and now_us - began_us <= PROMPT_US:
            self.open, self._failures = False, 0
            return True
        self._next_us = now_us if ok else max(began_us + PROBE_US, now_us)
        return False
