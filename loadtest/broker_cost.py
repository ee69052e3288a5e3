"""What the broker costs: the same engine over a MemoryBus in one process, and over a nats-server in five.

    python -m loadtest.broker_cost --out broker_cost.json

Both are up all the time and are loaded in turn; the order changes with each pair, both get the same requests
(a closed loop), and no prompt comes twice. In one process the client shares a GIL with five services: that
side pays for threads where the other pays for messages, so the difference can be below 0. CPU time counts
everything on both sides: services, client, nats-server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.bench.machine import circumstances
from loadtest.bench.run import Asked, Point
from loadtest.bench.shape import Shape
from loadtest.broker_sides import Side
from loadtest.fleet import FLEET, Fleet
from loadtest.real.served import env_of

FIGURES = (
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "cpu_s_per_1k_tokens",
)
SIDES = ("memory", "nats")
Pair = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """An engine and the load on it."""

    name: str
    settings: Mapping[str, object]
    concurrency: int
    requests: int
    input_len: int = 128
    output_len: int = 96


CASES = (
    Case(
        "SmolLM2-135M on the CPU",
        {"backend": "torch", "device": "cpu", "dtype": "bf16", "slots": 32, "max_context": 1024},
        concurrency=32,
        requests=64,
    ),
    Case(
        "SimExecutor, steps of 5 ms",
        {"backend": "sim", "sim": "step=5000", "slots": 128},
        concurrency=128,
        requests=1024,
    ),
)  # fmt: skip


async def measure(case: Case, pairs: int, settings: Mapping[str, object]) -> dict[str, Any]:
    """The case's pairs, after one that is not counted."""
    env = env_of(**{"fleet": FLEET, "l1": "off", "log_level": "warning", **case.settings, **settings})
    fleet, found = Fleet(env), list[Pair]()
    async with AsyncExitStack() as stack:
        stack.callback(fleet.stop)
        sides = {"nats": await Side.start(env, fleet.server.url)}
        sides["memory"] = await Side.start(env)  # not before: two engines that warm up take turns badly
        for side in sides.values():
            stack.callback(side.stop)
        fleets = {"memory": None, "nats": fleet}
        for number in range(pairs + 1):
            order = SIDES[:: (-1) ** number]
            pair = {name: await run(case, number, sides[name], fleets[name]) for name in order}
            if any(figures["failed"] for figures in pair.values()):
                raise RuntimeError(f"requests failed: {[each['errors'] for each in pair.values()]}")
            if number:
                found.append(pair)
                print(f"{case.name}, pair {number}: cost {cost_pct(pair):.2f} %", flush=True)
    return {**asdict(case), "settings": dict(case.settings), **summary(found), "pairs": found}


async def run(case: Case, number: int, side: Side, fleet: Fleet | None) -> dict[str, Any]:
    """One side of a pair; `fleet` where the services are not in the side's own process."""
    shape = Shape(prompts=case.requests, input_len=case.input_len, output_len=case.output_len)
    before = fleet.cpu_us() if fleet else {}
    figures = await side.run(number, Asked(shape=shape), Point(max_concurrency=case.concurrency))
    after = fleet.cpu_us() if fleet else {}
    cpu_s = {name: (after[name] - before[name]) / 1e6 for name in after} | {"client": figures.pop("cpu_s")}
    per_1k = sum(cpu_s.values()) / figures["total_output_tokens"] * 1e3
    return {**figures, "cpu_s": cpu_s, "cpu_s_per_1k_tokens": per_1k}


def cost_pct(pair: Pair) -> float:
    """Of throughput."""
    memory, nats = (float(pair[side]["output_throughput"]) for side in SIDES)
    return 100 * (1 - nats / memory)


def summary(pairs: list[Pair]) -> dict[str, Any]:
    """Medians of each side, and of the pairs' ratios with their spread."""
    costs = sorted(cost_pct(pair) for pair in pairs)
    medians = {
        side: {name: statistics.median(pair[side][name] for pair in pairs) for name in FIGURES}
        for side in SIDES
    }
    ratios = {name: statistics.median(p["nats"][name] / p["memory"][name] for p in pairs) for name in FIGURES}
    spread = {"median": statistics.median(costs), "least": costs[0], "most": costs[-1]}
    return {"cost_pct": spread, "medians": medians, "ratios": ratios}


def table(case: Mapping[str, Any]) -> str:
    """A case as Markdown."""
    cost = case["cost_pct"]
    lines = [
        f"{case['name']}, concurrency {case['concurrency']}: cost {cost['median']:.2f} % of throughput "
        f"({cost['least']:.2f} to {cost['most']:.2f}, {len(case['pairs'])} pairs)",
        "",
        "| median | one process | five and a nats-server | ratio |",
        "|---|---|---|---|",
    ]
    for name in FIGURES:
        memory, nats = (case["medians"][side][name] for side in SIDES)
        lines.append(f"| {name} | {memory:,.3f} | {nats:,.3f} | {case['ratios'][name]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", choices=("cpu", "sim"))
    parser.add_argument("--requests", type=int, help="of a run")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of both sides")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    changes = {
        n: v for n in ("requests", "concurrency", "output_len") if (v := getattr(given, n)) is not None
    }
    settings = dict(each.split("=", 1) for each in given.set)
    result: dict[str, Any] = {**circumstances(), "settings": settings, "cases": []}
    for name, case in zip(("cpu", "sim"), CASES, strict=True):
        if given.only in (None, name):
            result["cases"].append(asyncio.run(measure(replace(case, **changes), given.pairs, settings)))
            print(table(result["cases"][-1]), flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
