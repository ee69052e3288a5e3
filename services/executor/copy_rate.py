"""How fast copies go in one direction, learnt from those that were made."""

from __future__ import annotations

_KEEP = 7 / 8  # of what was known before each copy: the last dozen copies count


class CopyRate:
    """Counts of one direction, and its rate in bytes a microsecond, which is MB/s."""

    def __init__(self) -> None:
        self.copies = 0
        self.bytes = 0
        self.us = 0
        self._recent_bytes = self._recent_us = 0.0

    def add(self, copied_bytes: int, took_us: int) -> None:
        """Count a copy that was made in full."""
        self.copies += 1
        self.bytes += copied_bytes
        self.us += took_us
        self._recent_bytes = self._recent_bytes * _KEEP + copied_bytes
        self._recent_us = self._recent_us * _KEEP + took_us

    @property
    def mb_s(self) -> int:
        """Of the last copies together, 0 when nothing is known."""
        return round(self._recent_bytes / self._recent_us) if self._recent_us else 0
