"""Tokens a second, and the CPU of each service, with 1 to 16 simulated executors of one `headrace up`.

    python -m loadtest.many_executors --out many_executors.json

Each executor has 64 rows and steps of 10 ms. Clients over NATS, as many as there are rows, send plain
requests of 200 tokens in a closed loop, which end at different times. `of_ideal`: of what steps of exactly
10 ms would give. Needs a quiet machine with more cores than executors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.durable import MODEL
from loadtest.durable_cost import SETTLE_S
from loadtest.fleet import cpu_name
from loadtest.http_readers import cpu_us
from loadtest.running_up import running_up
from shared.client.client import Client
from shared.nats.bus import NatsBus

EXECUTORS = (1, 2, 4, 8, 16)
ROWS, STEP_US, TOKENS = 64, 10_000, 200
KINDS = ("tokenizer", "scheduler", "executor", "detokenizer", "nats-server")
IMPORT_S, WARM_S, PROCESSES = 2.0, 4.0, 4  # of the clients: one would be late with many frames


def load(
    url: str, clients: int, seconds: float, pids: dict[str, list[int]]
) -> tuple[float, dict[str, float]]:
    """Tokens a second of a closed loop after WARM_S, and the cores that services used, by kind."""
    begins_s = time.time() + IMPORT_S + WARM_S
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        shares = [range(part, clients, PROCESSES) for part in range(PROCESSES)]
        found = [pool.submit(run_clients, url, share, begins_s, seconds) for share in shares]
        time.sleep(begins_s - time.time())
        before, idle_before, steps_before = cpu_of(pids), *idle_of(url)
        time.sleep(max(begins_s + seconds - time.time(), 0))
        after, idle_us, steps = cpu_of(pids), *idle_of(url)
        tokens = sum(each.result() for each in found)
    return {
        "tokens_s": round(tokens / seconds),
        "idle_us_a_step": round((idle_us - idle_before) / (steps - steps_before), 1),
        "cores": {kind: round((after[kind] - before[kind]) / 1e6 / seconds, 3) for kind in pids},
    }


def idle_of(url: str) -> tuple[int, int]:
    """Idle time of all executors' devices so far, in us, and their steps."""
    command = [sys.executable, "-m", "services.launcher.cli", "status", "--json", "--nats-url", url]
    services = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["services"]
    executors = [each for each in services if "device_idle_us" in each]
    return sum(e["device_idle_us"] for e in executors), sum(e["steps"] for e in executors)


def run_clients(url: str, numbers: range, begins_s: float, seconds: float) -> int:
    """Run these clients in this process: the tokens of the answers that ended in the interval."""
    return asyncio.run(_clients(url, numbers, begins_s, seconds))


async def _clients(url: str, numbers: range, begins_s: float, seconds: float) -> int:
    bus = await NatsBus.connect(url, timeout_s=10)
    client, tokens = await Client.open(bus), 0

    async def one(number: int) -> None:
        nonlocal tokens
        asked = 1 + 37 * number % TOKENS  # at first: so the clients' answers end at different times
        while True:
            body = {"model": MODEL, "prompt": f"client {number}", "max_tokens": asked, "ignore_eos": True}
            await client.complete(body, timeout_s=60)
            tokens += asked * (begins_s <= time.time() < begins_s + seconds)
            asked = TOKENS

    running = [asyncio.create_task(one(number)) for number in numbers]
    await asyncio.sleep(begins_s + seconds - time.time())
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await bus.drain()
    return tokens


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
        figures = load(url, executors * ROWS, seconds, pids)
    ideal = executors * ROWS * 1e6 / STEP_US
    return {"executors": executors, "of_ideal": round(figures["tokens_s"] / ideal, 3), **figures}


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
