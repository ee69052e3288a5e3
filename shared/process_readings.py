"""What a process costs its machine, under the names that Prometheus's client libraries have given it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from shared.readings import Reading

_STARTED_S = time.time()  # when this was imported: at the process's start


def process_readings() -> Iterator[Reading]:
    """CPU time and start everywhere, memory and open files on Linux."""
    yield Reading("process.cpu", time.process_time(), "s", grows=True)
    yield Reading("process.start_time", _STARTED_S, "s")
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident_pages = int(statm.read_text().split()[1])
        yield Reading("process.resident_memory", resident_pages * os.sysconf("SC_PAGE_SIZE"), "By")
        yield Reading("process.open_fds", len(os.listdir("/proc/self/fd")), "1")
