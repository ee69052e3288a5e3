"""Sends thousands of requests while clients cancel, vanish and err, and in a second part services die.

    python -m loadtest.soak --requests 10000 --out soak.json

Part one, *steady*: no service dies; the memory of every process is sampled, and its slope after warm-up is
the result. Part two, *faults*: every few seconds a service or the server is killed or stopped. In both
every request must end, every answer must be that of its seed, and at the end nothing is held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import faults
from loadtest.leaks import leaks, settle
from loadtest.memory import MemoryWatch
from loadtest.running_up import running_up
from loadtest.storm import Ask, Outcome, Storm, mixed, oracle_key
from shared.client.client import Client
from shared.nats.bus import NatsBus

MODEL = "smollm2-135m-instruct"
COUNTS = {"tokenizer": 2, "scheduler": 1, "executor": 2, "kv_offload": 1, "detokenizer": 2}
DEADLINE_S = 60
SETTLE_S = 60
SAMPLE_S = 2.0
KINDS_OF_REQUEST = 200  # distinct requests; each one's answer is known from an undisturbed run
BAD = [
    {"messages": "not a list"},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0},
    {"prompt": "hi", "stop": ["x"] * 10_000},
]


@dataclass
class Tally:
    """What became of the requests of one part."""

    ends: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)  # of errors
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0


def house(args: argparse.Namespace) -> AbstractContextManager[tuple[int, str]]:
    """A running `headrace up`: (process id, server URL)."""
    flags = [f"--{kind}s={COUNTS[kind]}" for kind in ("tokenizer", "executor", "detokenizer")]
    env = {"HEADRACE_SIM": f"step={args.step_us},token=20"}
    return running_up(["--backend", "sim", *flags], env, args.log)


def traffic(rng: random.Random, count: int) -> Iterator[Ask]:
    """`count` requests: mostly read to the end, some cancelled, left by their client, or wrong."""
    known = mixed(random.Random(1), KINDS_OF_REQUEST, MODEL, timeout_s=DEADLINE_S)
    for _ in range(count):
        ask, dice = rng.choice(known), rng.random()
        if dice < 0.05:
            yield Ask({**rng.choice(BAD), "model": MODEL}, "err")
        elif dice < 0.15:
            yield Ask({**ask.body, "stream": True}, "cancel")
        elif dice < 0.20:
            yield Ask({**ask.body, "stream": rng.random() < 0.5}, "leave")
        else:
            yield ask


async def answers(client: Client) -> dict[str, tuple[dict[int, str], int]]:
    """The answer of every known request, from a quiet house."""
    storm = Storm(client, DEADLINE_S)
    await storm.run(mixed(random.Random(1), KINDS_OF_REQUEST, MODEL, timeout_s=DEADLINE_S), 16)
    assert all(o.end == "answer" for o in storm.outcomes)
    return {oracle_key(o.ask): o.answer for o in storm.outcomes}


def judge(outcome: Outcome, right: dict[str, tuple[dict[int, str], int]], tally: Tally) -> None:
    """Count an outcome; keep what must not be."""
    behaviour = outcome.ask.behaviour
    end = f"error {outcome.code}" if outcome.end == "error" else outcome.end
    tally.ends[f"{behaviour}: {end}"] += 1
    tally.longest_s = max(tally.longest_s, outcome.seconds)
    if outcome.end == "error" and outcome.code != 499 and behaviour != "err":
        tally.messages[re.sub(r"\b[0-9a-f]{16,}\b|\d+", "…", outcome.message)[:120]] += 1
    answered = outcome.end == "answer" and behaviour != "err"
    if answered and outcome.answer != right[oracle_key(outcome.ask)]:
        tally.wrong.append(f"another answer: {outcome}")
    if behaviour == "err" and (outcome.end, outcome.code // 100) not in (
        ("error", 4),
        ("error", 5),
        ("silence", 0),
    ):
        tally.wrong.append(f"a bad request was not refused: {outcome}")
    if outcome.end == "silence" and outcome.accepted:
        tally.wrong.append(f"an accepted request never ended: {outcome}")


async def break_things(up_pid: int, rng: random.Random, tally: Tally, every_s: float) -> None:
    """A fault every `every_s` seconds on average, one at a time, until cancelled."""
    while True:
        await asyncio.sleep(rng.uniform(0.7, 1.3) * every_s)
        victim = rng.choice([*COUNTS, "nats-server"])
        pids = faults.pids_of(up_pid, victim)
        if not pids:
            continue
        pid = rng.choice(pids)
        if rng.random() < 0.7:
            faults.kill(pid)
            tally.faults[f"kill {victim}"] += 1
        else:
            tally.faults[f"stop {victim}"] += 1
            await faults.stop(pid, rng.uniform(1, 6))


async def part(url: str, up_pid: int, args: argparse.Namespace, *, broken: bool) -> dict[str, Any]:
    """Run one part; its figures."""
    rng, tally, watch = random.Random(args.seed + broken), Tally(), MemoryWatch()
    bus = await NatsBus.connect(url, timeout_s=10)
    client = await Client.open(bus)
    await settle(bus, COUNTS, SETTLE_S)
    right = await answers(client)
    storm = Storm(client, DEADLINE_S + 5, url)
    storm.on_outcome = lambda outcome: judge(outcome, right, tally)
    storm.keep = False
    started_at = time.monotonic()
    side = [asyncio.create_task(_watch(up_pid, watch))]
    if broken:
        side.append(asyncio.create_task(break_things(up_pid, rng, tally, args.every_s)))
    await storm.run(traffic(rng, args.requests), args.clients)
    tally.seconds = time.monotonic() - started_at
    for task in side:
        task.cancel()
    held = leaks(await settle(bus, COUNTS, SETTLE_S), COUNTS)
    after = await client.complete({"model": MODEL, "prompt": "still there?", "max_tokens": 4}, timeout_s=30)
    assert after["choices"]
    await bus.drain()
    return {**_report(tally, watch, broken), "held_at_the_end": held}


async def _watch(up_pid: int, watch: MemoryWatch) -> None:
    while True:
        named = {pid: kind for kind in [*COUNTS, "nats-server"] for pid in faults.pids_of(up_pid, kind)}
        watch.sample({**named, up_pid: "up"})
        await asyncio.sleep(SAMPLE_S)


def _report(tally: Tally, watch: MemoryWatch, broken: bool) -> dict[str, Any]:
    memory = [
        {
            "process": growth.name,
            "first_mb": round(growth.samples[0][1] / 1e6, 1),
            "last_mb": round(growth.samples[-1][1] / 1e6, 1),
            "percent_per_min": round(growth.percent_per_min(), 2),
        }
        for growth in watch.growth.values()
        if not broken and len(growth.samples) > 5
    ]
    return {
        "seconds": round(tally.seconds, 1),
        "requests_per_s": round(sum(tally.ends.values()) / tally.seconds, 1),
        "ends": dict(sorted(tally.ends.items())),
        "errors": dict(tally.messages.most_common()),
        "faults": dict(sorted(tally.faults.items())),
        "longest_s": round(tally.longest_s, 1),
        "wrong": tally.wrong[:20],
        "memory": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, help="of each part")
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--step-us", type=int, default=5_000)
    parser.add_argument("--every-s", type=float, default=6.0, help="seconds between faults of part two")
    parser.add_argument("--parts", nargs="+", choices=["steady", "faults"], default=["steady", "faults"])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log", default=os.devnull, help="file for what the services say")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "arguments": {k: str(v) for k, v in vars(args).items() if k not in ("out", "log")}
    }
    with house(args) as (up_pid, url):
        for name in args.parts:
            figures[name] = asyncio.run(part(url, up_pid, args, broken=name == "faults"))
            print(json.dumps({name: figures[name]}, indent=2), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if any(figures[name]["wrong"] for name in args.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
