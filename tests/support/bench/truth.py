"""Compares what the client reports with the record of a server with known latencies.

    PYTHONPATH=.:tests python -m support.bench.truth --in-flight 1,100
    PYTHONPATH=.:tests python -m support.bench.truth --in-flight 1000 --first-ms 1200 --gap-ms 200

The server is a process of its own. A row is good if the client is within 1 % or 1 ms of the server's record.
The exit status is 1 if any row is worse. On a busy machine the client's timestamps are late; the output shows
that, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from support.bench.known import MODEL, Latency
from support.source_tree import ROOT

from loadtest.bench.asked import Options
from loadtest.bench.drive import Transport
from loadtest.bench.loop import runner
from loadtest.bench.over_http import HttpTransport
from loadtest.bench.over_nats import NatsTransport
from loadtest.bench.pacer import Pacer
from loadtest.bench.run import Asked, Bench, Point
from loadtest.bench.shape import Shape
from services.launcher import nats_server
from shared.client.client import Client
from shared.nats.bus import NatsBus

SHARE, MS = 0.01, 1.0
FIRST_MS, GAP_MS, TOKENS, SLOW = 300.0, 50.0, 8, 3.0
TIMEOUT_S = 60.0
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
Truth = dict[str, float]


@dataclass(frozen=True, slots=True)
class Judged:
    """One figure of the client beside the server's."""

    name: str
    client: float
    server: float

    @property
    def good(self) -> bool:
        """Within 1 %, or 1 ms where it is a time."""
        most = max(SHARE * self.server, MS if self.name.endswith("_ms") else 0.0)
        return abs(self.client - self.server) <= most


def truth_of(served: Sequence[dict[str, Any]], goals: dict[str, float]) -> Truth:
    """The figures as the server's stamps give them, by plain arithmetic."""
    ttfts = [(s["pieces_us"][0] - s["received_us"]) / 1e3 for s in served]
    gaps = [[(b - a) / 1e3 for a, b in pairwise(p)] for p in (s["pieces_us"] for s in served)]
    itls = [gap for each in gaps for gap in each]
    took_s = (max(s["pieces_us"][-1] for s in served) - min(s["received_us"] for s in served)) / 1e6
    kept = sum(
        ttft <= goals["ttft"] and sum(each) / max(len(each), 1) <= goals["tpot"]
        for ttft, each in zip(ttfts, gaps, strict=True)
    )
    return {
        "mean_ttft_ms": mean(ttfts),
        "median_ttft_ms": median(ttfts),
        "mean_itl_ms": mean(itls),
        "median_itl_ms": median(itls),
        "output_throughput": sum(len(s["pieces_us"]) for s in served) / took_s,
        "request_goodput": kept / took_s,
    }


def judge(figures: dict[str, Any], truth: Truth) -> list[Judged]:
    """Every figure that the truth has."""
    return [Judged(name, figures[name], value) for name, value in truth.items()]


@dataclass(frozen=True, slots=True)
class Trial:
    """How much is sent at once, and over what, to a server of which latencies."""

    transport: str
    in_flight: int
    requests: int
    first_ms: float = FIRST_MS
    gap_ms: float = GAP_MS

    @property
    def latency(self) -> Latency:
        """The server's."""
        return Latency(round(self.first_ms * 1e3), round(self.gap_ms * 1e3), SLOW)

    @property
    def goals(self) -> dict[str, float]:
        """Kept by clients that are not slow, at any noise."""
        return {"ttft": 2 * self.first_ms, "tpot": 2 * self.gap_ms}

    @property
    def point(self) -> Point:
        """A closed loop of one; else so many a second that by Little's law so many are in flight: a third
        of them takes `SLOW` times as long."""
        if self.in_flight == 1:
            return Point(max_concurrency=1)
        alone_s = (self.first_ms + (TOKENS - 1) * self.gap_ms) / 1e3 * (2 + SLOW) / 3
        return Point(request_rate=self.in_flight / alone_s)


def run(trial: Trial) -> list[Judged]:
    """Start a server, load it, end it, and judge."""
    with tempfile.TemporaryDirectory() as folder:
        broker = nats_server.start() if trial.transport == "nats" else None
        url, out = broker.url if broker else f"unix:{folder}/known.sock", Path(folder) / "known.json"
        try:
            with known_server(url, trial.latency, out), runner() as loop:
                figures = loop.run(_load(trial, url))
        finally:
            if broker is not None:
                broker.stop()
        return judge(figures, truth_of(json.loads(out.read_text()), trial.goals))


async def _load(trial: Trial, url: str) -> dict[str, Any]:
    shape = Shape(prompts=trial.requests, input_len=8, output_len=TOKENS)
    async with _transport(url) as transport:
        run = await Bench(transport, Asked(shape=shape), Options(), trial.goals).point(0, trial.point)
    figures: dict[str, Any] = run["figures"]
    return figures


@contextmanager
def known_server(url: str, latency: Latency, out: Path) -> Iterator[None]:
    """A server as a process; its record is in `out` afterwards."""
    flag = "--http" if url.startswith("unix:") else "--nats"
    words = [flag, url, "--latency", json.dumps(asdict(latency)), "--out", str(out)]
    known = subprocess.Popen(
        [sys.executable, "-m", "support.bench.known", *words], env=ENV, stdout=subprocess.PIPE, text=True
    )
    try:
        assert known.stdout is not None
        known.stdout.readline()  # it is ready
        yield
    finally:
        known.terminate()
        known.wait(20)
        known.stdout.close() if known.stdout else None


@asynccontextmanager
async def _transport(url: str) -> AsyncGenerator[Transport]:
    pacer = Pacer()
    if url.startswith("unix:"):
        over_http = HttpTransport(url, pacer, model=MODEL, timeout_s=TIMEOUT_S)
        yield over_http
        await over_http.close()
    else:
        bus = await NatsBus.connect(url, name="bench")
        yield NatsTransport(await Client.open(bus), MODEL, pacer, TIMEOUT_S)
        await bus.drain()


def main(argv: Sequence[str] | None = None) -> int:
    """Every trial, a row for each figure."""
    parser = argparse.ArgumentParser(prog="python -m support.bench.truth", description=__doc__)
    parser.add_argument("--in-flight", default="1,100")
    parser.add_argument("--transports", default="http,nats")
    parser.add_argument("--times", type=int, default=4, help="requests: so many times those in flight")
    parser.add_argument("--first-ms", type=float, default=FIRST_MS, help="of the server")
    parser.add_argument("--gap-ms", type=float, default=GAP_MS, help="of the server")
    given = parser.parse_args(argv)
    good = True
    for transport in given.transports.split(","):
        for in_flight in map(int, given.in_flight.split(",")):
            requests = max(given.times * in_flight, 6)
            trial = Trial(transport, in_flight, requests, given.first_ms, given.gap_ms)
            for row in run(trial):
                good &= row.good
                line = f"{row.client:>12.3f}{row.server:>12.3f}  {'good' if row.good else 'BAD'}"
                print(f"{transport:<5}{in_flight:>6}  {row.name:<18}{line}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
