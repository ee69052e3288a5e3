"""Where the time of a step goes: the real model over the real pipeline, 32 streams in a closed loop.

    python -m loadtest.step_profile --out step_profile.json

The services are processes on their own nats-server. An observer, one more subscriber, reads the plans
and results that pass between scheduler and executor. A step's busy time runs from the plan's being
taken up to its result's being published, as the executor stamps both; `arrival` is when the observer
had the result, an upper bound of the same that holds the broker and this program's own work.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.fleet import FLEET, MODEL, Fleet, until_ready
from shared import codec
from shared.client import Client
from shared.messages import Beat, StepPlan, StepResult
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

STREAMS = 32
FULL_ROWS = 30  # decode rows of a step that counts as one of 32 rows
PROMPT_TOKENS = (16, 160)
ANSWER_TOKENS = (48, 144)

PARTS = ("period", "wait", "forward", "sample", "slots", "publish", "arrival")
Row = dict[str, Any]  # of the table, as JSON has it

SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "all filters": {
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logprobs": 5,
    },
}


@dataclass
class Observed:
    """What passed between scheduler and executor, by step."""

    plans: dict[int, StepPlan] = field(default_factory=dict)
    results: dict[int, StepResult] = field(default_factory=dict)
    arrived_wall_us: dict[int, int] = field(default_factory=dict)
    beats_s: list[float] = field(default_factory=list)

    def take(self, delivery: Delivery) -> None:
        message = codec.decode(delivery.data).message
        if isinstance(message, StepPlan):
            self.plans[message.step] = message
        elif isinstance(message, StepResult):
            self.results[message.step] = message
            self.arrived_wall_us[message.step] = time.time_ns() // 1000
        elif isinstance(message, Beat) and message.kind == "executor":
            self.beats_s.append(time.monotonic())

    def clear(self) -> None:
        for each in (self.plans, self.results, self.arrived_wall_us, self.beats_s):
            each.clear()


@dataclass(frozen=True)
class StepTimes:
    """One step, µs. `slots` is the work on the device thread between the step before and this one that
    was not waiting: opening and closing slots, handing over the result before."""

    kind: str
    period: int
    wait: int
    forward: int
    sample: int
    publish: int
    arrival: int
    slots: int

    @property
    def busy(self) -> int:
        """Plan taken up to result published, without the wait for the plan."""
        return self.forward + self.sample + self.publish

    @property
    def share(self) -> float:
        return 100 * (self.forward + self.sample) / (self.busy + self.slots)

    @property
    def share_by_arrival(self) -> float:
        return 100 * (self.forward + self.sample) / (self.forward + self.sample + self.arrival)


def step_times(observed: Observed) -> Iterator[StepTimes]:
    """The times of every step whose neighbours were seen, too."""
    results = observed.results
    for step in sorted(results):
        if step - 1 not in results or step + 1 not in results or step not in observed.plans:
            continue
        before, result, after = results[step - 1], results[step], results[step + 1]
        if result.error:
            raise RuntimeError(f"step {step} failed: {result.error}")
        yield StepTimes(
            kind=kind_of(observed.plans[step]),
            period=after.start_wall_us - result.start_wall_us,
            wait=result.wait_us,
            forward=result.forward_us,
            sample=result.sample_us,
            publish=after.published_us,
            arrival=observed.arrived_wall_us[step] - result.end_wall_us,
            slots=max(0, result.start_wall_us - before.end_wall_us - result.wait_us),
        )


def kind_of(plan: StepPlan) -> str:
    """Which row of the table a step belongs to."""
    decode_rows = sum(count == 1 for count in plan.counts)
    chunk_tokens = sum(plan.counts) - decode_rows
    if not chunk_tokens:
        return "decode, 30-32 rows" if decode_rows >= FULL_ROWS else "decode, fewer rows"
    return "mixed, chunks to 64" if chunk_tokens <= 64 else "mixed, chunks over 64"


async def measure(threads: int, seconds: float, sampling: list[str]) -> list[Row]:
    """A row of figures for each kind of step of each sampling."""
    fleet = Fleet({"HEADRACE_MODEL": MODEL, "HEADRACE_THREADS": str(threads)})
    observed, table = Observed(), list[Row]()
    try:
        bus = await NatsBus.connect(fleet.server.url, name="profile")
        client = await Client.open(bus)
        await until_ready(client)
        for subject in ("scheduler.*.in.StepResult", "executor.*.in.StepPlan", "beat.executor.*"):
            await bus.subscribe(f"hr.{FLEET}.{subject}", observed.take)
        for name in sampling:
            observed.clear()
            await load(client, SAMPLING[name], seconds)
            beat_gap_s = max((b - a for a, b in itertools.pairwise(observed.beats_s)), default=0.0)
            table += summary({"threads": threads, "sampling": name}, list(step_times(observed)), beat_gap_s)
        await bus.drain()
    finally:
        await asyncio.to_thread(fleet.stop)
    return table


def summary(about: dict[str, object], steps: list[StepTimes], beat_gap_s: float) -> list[Row]:
    """Medians of each kind of step (ms), the 10th and 90th percentile of the share."""
    table = []
    for kind in sorted({step.kind for step in steps}):
        of_kind = [step for step in steps if step.kind == kind]
        if len(of_kind) < 10:
            continue
        medians = {f"{part}_ms": _median_ms(of_kind, part) for part in PARTS}
        tenths = statistics.quantiles((step.share for step in of_kind), n=10)
        row = {
            **about,
            "steps": kind,
            "count": len(of_kind),
            **medians,
            "share_percent": round(statistics.median(step.share for step in of_kind), 2),
            "share_p10_p90": [round(tenths[0], 2), round(tenths[-1], 2)],
            "share_of_sums_percent": round(_share_of_sums(of_kind), 2),
            "share_by_arrival_percent": round(statistics.median(s.share_by_arrival for s in of_kind), 2),
            "longest_beat_gap_s": round(beat_gap_s, 2),
        }
        table.append(row)
    return table


def _median_ms(steps: list[StepTimes], part: str) -> float:
    times_us: list[int] = [getattr(step, part) for step in steps]
    return round(statistics.median(times_us) / 1000, 3)


def _share_of_sums(steps: list[StepTimes]) -> float:
    worked, busy = (sum(step.forward + step.sample for step in steps), sum(s.busy + s.slots for s in steps))
    return float(100 * worked / busy)


async def load(client: Client, sampling: dict[str, object], seconds: float) -> None:
    """STREAMS streaming requests at a time for `seconds`; then they are cancelled."""

    async def one(stream: int) -> None:
        lengths = random.Random(stream)
        while True:
            body = {
                "model": MODEL,
                "prompt": [lengths.randrange(300, 40_000) for _ in range(lengths.randint(*PROMPT_TOKENS))],
                "max_tokens": lengths.randint(*ANSWER_TOKENS),
                "ignore_eos": True,
                "seed": stream,
                **sampling,
            }
            async for _ in client.stream(body):
                pass

    streams = [asyncio.create_task(one(i)) for i in range(STREAMS)]
    ended, _ = await asyncio.wait(streams, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    for stream in ended:
        stream.result()


def show(row: Row) -> str:
    """A line of the markdown table."""
    low, high = row["share_p10_p90"]
    cells = [row[name] for name in ("threads", "sampling", "steps", "count")]
    cells += [f"{row[f'{part}_ms']:.2f}" for part in PARTS]
    cells += [f"**{row['share_percent']}** ({low}…{high})", row["share_of_sums_percent"]]
    return " | ".join(str(cell) for cell in ["", *cells, row["share_by_arrival_percent"], ""]).strip()


def main() -> None:
    """Run each thread count and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="of each sampling")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sampling", nargs="+", default=list(SAMPLING), choices=list(SAMPLING))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table: list[Row] = []
    for threads in args.threads:
        found = asyncio.run(measure(threads, args.seconds, args.sampling))
        table += found
        print("\n".join(show(row) for row in found), flush=True)
    if args.out:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        args.out.write_text(json.dumps({"machine": machine, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
