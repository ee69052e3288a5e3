"""`headrace bench run|compare|plot`, also `python -m loadtest.bench`."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench import document, flags
from loadtest.bench.block import block
from loadtest.bench.compare import compare
from loadtest.bench.figures import read_goals
from loadtest.bench.flags import parser
from loadtest.bench.loop import runner
from loadtest.bench.pacer import Pacer
from loadtest.bench.page import page
from loadtest.bench.plot import draw
from loadtest.bench.record import Record
from loadtest.bench.run import Bench
from loadtest.bench.servers import server
from services.launcher.console import fail
from shared.errors import HeadraceError, SetupError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit status: 1 when something or a request failed."""
    given = parser().parse_args(argv)
    try:
        if given.action == "run":
            with runner() as loop:
                result = loop.run(_run(given))
            return int(any(run["figures"]["failed"] for run in result["runs"]))
        if given.action == "compare":
            print(compare(document.read(given.one), document.read(given.other)))
        else:
            _plot(given)
    except HeadraceError as error:
        return fail(error)
    return 0


async def _run(given: argparse.Namespace) -> document.Result:
    """Every point of the sweep, each printed when it is over."""
    points, goals, pacer = flags.points(given), read_goals(given.goodput), Pacer()
    asked, options = flags.asked(given), flags.options(given)
    label = given.label or (given.json.stem if given.json else "run")
    async with server(given, pacer) as target:
        bench = Bench(target.transport, asked, options, goals, pacer, target.counts)
        result = document.document(label, flags.configuration(given), target.facts)
        if given.json:
            document.write(result, given.json)  # now, since it may not be writable
        if given.num_warmups:
            _check(await bench.warm(given.num_warmups, points[0]))
        gc.collect()
        gc.freeze()  # what stands is looked at no more: a full collection would be in the figures
        for number, point in enumerate(points):
            run = await bench.point(number, point)
            result["runs"].append(run)
            print(block(run), flush=True)
            if given.json:
                document.write(result, given.json)  # what is done is kept when a later point ends it
    return result


def _check(records: list[Record]) -> None:
    """Raises SetupError when no request of the warm-up was answered: no other will be."""
    if records and not any(record.good for record in records):
        raise SetupError(f"every request of the warm-up failed: {records[0].error}")


def _plot(given: argparse.Namespace) -> None:
    results = [document.read(each) for each in given.results]
    drawn = draw(results, given.out)
    html: Path = given.out / "report.html"
    html.write_text(page(results, drawn))
    print("\n".join(map(str, [*drawn, html])))
