"""The arms of the recompute tax as work of the engine: recorded while served, then replayed in turn.

python -m loadtest.tax_replay --pools 380 --rounds 4 --out out
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path

from loadtest.real.report import Report
from loadtest.recompute_tax import ONLY, REQUESTS, arms_of
from loadtest.tax.measured import BLOCK_TOKENS, size_of
from loadtest.tax.protocol import POOLS_PM, QUARTER, points
from loadtest.tax.replayed import Recorded, ratios, record, replay

ALIKE = 1.01  # rounds of one and the same plans differ by half as much
HEAD = ["pool", "arm", "steps", "tokens computed", "idle between steps, s", "p99 when served, s",
        "device s, replayed", "of tiered"]  # fmt: skip
TEXT = (
    "Each arm is served once, and what its scheduler asks of the engine is recorded. Then all arms' steps "
    "run in turn, five of one, five of the next, on an engine each in one process: medians of rounds, the "
    "ratio round by round. Admission leaves nothing free for growth (`kv=greedy`); L1 holds a quarter of the "
    "victims."
)


def measure(args: argparse.Namespace) -> Report:
    """All pools, one after the other."""
    size = size_of(REQUESTS, args.threads)
    lengths = size.lengths.draw()
    arms = [arms_of(greedy=True)[ONLY.index(short)] for short in args.only]
    pools = " ".join(str(pool) for pool in args.pools)
    command = (
        f"python -m loadtest.tax_replay --pools {pools} --only {' '.join(args.only)} --rounds {args.rounds}"
    )
    report = Report("tax_replay", "Recompute tax: the engine's work, replayed", TEXT, command, HEAD)
    report.data["rounds"] = raw = dict[str, list[list[float]]]()
    for point in points(lengths, size.slots, BLOCK_TOKENS):
        if point.l1 != QUARTER or point.pool_pm not in args.pools:
            continue
        recorded = [asyncio.run(record(size, lengths, point, arm)) for arm in arms]
        rounds = list(replay(size, point, recorded, args.rounds))
        raw[str(point.pool_pm)] = rounds
        pool, mine = f"{point.pool_pm / 10:g} %", args.only.index("tiered")
        for at, (short, arm) in enumerate(zip(args.only, recorded, strict=True)):
            report.add([pool, short, *_row(arm, rounds, at, mine)])
        others = [ratios(rounds, mine, at)[0] for at in range(len(arms)) if at != mine]
        report.checks.append(
            (f"{pool}: tiered takes {max(others):.3f} of the best other's time", max(others) <= ALIKE)
        )
        if args.out:
            report.write(args.out)
    return report


def _row(arm: Recorded, rounds: list[list[float]], at: int, mine: int) -> list[object]:
    median, least, most = ratios(rounds, at, mine)
    return [
        len(arm.plans),
        arm.tokens,
        f"{arm.idle_s:.2f}",
        f"{arm.p99_s:.1f}",
        f"{statistics.median(took_s[at] for took_s in rounds):.2f}",
        f"{median:.3f} ({least:.3f}–{most:.3f})",
    ]


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pools", type=int, nargs="+", default=[POOLS_PM[0]], choices=POOLS_PM)
    parser.add_argument("--only", nargs="+", choices=ONLY, default=list(ONLY), help="tiered among them")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the page")
    args = parser.parse_args()
    if "tiered" not in args.only:
        parser.error("--only lacks tiered, which the others are compared with")
    print(measure(args).markdown())


if __name__ == "__main__":
    main()
