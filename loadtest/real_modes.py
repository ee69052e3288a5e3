"""The scheduler's modes and policies with real processes: each measurement prints Markdown, and writes
real_<name>.md and .json with --out.

    python -m loadtest.real_modes two_batch     host-fed rows: two halves in turn against one batch
    python -m loadtest.real_modes grid          auto against single and run_ahead over NATS
    python -m loadtest.real_modes batching      mixed, prefill_first, decode_first and static, real model
    python -m loadtest.real_modes second_turn   a conversation's second turn against the same prompt cold
    python -m loadtest.real_modes all --out out
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from loadtest.real import batching, grid, second_turn, two_batch
from loadtest.real.report import Report

Args = argparse.Namespace
Run = Callable[[Args, str], Coroutine[None, None, Report]]


def _two_batch(args: Args, command: str) -> Coroutine[None, None, Report]:
    size = two_batch.Size(args.rows, args.rounds, args.threads, args.scale, tuple(args.cases))
    return two_batch.run(size, command)


def _grid(args: Args, command: str) -> Coroutine[None, None, Report]:
    tokens = max(96, round(args.grid_tokens * args.scale))
    return grid.run(args.points or grid.POINTS, args.rounds, tokens, command)


def _batching(args: Args, command: str) -> Coroutine[None, None, Report]:
    return batching.run(batching.Size(args.requests, args.seconds, args.threads, args.seed), command)


def _second_turn(args: Args, command: str) -> Coroutine[None, None, Report]:
    return second_turn.run(args.turns, args.threads, command)


RUNS: dict[str, Run] = {
    "two_batch": _two_batch,
    "grid": _grid,
    "batching": _batching,
    "second_turn": _second_turn,
}


def main() -> None:
    """Run what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*RUNS, "all"])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=3, help="two_batch, grid")
    parser.add_argument("--threads", type=int, default=2, help="of the real model")
    parser.add_argument("--rows", type=int, default=16, help="two_batch")
    parser.add_argument("--cases", nargs="+", default=[], choices=[case.name for case in two_batch.CASES])
    parser.add_argument("--scale", type=float, default=1.0, help="two_batch, grid: of the answers' lengths")
    parser.add_argument("--grid-tokens", type=int, default=240, help="grid: of an answer")
    parser.add_argument("--points", type=_point, nargs="+", help="grid: rows:step_us:hop_us")
    parser.add_argument("--requests", type=int, default=24, help="batching")
    parser.add_argument("--seconds", type=float, default=15, help="batching: of arrivals")
    parser.add_argument("--seed", type=int, default=4, help="batching")
    parser.add_argument("--turns", type=int, default=7, help="second_turn: conversations")
    args = parser.parse_args()
    for name in RUNS if "all" in args.names else args.names:
        report = asyncio.run(RUNS[name](args, f"python -m loadtest.real_modes {name}"))
        print(report.markdown(), flush=True)
        if args.out:
            report.write(args.out)


def _point(text: str) -> grid.Point:
    rows, step_us, hop_us = (int(part) for part in text.split(":"))
    return grid.Point(rows, step_us, hop_us)


if __name__ == "__main__":
    main()
