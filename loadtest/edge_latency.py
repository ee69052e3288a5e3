"""What a leaf node connection adds to a request: the same ones at the centre and at an edge, in turn.

    python -m loadtest.edge_latency --out edge_latency.json

`call` is `tokenize`, one message each way; `first frame` and `first text` are of a stream. The engine is
simulated with a step of 1 ms, everything is on this machine: the figures are those of the two servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.durable import MODEL
from loadtest.fleet import cpu_name
from loadtest.running_up import running_up
from shared.client.client import Client
from shared.errors import Unavailable
from shared.nats import subjects
from shared.nats.bus import NatsBus

SIM = ("--backend", "sim")
WARM_UP = 20

Body = dict[str, Any]


async def times(client: Client) -> dict[str, float]:
    """One request of each kind, ms."""
    taken, began = {}, time.perf_counter()
    await client.request(subjects.tokenize(client.tenant, MODEL), {"prompt": "Hello"})
    taken["call"] = time.perf_counter() - began
    began = time.perf_counter()
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    async for frame in client.stream(body):
        if frame["type"] == "accepted":
            taken["first frame"] = time.perf_counter() - began
        elif frame["type"] == "delta":
            taken.setdefault("first text", time.perf_counter() - began)
    taken["whole stream"] = time.perf_counter() - began
    return {name: 1e3 * each for name, each in taken.items()}


async def measured(urls: dict[str, str], rounds: int) -> Body:
    """The median and the 99th percentile of each side, and the ratios of the medians."""
    found: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in urls}
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for side, url in urls.items():
            bus = await NatsBus.connect(url, timeout_s=5)
            stack.push_async_callback(bus.drain)
            clients[side] = await Client.open(bus)
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(Unavailable):  # the link is not there yet
                    await times(clients["edge"])
                    break
        for number in range(WARM_UP + rounds):
            for side, client in clients.items():
                for name, each in (await times(client)).items():
                    if number >= WARM_UP:
                        found[side][name].append(each)
    sides = {
        side: {
            name: {"p50_ms": round(median(all_), 3), "p99_ms": round(sorted(all_)[int(0.99 * len(all_))], 3)}
            for name, all_ in by_name.items()
        }
        for side, by_name in found.items()
    }
    ratios = {n: round(sides["edge"][n]["p50_ms"] / at["p50_ms"], 3) for n, at in sides["centre"].items()}
    return {**sides, "ratios": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.edge_latency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        running_up((*SIM, "--no-durable", "--leaves", address), {"HEADRACE_SIM": "step=1000"}) as (_, centre),
        running_up(("--no-durable", "--model", "none", "--leaf", f"nats-leaf://{address}")) as (_, edge),
    ):
        figures = asyncio.run(measured({"centre": centre, "edge": edge}, given.rounds))
    report = {"cpu": cpu_name(), "cores": os.cpu_count(), "rounds": given.rounds, **figures}
    print(json.dumps(report, indent=1))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
