"""The chaos matrix: every service killed, stopped for 10 s and for 40 s, and some pairs, under load.

    python -m loadtest.chaos --out chaos.json
    python -m loadtest.chaos --faults kill --victims scheduler scheduler+detokenizer
    python -m loadtest.chaos --requests 48 --limit-s 600 --victims executor -- --backend torch --dtype f32

    python -m loadtest.chaos --models smollm2-135m-instruct FOLDER --schedulers 2 --executors 2

A cell is a fresh `headrace up` (two tokenizers and two detokenizers of each model), 600 requests from 12
clients over HTTP and 12 over NATS, and a fault once the first requests have been answered. Every answer is
compared with that of an undisturbed fleet. Flags after `--` go to `headrace up` and replace the simulated
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from loadtest.chaos import cells
from loadtest.chaos.cells import COUNTED, FAULTS, PAIRS, VICTIMS, Cell, Counts, Shape
from loadtest.command_line import parser_of
from loadtest.fleet import MODEL


def table(found: list[Counts]) -> str:
    """For people, in Markdown."""
    head = ["cell", *COUNTED, "refused %", "longest", "flaws"]
    rows = [
        [
            each.cell,
            *(str(getattr(each, name)) for name in COUNTED),
            f"{each.refused_pct:g}",
            f"{each.longest_s:g} s",
            "; ".join(each.flaws)[:80],
        ]
        for each in found
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _victims(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split("+"))
    if not all((kind,) in VICTIMS for kind in kinds):
        raise argparse.ArgumentTypeError(f"some of {', '.join(kind for (kind,) in VICTIMS)}, joined by +")
    return kinds


def main() -> int:
    """Run the cells; 1 when one of them has a flaw."""
    parser = parser_of("chaos", __doc__, up=True)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--victims", nargs="+", type=_victims, default=[*VICTIMS, *PAIRS], help="like a+b")
    parser.add_argument("--models", nargs="+", default=[MODEL], help="names, GGUF files or folders")
    parser.add_argument("--schedulers", type=int, default=1, help="of each model")
    parser.add_argument("--executors", type=int, default=1, help="of each model")
    parser.add_argument("--requests", type=int, default=cells.REQUESTS, help="of each cell")
    parser.add_argument("--limit-s", type=float, default=cells.LIMIT_S, help="of a client's patience")
    parser.add_argument("--log", default=os.devnull, help="a file for the services' log of a cell")
    args = parser.parse_args()
    up = args.up or ["--backend", "sim"]
    shape = Shape(tuple(args.models), args.schedulers, args.executors)
    with cells.target(up, args.log, args.limit_s, shape) as fleet:
        right = asyncio.run(cells.answers(fleet, args.requests))
    found: list[Counts] = []
    for fault in args.faults:
        for victims in args.victims:
            with cells.target(up, args.log, args.limit_s, shape) as fleet:
                found.append(asyncio.run(cells.run(Cell(victims, fault), fleet, right, args.requests)))
                cells.resume(fleet)
            print(json.dumps(found[-1].row()), file=sys.stderr, flush=True)
            if args.out is not None:  # after each cell: a run takes an hour
                cells_so_far = [each.row() for each in found]
                facts = {"requests": args.requests, "models": shape.names, **shape.of_each}
                facts |= {"up": " ".join(up), "cells": cells_so_far}
                args.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(found))
    return 1 if any(each.flaws for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
