"""The recompute tax of preemption, by the protocol of vllm-project/vllm#54644 (see loadtest/tax/protocol.py).

python -m loadtest.recompute_tax --out docs/benchmarks             300 requests, simulated
python -m loadtest.recompute_tax --real --out docs/benchmarks      the default model, real processes
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from loadtest.real.report import Report
from loadtest.tax import measured, simulated
from loadtest.tax.protocol import ARMS, HEAD, Arm, Lengths, Outcome, Point, Runs, checks, points, row_of
from loadtest.tax.simulated import BLOCK_TOKENS

SIMULATED = (
    " Simulated on a virtual clock with the real scheduler and the real core of kv_offload: figures of a "
    "machine's model, not measurements."
)


def table(report: Report, wanted: list[Point], run: Callable[[Point, Arm], Outcome]) -> None:
    """Every arm at every point; those without tiers once for each pool."""
    runs: Runs = {}
    for point in wanted:
        for arm in ARMS:
            key = (point.pool_pm, point.l1 if arm.tiers else "", arm.name)
            if key not in runs:
                runs[key] = run(point, arm)
                report.add(row_of(point, arm, runs[key]))
    report.checks = checks(runs)
    report.data["runs"] = [
        {"pool_pm": pool, "l1": l1, "arm": arm, "tax_pct": outcome.tax_pct, **asdict(outcome)}
        for (pool, l1, arm), outcome in runs.items()
    ]


def _simulated() -> Report:
    lengths = simulated.LENGTHS.draw()
    text = _text(simulated.LENGTHS, simulated.SLOTS, "SmolLM2-135M in float32 on two cores")
    command = "python -m loadtest.recompute_tax"
    report = Report("recompute_tax", "Recompute tax, simulated", text + SIMULATED, command, HEAD, kind="sim")
    wanted = points(lengths, simulated.SLOTS, BLOCK_TOKENS)
    table(report, wanted, lambda point, arm: simulated.outcome(lengths, point, arm))
    return report


def _real(size: measured.Size) -> Report:
    lengths = size.lengths.draw()
    text = _text(size.lengths, size.slots, f"SmolLM2-135M-Instruct in float32, {size.threads} threads")
    command = f"python -m loadtest.recompute_tax --real --requests {size.lengths.requests}"
    report = Report("recompute_tax", "Recompute tax, real model", text, command, HEAD)
    wanted = points(lengths, size.slots, measured.BLOCK_TOKENS)
    table(report, wanted, lambda point, arm: asyncio.run(measured.outcome(size, lengths, point, arm)))
    return report


def _text(lengths: Lengths, slots: int, machine: str) -> str:
    return (
        f"{machine}. {lengths.requests} requests at once, prompts of {lengths.prompt[0]}–{lengths.prompt[1]} "
        f"tokens, answers of {lengths.answer[0]}–{lengths.answer[1]}; {slots} slots. Pool: share of the "
        f"working set, which is {slots} requests at their end. Tax: tokens computed again, over prompt and "
        "answer tokens; of device time, what steps were longer for that."
    )


def main() -> None:
    """Run it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the default model on this machine")
    parser.add_argument("--requests", type=int, default=24, help="real: how many")
    parser.add_argument("--threads", type=int, default=2, help="real: of the executor")
    parser.add_argument("--out", type=Path, help="folder for the page")
    args = parser.parse_args()
    report = _real(measured.size_of(args.requests, args.threads)) if args.real else _simulated()
    print(report.markdown())
    if args.out:
        report.write(args.out)


if __name__ == "__main__":
    main()
