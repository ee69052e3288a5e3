"""What tracing costs: throughput with every request traced against none, in alternating pairs.

    python -m loadtest.trace_cost --out trace_cost.json

Two pipelines of the same services run side by side, each on its own nats-server: one sends its spans to a
collector, a third process. They are loaded in turn, and the order changes with each pair. The engine is
simulated, a step takes 5 ms; answers have 96 to 160 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.case import PROMPT_TOKENS, Case
from loadtest.fleet import MODEL, Fleet, cpu_name, until_ready
from loadtest.step_overhead import sim_env
from services.launcher.supervisor import die_with_parent
from shared.client import Client
from shared.nats.bus import NatsBus


@dataclass(frozen=True)
class Load:
    """A closed loop: `concurrency` clients until `requests` are answered."""

    requests: int
    concurrency: int
    stream: bool


@dataclass
class Arm:
    """One pipeline under measurement."""

    fleet: Fleet
    client: Client

    async def run(self, load: Load, seed: int) -> tuple[float, dict[str, float]]:
        """Tokens per second over the whole load, and CPU µs per request of each process."""
        rng = random.Random(seed)
        lengths = [rng.randint(96, 160) for _ in range(load.requests)]
        todo = iter(enumerate(lengths))
        before, started = self.fleet.cpu_us(), time.monotonic()

        async def work() -> None:
            for i, tokens in todo:
                await self._ask(i, tokens, load.stream)

        await asyncio.gather(*(work() for _ in range(load.concurrency)))
        took_s, after = time.monotonic() - started, self.fleet.cpu_us()
        cpu = {name: round((after[name] - before[name]) / load.requests, 1) for name in after}
        return sum(lengths) / took_s, cpu

    async def _ask(self, seed: int, tokens: int, stream: bool) -> None:
        prompt = [seed % 1000 + 300] * PROMPT_TOKENS
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": seed}
        if stream:
            async for _ in self.client.stream(body):
                pass
        else:
            await self.client.complete(body)


async def measure(load: Load, pairs: int, step_us: int) -> dict[str, object]:
    """Alternating pairs; the ratio of each is throughput on / off."""
    collector, url = start_collector()
    rows, cpu = [], {}
    async with AsyncExitStack() as stack:
        stack.callback(collector.kill)
        case = Case(step_us, 2, load.concurrency, 128, load.stream)
        arms = {
            "off": await start(stack, Fleet({**sim_env(case), "OTEL_SDK_DISABLED": "true"})),
            "on": await start(stack, Fleet({**sim_env(case), "OTEL_EXPORTER_OTLP_ENDPOINT": url})),
        }
        for arm in arms.values():
            await arm.run(load, 0)
        for pair in range(pairs):
            order = ("off", "on") if pair % 2 == 0 else ("on", "off")
            found = {name: await arms[name].run(load, pair + 1) for name in order}
            rows.append({name: round(found[name][0], 1) for name in ("off", "on")})
            cpu = {name: found[name][1] for name in ("off", "on")}
            print(f"pair {pair + 1}: {rows[-1]}, ratio {rows[-1]['on'] / rows[-1]['off']:.4f}", flush=True)
        await asyncio.sleep(2)  # the last spans
    assert collector.stdout is not None
    spans = int(collector.stdout.read().split()[-1])
    return summary(load, rows, {"spans": spans, "cpu_us_per_request": cpu})


def start_collector() -> tuple[subprocess.Popen[str], str]:
    """A collector in a process of its own, and its URL."""
    collector = subprocess.Popen(
        [sys.executable, "-m", "loadtest.otlp_receiver", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )
    assert collector.stdout is not None
    return collector, collector.stdout.readline().strip()


async def start(stack: AsyncExitStack, fleet: Fleet) -> Arm:
    """A pipeline that answers; it stops with the stack."""
    stack.push_async_callback(asyncio.to_thread, fleet.stop)
    bus = await NatsBus.connect(fleet.server.url, name="bench")
    stack.push_async_callback(bus.drain)
    client = await Client.open(bus)
    await until_ready(client)
    return Arm(fleet, client)


def summary(load: Load, rows: list[dict[str, float]], more: dict[str, object]) -> dict[str, object]:
    """The cost in percent of throughput, by pair: median and spread."""
    costs = sorted(100 * (1 - row["on"] / row["off"]) for row in rows)
    return {
        **asdict(load),
        "cost_percent": round(statistics.median(costs), 2),
        "cost_percent_min": round(costs[0], 2),
        "cost_percent_max": round(costs[-1], 2),
        "tokens_per_second_off": statistics.median(row["off"] for row in rows),
        "tokens_per_second_on": statistics.median(row["on"] for row in rows),
        **more,
        "pairs": rows,
    }


def main() -> None:
    """Measure plain and streamed answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=5)
    parser.add_argument("--only", choices=["plain", "stream"], help="one of the two")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = []
    for stream in (False, True):
        if args.only is None or stream == (args.only == "stream"):
            load = Load(args.requests, args.concurrency, stream)
            cases.append(asyncio.run(measure(load, args.pairs, int(args.step_ms * 1000))))
            print(
                json.dumps({name: value for name, value in cases[-1].items() if name != "pairs"}), flush=True
            )
    if args.out:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "cpu": cpu_name()}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
