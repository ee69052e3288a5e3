"""The points of a sweep, one after the other: each point is a run with its own requests.

A point draws from the seed and its number, so a later point does not find the prompts of an earlier one in
the prefix cache, and the same seed makes the same requests again. The warm-up's requests are sent before the
first point and counted nowhere.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.arrivals import arrivals_us, surge
from loadtest.bench.asked import Conversation, Options
from loadtest.bench.drive import Drive, Transport
from loadtest.bench.figures import figures
from loadtest.bench.pacer import Pacer
from loadtest.bench.progress import Progress
from loadtest.bench.prompts import FIRST_ID, LAST_ID, Prompts
from loadtest.bench.record import Record
from loadtest.bench.replay import TRACES, Replay
from loadtest.bench.server_side import Counts, between
from loadtest.bench.shape import Shape
from loadtest.bench.workloads import WORKLOADS
from loadtest.scenarios.traces import Cut

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """How requests are begun. An infinite rate with a concurrency is a closed loop."""

    request_rate: float = math.inf
    max_concurrency: int = 0  # 0: no limit
    burstiness: float = 1.0
    surge: float = 1.0
    prompts: int = 0  # at most so many of what is asked; 0: all

    @property
    def name(self) -> str:
        """For people."""
        rate = "" if math.isinf(self.request_rate) else f"{self.request_rate:g} req/s"
        most = f"concurrency {self.max_concurrency}" if self.max_concurrency else ""
        return ", ".join(filter(None, (rate, most))) or "all at once"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked at each point."""

    workload: str = "random"
    shape: Shape = field(default_factory=Shape)
    seed: int = 0
    chat: bool = False
    ids: tuple[int, int] = (FIRST_ID, LAST_ID)
    trace: Path | None = None
    minutes: float = 1e9
    speed: float = 1.0

    def conversations(self, part: object) -> list[Conversation]:
        """Those of one point."""
        if self.workload in TRACES:
            cut = Cut(self.minutes, self.speed)
            return Replay(self.workload, self.trace, cut, self.shape, self.ids).conversations(part)
        prompts = Prompts(random.Random(f"{self.seed} {part}"), self.chat, self.ids)
        return WORKLOADS[self.workload](self.shape, prompts)


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs points against one server."""

    transport: Transport
    asked: Asked
    options: Options
    goals: dict[str, float]
    pacer: Pacer = field(default_factory=Pacer)
    counts: Callable[[], Awaitable[Counts | None]] | None = None

    async def warm(self, requests: int, point: Point) -> list[Record]:
        """Requests that count nowhere, `max_concurrency` at a time."""
        drive = Drive(self.transport, self.pacer, self.options)
        conversations = self.asked.conversations("warm")[:requests]
        await drive.closed(conversations, point.max_concurrency or requests)
        return drive.records

    async def point(self, number: int, point: Point) -> Run:
        """One run and all that is known of it."""
        conversations = self.asked.conversations(number)[: point.prompts or None]
        turns = sum(len(each.turns) for each in conversations)
        before = await self.counts() if self.counts else None
        began_s, busy_s = time.monotonic(), time.process_time()
        async with Progress(point.name, turns, sys.stderr) as progress:
            drive = Drive(self.transport, self.pacer, self.options, progress.ended)
            await self._drive(drive, conversations, point, number)
        busy_pct = 100 * (time.process_time() - busy_s) / (time.monotonic() - began_s)
        after = await self.counts() if self.counts else None
        return {
            "point": _shown(point),
            "figures": figures(drive.records, drive.started_us, self.goals) | {"client_cpu_pct": busy_pct},
            "counted": between(before, after),
            "requests": columns(drive.records, drive.started_us),
        }

    async def _drive(
        self, drive: Drive, conversations: list[Conversation], point: Point, number: int
    ) -> None:
        recorded = [each.at_us for each in conversations if each.at_us is not None]
        if not recorded and math.isinf(point.request_rate) and point.max_concurrency:
            await drive.closed(conversations, point.max_concurrency)
            return
        seed = f"{self.asked.seed} {number} times"
        drawn = arrivals_us(len(conversations), point.request_rate, point.burstiness, seed)
        times_us = surge(recorded or drawn, point.surge)
        await drive.open(conversations, times_us, point.max_concurrency)


def columns(records: list[Record], started_us: int) -> dict[str, list[Any]]:
    """Every request, a list for each property, times in µs after the start: for plots and other tools."""
    return {
        "kind": [r.kind for r in records],
        "intended_us": [r.intended_us - started_us for r in records],
        "sent_us": [r.sent_us - started_us for r in records],
        "ended_us": [r.ended_us - started_us for r in records],
        "first_us": [r.chunks_us[0] - started_us if r.chunks_us else None for r in records],
        "itls_us": [r.itls_us for r in records],
        "prompt_tokens": [r.prompt_tokens for r in records],
        "output_tokens": [r.output_tokens for r in records],
        "cached_tokens": [r.cached_tokens for r in records],
        "repeated_tokens": [r.repeated_tokens for r in records],
        "error": [r.error for r in records],
    }


def _shown(point: Point) -> dict[str, Any]:
    """A point as JSON: without what has no limit."""
    given = asdict(point)
    return {name: value if value and math.isfinite(value) else None for name, value in given.items()}
