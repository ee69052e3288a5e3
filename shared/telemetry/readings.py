"""Readings are measured values as plain data: what a service counts, before anything is sent anywhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Attributes = tuple[tuple[str, str], ...]

_STARTED_S = time.time()  # when this was imported: at the process's start


@dataclass(frozen=True, slots=True)
class Reading:
    """A number now: of a counter, which only grows, or of a gauge."""

    name: str
    value: float
    unit: str  # UCUM: "1", "s", "{token}"
    attributes: Attributes = ()
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram since the start: `counts[i]` values in (bounds[i-1], bounds[i]], the last above all."""

    name: str
    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    unit: str
    attributes: Attributes = ()


Readings = Sequence[Reading | Spread]


def process_readings() -> Iterator[Reading]:
    """What a process costs its machine, under the names that Prometheus's client libraries have given it: CPU
    time and start everywhere, memory and open files on Linux."""
    yield Reading("process.cpu", time.process_time(), "s", grows=True)
    yield Reading("process.start_time", _STARTED_S, "s")
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident_pages = int(statm.read_text().split()[1])
        yield Reading("process.resident_memory", resident_pages * os.sysconf("SC_PAGE_SIZE"), "By")
        yield Reading("process.open_fds", len(os.listdir("/proc/self/fd")), "1")
