"""Resident memory of processes over time, and its growth."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Growth:
    """Samples of one process: (seconds, resident bytes)."""

    name: str
    samples: list[tuple[float, int]] = field(default_factory=list)

    def percent_per_min(self, warm_up: float = 0.25) -> float:
        """Slope of a straight line (least squares) through the samples after the `warm_up` share of the
        time, in percent of their mean per minute. 0 with fewer than three samples."""
        if not self.samples:
            return 0.0
        start, end = self.samples[0][0], self.samples[-1][0]
        kept = [(t / 60, b) for t, b in self.samples if t >= start + warm_up * (end - start)]
        if len(kept) < 3:
            return 0.0
        mean_t = sum(t for t, _ in kept) / len(kept)
        mean_b = sum(b for _, b in kept) / len(kept)
        spread = sum((t - mean_t) ** 2 for t, _ in kept)
        return 100 * sum((t - mean_t) * (b - mean_b) for t, b in kept) / spread / mean_b if spread else 0.0


class MemoryWatch:
    """Samples the processes it is given; each process id is one Growth."""

    def __init__(self) -> None:
        self.growth: dict[int, Growth] = {}

    def sample(self, processes: dict[int, str]) -> None:
        """Add the present size of each process {pid: name}; one that has just ended is left out."""
        for pid, name in processes.items():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            samples = self.growth.setdefault(pid, Growth(name)).samples
            samples.append((time.monotonic(), pages * PAGE_BYTES))
