"""Measures the recompute overhead of preemption, by vllm-project/vllm#54644 (see protocol.py).

python -m loadtest.recompute_overhead --out out                    300 requests, simulated
python -m loadtest.recompute_overhead --real --out out             the default model, real processes
python -m loadtest.recompute_overhead --real --greedy --out out    admission keeps nothing free for growth
... --real --greedy --pools 190 --only least tiered --rounds 3            some arms in turn, L1 a quarter
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from loadtest.real.report import Report
from loadtest.recompute_overhead import measured, simulated
from loadtest.recompute_overhead.protocol import (
    FULL,
    HEAD,
    POOLS_PM,
    QUARTER,
    Arm,
    Lengths,
    Outcome,
    Point,
    Runs,
    arms_of,
    checks,
    points,
    row_of,
)
from loadtest.recompute_overhead.simulated import BLOCK_TOKENS
from loadtest.sim import plots

REQUESTS = 300
ONLY = ("latest", "least", "swap", "tiered")  # the arms, in their order
SIMULATED = (
    " Simulated on a virtual clock with the real scheduler and the real core of kv_offload: figures of a "
    "machine's model, not measurements."
)
GREEDY = " Admission leaves nothing free for growth (`greedy`, as in vLLM V1): it pauses much."


def table(
    report: Report,
    wanted: Sequence[tuple[Point, Arm]],
    run: Callable[[Point, Arm], Outcome],
    out: Path | None,
) -> None:
    """All runs; arms without tiers once for each pool. What there is after each is written to `out`."""
    runs: Runs = {}
    try:
        for point, arm in wanted:
            key = (point.pool_pm, point.l1 if arm.tiers else "", arm.name)
            if key not in runs:
                runs[key] = run(point, arm)
                report.add(row_of(point, arm, runs[key]))
                _fill(report, runs)
                if out:
                    report.write(out)
    finally:
        if out and runs:
            _draw(report, runs, out / f"{report.kind}_{report.name}.png")


def _fill(report: Report, runs: Runs) -> None:
    report.checks = checks(runs, measured.NOISE if report.kind == "real" else 1.0)
    report.data["runs"] = [
        {"pool_pm": pool, "l1": l1, "arm": name, "overhead_pct": outcome.overhead_pct, **asdict(outcome)}
        for (pool, l1, name), outcome in runs.items()
    ]


def _draw(report: Report, runs: Runs, path: Path) -> None:
    """The overhead of each arm by the pool; of those with tiers where L1 is a quarter."""
    series: plots.Series = {}
    for (pool, l1, name), outcome in runs.items():
        if l1 != FULL:
            series.setdefault(name, []).append((pool / 10, max(outcome.overhead_pct, 0.01)))
    plots.curves(report.title, series, ("KV pool, % of the working set", "recompute overhead, %"), path)


def _simulated(args: argparse.Namespace) -> Report:
    lengths = simulated.LENGTHS.draw()
    text = _text(simulated.LENGTHS, simulated.SLOTS, "SmolLM2-135M in float32 on two cores")
    report = Report(
        "recompute_overhead",
        "Recompute overhead, simulated",
        text + SIMULATED,
        _command(args),
        HEAD,
        kind="sim",
    )
    at = [p for p in points(lengths, simulated.SLOTS, BLOCK_TOKENS) if p.pool_pm in args.pools]
    wanted = [(point, arm) for point in at for arm in arms_of(greedy=args.greedy)]
    table(report, wanted, lambda point, arm: simulated.outcome(lengths, point, arm), args.out)
    return report


def _real(args: argparse.Namespace) -> Report:
    size = measured.size_of(args.requests, args.threads)
    lengths = size.lengths.draw()
    text = _text(size.lengths, size.slots, f"SmolLM2-135M-Instruct in float32, {size.threads} threads")
    name = "recompute_overhead_greedy" if args.greedy else "recompute_overhead"
    report = Report(name, "Recompute overhead, real model", text + GREEDY * args.greedy, _command(args), HEAD)
    at = [p for p in points(lengths, size.slots, measured.BLOCK_TOKENS) if p.pool_pm in args.pools]
    # swap with room for all victims is compared with nothing: its minutes are saved
    wanted = [
        (point, arm)
        for point in at
        for arm in arms_of(greedy=args.greedy)
        if point.l1 == QUARTER or arm.policy.startswith("tier=tiered")
    ]
    table(
        report, wanted, lambda point, arm: asyncio.run(measured.outcome(size, lengths, point, arm)), args.out
    )
    return report


def _in_turn(args: argparse.Namespace) -> Report:
    """Some arms again and again, one after the other: two runs of one arm differ by some percent."""
    size = measured.size_of(args.requests, args.threads)
    lengths = size.lengths.draw()
    text = _text(size.lengths, size.slots, f"SmolLM2-135M-Instruct in float32, {size.threads} threads")
    name = "recompute_overhead_in_turn"
    report = Report(
        name, "Recompute overhead, arms in turn", text + GREEDY * args.greedy, _command(args), HEAD
    )
    at = [p for p in points(lengths, size.slots, measured.BLOCK_TOKENS) if p.pool_pm in args.pools]
    arms = [arms_of(greedy=args.greedy)[ONLY.index(short)] for short in args.only]
    report.data["runs"] = runs = list[dict[str, object]]()
    for turn in range(args.rounds):
        for point, arm in ((p, a) for p in at if p.l1 == QUARTER for a in arms):
            found = asyncio.run(measured.outcome(size, lengths, point, arm))
            report.add(row_of(point, arm, found))
            runs.append({"turn": turn, "pool_pm": point.pool_pm, "arm": arm.name, **asdict(found)})
            if args.out:
                report.write(args.out)
    return report


def _text(lengths: Lengths, slots: int, machine: str) -> str:
    return (
        f"{machine}. {lengths.requests} requests at once, prompts of {lengths.prompt[0]}–{lengths.prompt[1]} "
        f"tokens, answers of {lengths.answer[0]}–{lengths.answer[1]}; {slots} slots. Pool: share of the "
        f"working set, which is {slots} requests at their end. Overhead: tokens computed again, over "
        "prompt and answer tokens; of device time, what steps were longer for that."
    )


def _command(args: argparse.Namespace) -> str:
    words = ["python -m loadtest.recompute_overhead", "--real" * args.real, "--greedy" * args.greedy]
    if args.pools != list(POOLS_PM):
        words.append("--pools " + " ".join(str(pool) for pool in args.pools))
    if args.real and args.requests != REQUESTS:
        words.append(f"--requests {args.requests}")
    if args.only:
        words.append(f"--only {' '.join(args.only)} --rounds {args.rounds}")
    return " ".join(word for word in words if word)


def main() -> None:
    """Run it; every run is written when it has ended, so Ctrl-C keeps those before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the default model on this machine")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="real: how many")
    parser.add_argument("--threads", type=int, default=2, help="real: of the executor")
    parser.add_argument(
        "--pools", type=int, nargs="+", default=list(POOLS_PM), choices=POOLS_PM, help="per mille"
    )
    parser.add_argument("--greedy", action="store_true", help="admission that leaves no room for growth")
    parser.add_argument("--only", nargs="+", choices=ONLY, help="real: these arms in turn")
    parser.add_argument("--rounds", type=int, default=3, help="of the arms in turn")
    parser.add_argument("--out", type=Path, help="folder for the page")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        made = _in_turn if args.only else _real if args.real else _simulated
        print(made(args).markdown())


if __name__ == "__main__":
    main()
