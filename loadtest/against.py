"""Load on a fleet that runs already, and what its clients saw: the figures of one table.

    python -m loadtest.against --requests 64 --concurrency 8 --tokens 32

Where the server is: setting `nats_url` (HEADRACE_NATS_URL, or the file in HEADRACE_CONFIG); with a tenant's
credentials the requests are that tenant's. The seed draws the prompts. Exit status 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from loadtest.storm import WORDS
from services.launcher.connect import Target, connected, find_target
from shared.client import Client
from shared.config import load
from shared.errors import HeadraceError


@dataclass(slots=True)
class Seen:
    """One request, from its client's side."""

    started_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Until the first text came."""
        return (self.first_s - self.started_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Between two tokens after the first."""
        return (self.ended_s - self.first_s) * 1e3 / max(self.tokens - 1, 1)


async def send(client: Client, body: dict[str, Any]) -> Seen:
    """One streamed request."""
    seen = Seen(time.monotonic())
    try:
        async for frame in client.stream(body):
            if frame["type"] == "delta" and not seen.first_s:
                seen.first_s = time.monotonic()
            if frame["type"] == "done":
                seen.tokens = frame["usage"]["completion_tokens"]
                seen.prompt_tokens = frame["usage"]["prompt_tokens"]
    except HeadraceError as error:
        seen.error = f"{error.code} {error.message}"
    seen.ended_s = time.monotonic()
    return seen


async def run(target: Target, given: argparse.Namespace) -> dict[str, Any]:
    """All requests, `concurrency` at a time; the table."""
    rng = random.Random(given.seed)
    bodies = (
        {
            "model": target.model,
            "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=given.words))}],
            "max_tokens": given.tokens,
            "ignore_eos": True,
            "seed": i,
        }
        for i in range(given.requests)
    )
    async with connected(target.nats_url) as bus:
        client, all_seen = await Client.open(bus, target.tenant), list[Seen]()

        async def one_client(queue: Iterator[dict[str, Any]]) -> None:
            for body in queue:
                all_seen.append(await send(client, body))

        started_s = time.monotonic()
        await asyncio.gather(*(one_client(bodies) for _ in range(given.concurrency)))
        return table(all_seen, time.monotonic() - started_s)


def table(all_seen: list[Seen], took_s: float) -> dict[str, Any]:
    """What `vllm bench serve` prints, by its names."""
    good = [seen for seen in all_seen if not seen.error]
    figures: dict[str, Any] = {
        "Successful requests": len(good),
        "Failed requests": len(all_seen) - len(good),
        "Benchmark duration (s)": round(took_s, 2),
        "Total input tokens": sum(seen.prompt_tokens for seen in good),
        "Total generated tokens": sum(seen.tokens for seen in good),
        "Request throughput (req/s)": round(len(good) / took_s, 2),
        "Output token throughput (tok/s)": round(sum(seen.tokens for seen in good) / took_s, 2),
    }
    for name, values in (("TTFT", [s.ttft_ms for s in good]), ("TPOT", [s.tpot_ms for s in good])):
        if len(values) > 1:
            figures[f"Mean {name} (ms)"] = round(mean(values), 2)
            figures[f"Median {name} (ms)"] = round(median(values), 2)
            figures[f"P99 {name} (ms)"] = round(quantiles(values, n=100, method="inclusive")[-1], 2)
    return figures | {"errors": sorted({seen.error for seen in all_seen if seen.error})}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.against", description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--words", type=int, default=40, help="of a prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    given = parser.parse_args()
    figures = asyncio.run(run(find_target(load()), given))
    for name, value in figures.items():
        print(f"{name + ':':<34}{value}")
    if given.json:
        given.json.write_text(
            json.dumps({"settings": {**vars(given), "json": ""}, **figures}, indent=2) + "\n"
        )
    return 1 if figures["Failed requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
