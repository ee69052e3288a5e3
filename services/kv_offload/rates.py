"""How fast a tier moves bytes, learnt from what was moved. Pure."""

from __future__ import annotations

WINDOW_US = 50_000  # of busy time; shorter samples say more about the clock than about the tier
WEIGHT = 4  # a new sample counts 1/4


class Rate:
    """Bytes a second while at least one transfer runs."""

    def __init__(self) -> None:
        self.bytes_per_s = 0
        self._running = 0
        self._since_us = 0
        self._busy_us = 0
        self._bytes = 0

    def began(self, now_us: int) -> None:
        """A transfer starts."""
        self._account(now_us)
        self._running += 1

    def ended(self, moved_bytes: int, now_us: int) -> None:
        """One has ended and moved this much; 0 where it failed."""
        self._account(now_us)
        self._running -= 1
        self._bytes += moved_bytes
        if self._bytes and (self._busy_us >= WINDOW_US or (not self.bytes_per_s and not self._running)):
            sample = self._bytes * 1_000_000 // max(self._busy_us, 1)
            old = self.bytes_per_s or sample
            self.bytes_per_s = old + (sample - old) // WEIGHT
            self._busy_us = self._bytes = 0

    def _account(self, now_us: int) -> None:
        if self._running:
            self._busy_us += now_us - self._since_us
        self._since_us = now_us
