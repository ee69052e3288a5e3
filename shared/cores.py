"""How many cores this process may use: its affinity mask, cut by the CPU quota of its control groups.

A container with `--cpus 1.5` sees all cores of its host; more threads than it may use are stopped for the
rest of each period, and whoever waits for them with them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = "sys/fs/cgroup"


def usable_cores(root: Path = Path("/")) -> float:
    """Cores, 1.5 say; above 0. `root` is where /proc and /sys are looked for."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(root)])


def usable_threads(processes: int = 1) -> int:
    """How many threads each of so many processes that compute together should have at most: at least 1."""
    return max(1, math.ceil(usable_cores()) // processes)


def _quotas(root: Path) -> Iterator[float]:
    """The cores of every control group that this process is in, and of those around it, where they are
    limited."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if not controllers:
            mounted, read = [root / _GROUPS, root / _GROUPS / "unified"], _v2
        elif "cpu" in controllers.split(","):
            mounted, read = [root / _GROUPS / controllers, root / _GROUPS / "cpu"], _v1
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (mount / group for mount in mounted for group in (inside, *inside.parents)):
            try:
                cores = read(folder)
            except (OSError, ValueError, ZeroDivisionError):  # of another kind, or it is the host's path
                continue
            if cores > 0:
                yield cores


def _v2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return 0.0 if quota == "max" else int(quota) / int(period)


def _v1(folder: Path) -> float:
    quota, period = (int((folder / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period"))
    return quota / period if period > 0 else 0.0
