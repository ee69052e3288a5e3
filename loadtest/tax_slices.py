"""The arms of the recompute tax as they are served, in slices of time that take turns.

python -m loadtest.tax_slices --pools 380 --only swap tiered --rounds 8 --out out
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from pathlib import Path

from loadtest.real.report import Report
from loadtest.recompute_tax import ONLY, REQUESTS, arms_of
from loadtest.tax.measured import BLOCK_TOKENS, rank, size_of
from loadtest.tax.protocol import POOLS_PM, QUARTER, points
from loadtest.tax.sliced import MOST_PAUSE_S, in_slices

HEAD = ["pool", "arm", "latency p50, s", "latency p99, s", "p99, of tiered", "mean ± standard error"]
TEXT = (
    "Each arm is served by a fleet of its own, and the fleets take turns of {slice_s:g} s: the scheduler of "
    "the others is stopped, and their clocks stand still. Medians of {rounds} rounds (least–most), ratios "
    "round by round; who begins changes. Admission leaves nothing free for growth (`kv=greedy`); L1 holds a "
    "quarter of the victims."
)

Rounds = list[dict[str, list[float]]]  # of each round the latencies of each arm, the least first


def measure(args: argparse.Namespace) -> Report:
    """All pools, one after the other; written after each round."""
    size = size_of(REQUESTS, args.threads)
    lengths = size.lengths.draw()
    arms = [arms_of(greedy=True)[ONLY.index(short)] for short in args.only]
    command = (
        f"python -m loadtest.tax_slices --pools {' '.join(map(str, args.pools))} "
        f"--only {' '.join(args.only)} --rounds {args.rounds} --slice {args.slice:g}"
    )
    text = TEXT.format(slice_s=args.slice, rounds=args.rounds)
    report = Report("tax_slices", "Recompute tax: arms served in slices", text, command, HEAD)
    report.data["rounds"] = raw = dict[str, Rounds]()
    for point in points(lengths, size.slots, BLOCK_TOKENS):
        if point.l1 != QUARTER or point.pool_pm not in args.pools:
            continue
        rounds = raw[str(point.pool_pm)] = []
        for number in range(args.rounds):
            first = number % len(arms)
            order = arms[first:] + arms[:first]
            rounds.append(dict(asyncio.run(in_slices(size, lengths, point, order, args.slice))))
            print({arm: round(rank(rounds[-1][arm], 99), 2) for arm in sorted(rounds[-1])}, flush=True)
            _fill(report, raw)
            if args.out:
                report.write(args.out)
    return report


def _fill(report: Report, raw: dict[str, Rounds]) -> None:
    report.rows, report.checks = [], []
    for pool_pm, rounds in raw.items():
        pool = f"{int(pool_pm) / 10:g} %"
        for arm in rounds[0]:
            ratios = [rank(found[arm], 99) / rank(found["tiered"], 99) for found in rounds]
            mean, error = statistics.mean(ratios), _error(ratios)
            middle, last = ([rank(found[arm], percent) for found in rounds] for percent in (50, 99))
            cells = [_spread(middle, 2), _spread(last, 2), _spread(ratios, 3)]
            report.add([pool, arm, *cells, f"{mean:.3f} ± {error:.3f}"])
            if arm != "tiered":
                report.checks.append(
                    (f"{pool}: p99 of {arm} is {mean:.3f} ± {error:.3f} of tiered's", mean + error >= 1)
                )


def _spread(found: list[float], digits: int) -> str:
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f}–{max(found):.{digits}f})"


def _error(found: list[float]) -> float:
    return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pools", type=int, nargs="+", default=[POOLS_PM[0]], choices=POOLS_PM)
    parser.add_argument("--only", nargs="+", choices=ONLY, default=list(ONLY), help="tiered among them")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--slice", type=float, default=3.0, help="seconds of an arm before the next")
    parser.add_argument("--threads", type=int, default=2, help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the page")
    args = parser.parse_args()
    if "tiered" not in args.only:
        parser.error("--only: the others are compared with tiered, which must be among them")
    if (len(args.only) - 1) * args.slice > MOST_PAUSE_S:
        parser.error(f"--slice: all others' turns may take {MOST_PAUSE_S:g} s together")
    print(measure(args).markdown())


if __name__ == "__main__":
    main()
