"""How many cores this process may use, and how long its threads wait for one.

`usable_cores` is the CPU affinity of this process, limited by the CPU quota of its cgroups. A container with
`--cpus 1.5` sees all cores of its host. With more threads than its quota the kernel stops them for the rest
of each period, and all threads that wait for them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_GROUPS = "sys/fs/cgroup"


def usable_cores(root: Path = Path("/")) -> float:
    """The number of cores, above 0, for example 1.5. `root` holds /proc and /sys."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(root)])


def usable_threads(processes: int = 1) -> int:
    """Threads, at least 1, for each of `processes` processes that compute at the same time."""
    return max(1, math.ceil(usable_cores()) // processes)


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Where files of the cgroups of this process and their parents may be, each with whether it is of the
    second version. `controller`: cpu or memory."""
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
            mounted = [root / _GROUPS, root / _GROUPS / "unified"]
        elif controller in controllers.split(","):
            mounted = [root / _GROUPS / controllers, root / _GROUPS / controller]
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for mount in mounted:
            yield from ((mount / group, not controllers) for group in (inside, *inside.parents))


class CoreWaits:
    """How much of the time that threads of this process could run they waited for a core, by Linux's
    scheduler statistics."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._before = self._read()

    def share(self) -> float:
        """The largest share, 0 to 1, of any thread that could run half as long as the busiest one or longer,
        since the last call. 1 where Linux counts no waits."""
        before, self._before = self._before, self._read()
        spent = [
            (ran + waited - sum(before.get(task, (0, 0))), waited - before.get(task, (0, 0))[1])
            for task, (ran, waited) in self._before.items()
        ]
        most = max((could for could, _ in spent), default=0)
        return max((waited / could for could, waited in spent if 2 * could >= most > 0), default=1.0)

    def _read(self) -> dict[str, tuple[int, int]]:
        """By thread: how long it ran and how long it waited for a core, ns."""
        found = {}
        try:
            for task in os.listdir(self._tasks):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    ran, waited, _ = (self._tasks / task / "schedstat").read_text().split()
                    found[task] = int(ran), int(waited)
        except (OSError, ValueError):
            return {}
        return found


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of the cgroups of this process and their parents."""
    for folder, second in cgroups("cpu", root):
        try:
            cores = _v2(folder) if second else _v1(folder)
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or a path of the host
            continue
        if cores > 0:
            yield cores


def _v2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return 0.0 if quota == "max" else int(quota) / int(period)


def _v1(folder: Path) -> float:
    quota, period = (int((folder / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period"))
    return quota / period if period > 0 else 0.0
