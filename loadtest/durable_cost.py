"""What durable requests cost: of the fast path beside them, and of each one.

    python -m loadtest.durable_cost --out durable_cost.json

`fast path`: TTFT and tokens/s of a closed loop of 32 clients over NATS, in turn on a fleet without a keeper
(`off`), with an idle one (`idle`), and with 500 durable requests that wait for a model without an executor
(`queued`): medians, and each round's ratio to `off`. `each`: latency of `submit` alone and 64 at a time, and
CPU of keeper and nats-server for a durable request of 8 and of 200 tokens, over that of a plain one.
The engine is simulated: times are those of the services.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from loadtest import faults
from loadtest.command_line import parser_of, report
from loadtest.durable import messages
from loadtest.fleet import MODEL, SIM, Body, connected, machine, running_up
from loadtest.processes import cpu_s
from shared.client.client import Client
from shared.nats import subjects

ARMS = {"off": ("--no-durable",), "idle": ("--durable",), "queued": ("--durable",)}
QUEUED = 500
GHOST = "ghost"  # a model that has a tokenizer and no executor
SETTLE_S = 2.0  # after ready: the last services start half a second later
LATENCIES, AT_ONCE, COUNTED = 300, 64, 1000  # requests of a measurement


@contextmanager
def ghost(url: str) -> Iterator[None]:
    """A tokenizer and a scheduler of a model without an executor."""
    env = {**os.environ, "HEADRACE_NATS_URL": url, "HEADRACE_MODEL_NAME": GHOST}
    command = [sys.executable, "-m", "services.launcher.cli", "serve"]
    services = [
        subprocess.Popen([*command, kind], env=env, stderr=subprocess.DEVNULL)
        for kind in ("tokenizer", "scheduler")
    ]
    try:
        yield
    finally:
        for service in services:
            service.terminate()
            service.wait(30)


async def queue(url: str) -> None:
    """Submit requests that nothing answers."""
    async with connected(url) as client:
        async with asyncio.timeout(30):
            while GHOST not in [m["id"] for m in (await client.request(subjects.MODELS))["data"]]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for number in range(QUEUED):
            body = {"prompt": f"number {number}", "max_tokens": 8, "slo_class": "batch"}
            await client.request(subjects.submit("public", GHOST), body)


def bench(url: str, seconds: float) -> Body:
    """Figures of a closed loop."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run(
            [
                sys.executable, "-m", "loadtest.bench", "run", "--url", url, "--model", MODEL,
                "--max-concurrency", "32", "--num-prompts", str(int(24 * seconds)), "--num-warmups", "32",
                "--input-len", "64", "--output-len", "128", "--json", out.name,
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found: Body = json.loads(Path(out.name).read_text())["runs"][0]["figures"]
    return found


def fast_path(rounds: int, seconds: float) -> Body:
    """The figures of each arm, in turn."""
    found: dict[str, list[Body]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    for number in range(rounds):
        for arm in order[number % 3 :] + order[: number % 3]:
            with running_up((*SIM, *ARMS[arm]), {"HEADRACE_SIM": "step=5000,token=20"}) as (_, url):
                time.sleep(SETTLE_S)
                if arm != "queued":
                    found[arm].append(bench(url, seconds))
                    continue
                with ghost(url):
                    asyncio.run(queue(url))
                    found[arm].append(bench(url, seconds))
            print(arm, json.dumps(found[arm][-1])[:200], file=sys.stderr)
    return dict(found)


def cpu_of(pid: int) -> Body:
    """CPU so far of keeper and nats-server, µs."""
    kinds = ("keeper", "nats-server")
    return {kind: 1e6 * cpu_s(*faults.pids_of(pid, kind)) for kind in kinds}


async def latencies(client: Client, at_once: int) -> Body:
    """The latencies of submits, in ms, and their rate."""
    taken: list[float] = []

    async def some(share: int) -> None:
        for _ in range(share):
            began = time.perf_counter()
            await client.request(subjects.submit("public", MODEL), {"prompt": "Hi", "max_tokens": 1})
            taken.append(1e3 * (time.perf_counter() - began))

    began = time.perf_counter()
    await asyncio.gather(*(some(LATENCIES // at_once) for _ in range(at_once)))
    rate = len(taken) / (time.perf_counter() - began)
    taken.sort()
    return {
        "p50_ms": round(median(taken), 2), "p99_ms": round(taken[int(0.99 * len(taken))], 2),
        "per_second": round(rate),
    }  # fmt: skip


async def cpu_each(client: Client, pid: int, tokens: int) -> Body:
    """CPU of the two processes for a durable request and for a plain one of so many tokens, µs."""
    body = {"prompt": "Hi", "max_tokens": tokens, "ignore_eos": True}
    found: Body = {}
    for kind in ("durable", "plain"):
        before = cpu_of(pid)
        room = asyncio.Semaphore(AT_ONCE)

        async def one(kind: str = kind, room: asyncio.Semaphore = room) -> None:
            async with room:
                if kind == "plain":
                    await client.complete({**body, "model": MODEL})
                else:
                    await client.request(subjects.submit("public", MODEL), body)

        await asyncio.gather(*(one() for _ in range(COUNTED)))
        while (await messages(client.bus))[subjects.WORK_STREAM]:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.1)
        after = cpu_of(pid)
        found[kind] = {name: round((after[name] - before[name]) / COUNTED, 1) for name in after}
    return found


async def each(pid: int, url: str) -> Body:
    """The cost of each durable request."""
    async with connected(url) as client:
        await latencies(client, 1)  # warm
        found: Body = {"submit": await latencies(client, 1), "submit_64": await latencies(client, AT_ONCE)}
        for tokens in (8, 200):
            found[f"cpu_us_{tokens}_tokens"] = await cpu_each(client, pid, tokens)
    return found


def compared(runs: list[Body], off: list[Body], name: str) -> list[float]:
    """A figure of each round over that of the same round without a keeper."""
    return [round(one[name] / other[name], 4) for one, other in zip(runs, off, strict=True)]


def main() -> None:
    """Both parts."""
    parser = parser_of("durable_cost", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10, help="of a round, about")
    given = parser.parse_args()
    found: Body = machine()
    with running_up((*SIM, "--durable"), {"HEADRACE_SIM": "step=1000"}) as (pid, url):
        time.sleep(SETTLE_S)
        found["each"] = asyncio.run(each(pid, url))
    found["fast_path"] = runs = fast_path(given.rounds, given.seconds)
    ratios = {
        name: {arm: compared(runs[arm], runs["off"], path) for arm in runs if arm != "off"}
        for name, path in (("ttft", "median_ttft_ms"), ("tokens/s", "output_throughput"))
    }
    medians = {n: {a: median(r) for a, r in arms.items()} for n, arms in ratios.items()}
    report({**found, "ratios": ratios, "median_ratios": medians}, given.out)


if __name__ == "__main__":
    main()
