"""Measures what the broker adds to a step: SimExecutor over a real nats-server against the same engine and
scheduler without any bus, in turn, in one run.

    python -m loadtest.step_overhead --out step_overhead.json

The step period is the time between the starts of successive steps that carry every row, by the
executor's timestamps. `excess` is how much longer the median period is than in the paired run
without a bus. The tap that reads the results is one more subscriber of the broker.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.bare_steps import run_bare
from loadtest.case import PROMPT_TOKENS, Case
from loadtest.fleet import MODEL, Fleet, cpu_name, until_ready
from shared import codec
from shared.client.client import Client
from shared.messages import StepResult
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery


@dataclass
class Round:
    """Medians of one paired round, µs."""

    bare_us: float
    nats_us: float

    @property
    def excess_percent(self) -> float:
        return 100 * (self.nats_us / self.bare_us - 1)


def sim_env(case: Case) -> dict[str, str]:
    """The settings of a fleet for one arm."""
    return {
        "HEADRACE_BACKEND": "sim",
        "HEADRACE_SIM": f"step={case.step_us}",
        "HEADRACE_WINDOW": str(case.window),
        "HEADRACE_STEP_TOKENS": "8192",
    }


async def measure(case: Case, rounds: int) -> dict[str, object]:
    """Paired rounds of one case."""
    fleet = Fleet(sim_env(case))
    try:
        bus = await NatsBus.connect(fleet.server.url, name="bench")
        client = await Client.open(bus)
        await until_ready(client)
        tapped: list[StepResult] = []
        await bus.subscribe("hr.bench.scheduler.*.in.StepResult", lambda d: tap(d, tapped))
        found: list[Round] = []
        cpu_per_step: dict[str, float] = {}
        for _ in range(rounds):
            bare = median_period(await asyncio.to_thread(run_bare, case), case.rows)
            tapped.clear()
            before = fleet.cpu_us()
            await load(client, case)
            after = fleet.cpu_us()
            found.append(Round(bare, median_period(tapped, case.rows)))
            cpu_per_step = {k: round((after[k] - before[k]) / len(tapped), 1) for k in after}
        await bus.drain()
    finally:
        await asyncio.to_thread(fleet.stop)
    return summary(case, found, cpu_per_step)


def median_period(results: list[StepResult], rows: int) -> float:
    """Median time between the starts of successive full steps, µs."""
    starts = [(r.step, r.start_wall_us) for r in results if len(r.ids) == rows]
    pairs = itertools.pairwise(starts)
    return statistics.median(b[1] - a[1] for a, b in pairs if b[0] == a[0] + 1)


def summary(case: Case, rounds: list[Round], cpu_per_step: dict[str, float]) -> dict[str, object]:
    """Figures of one case: medians over rounds, and their spread."""
    excess = sorted(r.excess_percent for r in rounds)
    return {
        **asdict(case),
        "bare_period_us": round(statistics.median(r.bare_us for r in rounds), 1),
        "nats_period_us": round(statistics.median(r.nats_us for r in rounds), 1),
        "excess_us": round(statistics.median(r.nats_us - r.bare_us for r in rounds), 1),
        "excess_percent": round(statistics.median(excess), 2),
        "excess_percent_min": round(excess[0], 2),
        "excess_percent_max": round(excess[-1], 2),
        "cpu_us_per_step": cpu_per_step,
        "rounds": [[round(r.bare_us, 1), round(r.nats_us, 1)] for r in rounds],
    }


async def load(client: Client, case: Case) -> None:
    """Requests that fill every row of `case.steps` steps."""

    async def one(i: int) -> None:
        body = {
            "model": MODEL,
            "prompt": [i + 300] * PROMPT_TOKENS,
            "max_tokens": case.steps,
            "ignore_eos": True,
            "seed": i,
        }
        if case.stream:
            async for _ in client.stream(body):
                pass
        else:
            await client.complete(body)

    await asyncio.gather(*(one(i) for i in range(case.rows)))


def tap(delivery: Delivery, into: list[StepResult]) -> None:
    """Keep a message if it is a StepResult."""
    message = codec.decode(delivery.data).message
    if isinstance(message, StepResult):
        into.append(message)


def main() -> None:
    """Run the grid and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2, 5, 10])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stream", action="store_true", help="stream every answer: 128 frames a step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = []
    for step_ms in args.step_ms:
        for window in args.windows:
            case = Case(int(step_ms * 1000), window, args.rows, args.steps, args.stream)
            row = asyncio.run(measure(case, args.rounds))
            table.append(row)
            print(
                f"step {step_ms:g} ms, W={window}: bare {row['bare_period_us']} us, over NATS "
                f"{row['nats_period_us']} us, excess {row['excess_us']} us = {row['excess_percent']} % "
                f"({row['excess_percent_min']}..{row['excess_percent_max']}); cpu {row['cpu_us_per_step']}",
                flush=True,
            )
    if args.out:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "cpu": cpu_name()}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine, "cases": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
