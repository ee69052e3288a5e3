"""Sends 200,000 short requests over NATS and HTTP while clients cancel and vanish at random moments, and
compares what each process holds: memory over the later half, and at the end files, subscriptions, blocks and
slots.

    python -m loadtest.churn --per-second 250 --out churn.json

`headrace up` with the simulated engine and its default services. Each process has: resident, proportional and
anonymous memory, objects of Python's allocator, bytes in use of the C library's, open files. Resident
memory has pages of files, too, which the kernel maps when it likes. Anonymous memory that grows while what is
allocated does not is fragmentation. A process fails if over the later half of the requests its anonymous
memory grows by more than --growth-pct and than an arena of Python's allocator, 1 MiB, and what it has
allocated by more than --growth-pct. Detokenizers and the scheduler know the requests of the last minute,
so the rate should not change: --per-second is below what the machine can answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.bench.machine import circumstances
from loadtest.churn import heap
from loadtest.churn.clients import Traffic
from loadtest.churn.watch import Watch, line, monitoring_url
from loadtest.command_line import parser_of, report
from loadtest.fleet import connected, running_up
from loadtest.leaks import settle
from shared.processes import bind

COUNTS = {"tokenizer": 2, "scheduler": 1, "executor": 1, "kv_offload": 1, "detokenizer": 2}
SETTLE_S = 60
REST_S, RESTS = 12.0, 3  # until the broker and the services have noticed the last clients that are gone
ARENA_BYTES = 1 << 20  # what Python's allocator takes at once


async def run(args: argparse.Namespace, up_pid: int, urls: tuple[str, str], folder: Path) -> dict[str, Any]:
    """All requests; the figures."""
    clients = Traffic(*urls, per_second=args.per_second)
    watch = Watch(up_pid, folder, monitoring_url(up_pid))
    await settled(urls[0])
    await clients.learn()
    await watch.sample(0)
    began_s = time.monotonic()
    running = asyncio.create_task(clients.run(args.seed, args.requests, args.clients))
    every = max(args.requests // args.samples, 1)
    for at in range(every, args.requests, every):
        await asyncio.wait(
            [running, asyncio.ensure_future(clients.until(at))], return_when=asyncio.FIRST_COMPLETED
        )
        await watch.sample(clients.done)
    await running
    took_s = time.monotonic() - began_s
    held: list[str] = []
    for _ in range(RESTS):
        await asyncio.sleep(REST_S)
        try:
            await settled(urls[0])
        except AssertionError as error:
            held.append(str(error))
        await watch.sample(args.requests)
        if not kept(watch):
            break
    return {
        "seconds": round(took_s, 1),
        "requests_per_s": round(args.requests / took_s, 1),
        "ends": dict(sorted(clients.ends.items())),
        "wrong": clients.wrong[:20],
        "held_at_the_end": held + kept(watch),
        "processes": (found := processes(watch, args.growth_pct)),
        "grown": [f"{each['process']} {pid}" for pid, each in found.items() if each["grows"]],
        "broker": watch.broker,
        "samples": {f"{watch.names[pid]} {pid}": of for pid, of in watch.samples.items()},
    }


async def settled(url: str) -> None:
    """Return when every service is there and nothing is held. Raises AssertionError."""
    async with connected(url) as client:
        await settle(client.bus, COUNTS, SETTLE_S)


def processes(watch: Watch, growth_pct: float) -> dict[int, dict[str, Any]]:
    """How much each process that ran all the time grew over the later half."""
    found = {}
    for pid, samples in watch.samples.items():
        if len(samples) < len(watch.broker):
            continue
        later = [each for each in samples if each["requests"] >= samples[-1]["requests"] / 2]
        facts: dict[str, Any] = {"process": watch.names[pid]}
        grows = []
        for name in ("rss", "pss", "anonymous", "blocks", "malloc_bytes"):
            if name not in later[0]:
                continue
            fit = line([(each["requests"], float(each[name])) for each in later])
            facts[name] = {
                "first": samples[0][name], "half": round(fit.first), "last": round(fit.last),
                "per_1000_requests": round(fit.per_1000, 1), "growth_pct": round(fit.growth_pct, 2),
            }  # fmt: skip
            if fit.growth_pct > growth_pct and (name != "anonymous" or fit.last - fit.first > ARENA_BYTES):
                grows.append(name)
        allocated = {"blocks", "malloc_bytes"} & later[0].keys()
        facts["fds"] = [samples[0]["fds"], samples[-1]["fds"]]
        facts["grows"] = "anonymous" in grows and (not allocated or bool(allocated.intersection(grows)))
        found[pid] = facts
    return found


def kept(watch: Watch) -> list[str]:
    """What the requests have left open: files of a process, connections and subscriptions of the broker."""
    first, last = watch.broker[0], watch.broker[-1]
    found = [
        f"{name}: {first[name]}, now {last[name]}"
        for name in first
        if name != "requests" and last[name] > first[name]
    ]
    for pid, samples in watch.samples.items():
        if samples[-1]["fds"] > samples[0]["fds"]:
            found.append(f"{watch.names[pid]} {pid}: {samples[0]['fds']} files, now {samples[-1]['fds']}")
    return found


def main() -> int:
    """Run, print, write; 1 if a process has grown, an answer is wrong, or something is held."""
    parser = parser_of("churn", __doc__, up=True)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--per-second", type=float, default=0, help="requests begun in a second, at most")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--step-us", type=int, default=1_000)
    parser.add_argument("--growth-pct", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log", default=os.devnull, help="a file for the services' log")
    args = parser.parse_args()
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    sim = ("--backend", "sim", "--sim", f"step={args.step_us},token=20")
    flags = [*sim, f"--http=127.0.0.1:{port}", *args.up]
    with tempfile.TemporaryDirectory() as folder:
        heap.sitecustomize(Path(folder))
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"PYTHONPATH": os.pathsep.join(paths)}
        with running_up(flags, env, args.log) as (up_pid, url):
            found = asyncio.run(run(args, up_pid, (url, f"http://127.0.0.1:{port}"), Path(folder)))
    arguments = {k: str(v) for k, v in vars(args).items() if k not in ("out", "log")}
    document = {"arguments": arguments, "circumstances": circumstances(), **found}
    shown = {k: v for k, v in document.items() if k not in ("broker", "samples")}
    report(document, args.out, shown=shown)
    return 1 if found["wrong"] or found["held_at_the_end"] or found["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
