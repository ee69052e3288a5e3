"""Tokens a second, and the CPU of each service, with 1 to 16 simulated executors of one `headrace up`.

    python -m loadtest.many_executors --out many_executors.json

Each executor has 64 rows and steps of 10 ms. Clients over NATS, as many as there are rows, send plain
requests of 200 tokens in a closed loop. `of_ideal`: of what steps of exactly 10 ms would give. Needs a quiet
machine with more cores than executors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.durable import MODEL
from loadtest.durable_cost import SETTLE_S
from loadtest.fleet import cpu_name
from loadtest.http_readers import cpu_us
from loadtest.running_up import running_up
from shared.client import Client
from shared.nats.bus import NatsBus

EXECUTORS = (1, 2, 4, 8, 16)
ROWS, STEP_US, TOKENS = 64, 10_000, 200
KINDS = ("tokenizer", "scheduler", "executor", "detokenizer", "nats-server")
WARM_S, PROCESSES = 4.0, 4  # connections of the clients: one would be late with many frames


async def load(
    url: str, clients: int, seconds: float, pids: dict[str, list[int]]
) -> tuple[float, dict[str, float]]:
    """Tokens a second of a closed loop after WARM_S, and the cores that services used, by kind."""
    buses = [await NatsBus.connect(url, timeout_s=10) for _ in range(PROCESSES)]
    opened = [await Client.open(bus) for bus in buses]
    tokens, counts = 0, False

    async def one(number: int) -> None:
        nonlocal tokens
        body = {"model": MODEL, "prompt": f"client {number}", "max_tokens": TOKENS, "ignore_eos": True}
        while True:
            await opened[number % PROCESSES].complete(body, timeout_s=60)
            tokens += TOKENS * counts

    running = [asyncio.create_task(one(number)) for number in range(clients)]
    await asyncio.sleep(WARM_S)
    counts, began_s, before = True, time.monotonic(), cpu_of(pids)
    await asyncio.sleep(seconds)
    took_s, after = time.monotonic() - began_s, cpu_of(pids)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for bus in buses:
        await bus.drain()
    return tokens / took_s, {kind: round((after[kind] - before[kind]) / 1e6 / took_s, 3) for kind in pids}


def cpu_of(pids: dict[str, list[int]]) -> dict[str, int]:
    """CPU time of the processes of each kind so far, in us."""
    return {kind: sum(cpu_us(of_kind).values()) for kind, of_kind in pids.items()}


def measure(executors: int, seconds: float) -> dict[str, Any]:
    """One arm."""
    fleet = ("--executors", f"{executors}", "--slots", f"{ROWS}", "--l1", "off")
    flags = ("--no-durable", "--backend", "sim", *fleet)
    with running_up((*flags, "--sim", f"step={STEP_US}"), {}) as (pid, url):
        time.sleep(SETTLE_S)
        pids = {kind: faults.pids_of(pid, kind) for kind in KINDS}
        tokens_s, cores = asyncio.run(load(url, executors * ROWS, seconds, pids))
    ideal = executors * ROWS * 1e6 / STEP_US
    figures = {"tokens_s": round(tokens_s), "of_ideal": round(tokens_s / ideal, 3), "cores": cores}
    return {"executors": executors, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.many_executors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [measure(n, given.seconds) for _ in range(given.rounds) for n in EXECUTORS]
    report = {"cpu": cpu_name(), "cores": os.cpu_count(), "rows": ROWS, "step_us": STEP_US, "arms": rows}
    print(json.dumps(report, indent=1))
    if given.out:
        given.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
