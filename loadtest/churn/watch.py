"""Samples of every process of a fleet as requests end, and a straight line through the later half."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadtest import faults
from loadtest.churn import heap
from loadtest.processes import GONE, memory_bytes, name_of, tree

STATUS_WAIT_S, POLL_S = 5.0, 0.02


@dataclass(frozen=True, slots=True)
class Line:
    """A least-squares line through the samples of one figure."""

    first: float
    last: float  # values of the line at the ends of its samples
    per_1000: float  # its slope, for 1,000 requests

    @property
    def growth_pct(self) -> float:
        """Over the samples, of the first value."""
        return 100 * (self.last - self.first) / self.first if self.first else 0.0


def line(samples: list[tuple[int, float]]) -> Line:
    """The line through (requests, value). Two samples at least."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
    ends = [mean_y + slope * (x - mean_x) for x in (samples[0][0], samples[-1][0])]
    return Line(ends[0], ends[1], 1_000 * slope)


@dataclass(slots=True)
class Watch:
    """The samples of a fleet by process id."""

    up_pid: int
    folder: Path  # where the processes answer
    monitoring_url: str
    names: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[dict[str, int]]] = field(default_factory=dict)
    broker: list[dict[str, int]] = field(default_factory=list)  # connections, subscriptions, slow consumers

    async def sample(self, requests: int) -> None:
        """Add a sample of each process, after so many requests."""
        pids = tree(self.up_pid)
        asked = [pid for pid in pids if _answers(pid)]
        for pid in asked:
            (self.folder / str(pid)).unlink(missing_ok=True)
            os.kill(pid, heap.ASK)
        await _written([self.folder / str(pid) for pid in asked], STATUS_WAIT_S)
        for pid in pids:
            with suppress(*GONE):
                self.names.setdefault(pid, name_of(pid))
                found = {"requests": requests, **sizes(pid)}
                if pid in asked:
                    found |= json.loads((self.folder / str(pid)).read_text())
                self.samples.setdefault(pid, []).append(found)
        self.broker.append({"requests": requests, **await asyncio.to_thread(self._varz)})

    def _varz(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.monitoring_url}/varz", timeout=10) as answer:
            found = json.load(answer)
        return {name: found[name] for name in ("connections", "subscriptions", "slow_consumers")}


def sizes(pid: int) -> dict[str, int]:
    """Resident, proportional and anonymous bytes of a process, and its open files. Raises
    FileNotFoundError or ProcessLookupError when it has ended."""
    fds, fields = len(os.listdir(f"/proc/{pid}/fd")), memory_bytes(pid)
    if not fields:
        raise ProcessLookupError(pid)
    return {"fds": fds, **{name.lower(): fields[name] for name in ("Rss", "Pss", "Anonymous")}}


def monitoring_url(up_pid: int) -> str:
    """Where the nats-server of a `headrace up` answers with its figures."""
    (server,) = faults.pids_of(up_pid, "nats-server")
    words = Path(f"/proc/{server}/cmdline").read_text().split("\0")
    home = Path(words[words.index("-c") + 1]).parent
    return str(json.loads((home / f"nats-server_{server}.ports").read_text())["monitoring"][0])


async def _written(paths: list[Path], timeout_s: float) -> None:
    """Return once the files are there, or after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s and not all(path.exists() for path in paths):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def _answers(pid: int) -> bool:
    with suppress(*GONE):
        return heap.answers(pid) and name_of(pid) != "nats-server"
    return False
