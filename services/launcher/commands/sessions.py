"""`headrace sessions` prints the sessions of each scheduler: where their blocks are, and when they return."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence

from services.launcher.session import Facts, Target, connected, find_fleet
from shared.errors import Unavailable
from shared.nats import subjects
from shared.nats.interface import NoResponders

WAIT_S = 1.0
SHOWN = 20  # sessions of a scheduler; --json has all
MOST_TOOLS = 6  # on the line of what was learned
_HEAD = ("tenant", "session", "state", "idle", "tokens", "device", "L1", "L2", "returns within", "next turn")
_TEXT = 3  # columns of text, on the left; the others are numbers
_BY_COUNT = {"device": "from the device", "l1": "from L1", "l2": "from L2", "computed": "computed"}


async def sessions(target: Target, fleet: str, *, as_json: bool, ids: bool) -> None:
    """Print the sessions of `fleet`. Raises Unavailable if no scheduler answers."""
    from shared.client.client import request_all

    async with connected(target.nats_url) as bus:
        try:
            answers = await request_all(bus, subjects.SESSIONS, WAIT_S)
        except NoResponders:
            answers = []
    own = sorted((a for a in answers if a.get("fleet") == fleet), key=lambda a: str(a["id"]))
    if not own:
        raise Unavailable(f"no scheduler of fleet {fleet!r} answers: start one with `headrace up`")
    if as_json:
        print(json.dumps({"fleet": fleet, "schedulers": own}, indent=2))
        return
    for answer in own:
        print("\n".join(draw(answer, ids=ids)))


def draw(answer: Facts, *, ids: bool = False) -> list[str]:
    """The lines of one scheduler. `ids`: with the whole names of sessions, by which verbs find them."""
    rows, summary = answer["data"], answer.get("summary") or {}
    head = f"scheduler.{answer['id']}  {_counted(answer, summary)}"
    if not rows:
        return [head, *_learned(summary)]
    columns = zip(_HEAD, *(_row(row, ids=ids) for row in rows[:SHOWN]), strict=True)
    kept = [column for column in columns if column[0] != "L2" or {*column[1:]} != {"0"}]
    table, widths = [*zip(*kept, strict=True)], [max(map(len, column)) for column in kept]
    lines = [
        "  ".join(
            cell.ljust(width) if at < _TEXT else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]
    more = answer.get("count", len(rows)) - len(rows[:SHOWN])
    rest = [f"and {more:,} more: --json has those that were idle least"] if more else []
    return [head, *(f"  {line}" for line in (*lines, *rest)), *_learned(summary)]


def _counted(answer: Facts, summary: Facts) -> str:
    count, rows = answer.get("count", len(answer["data"])), len(answer["data"])
    states = [f"{summary[state]:,} {state}" for state in ("running", "idle", "below") if summary.get(state)]
    kept = f"; {summary['kept']:,} kept" if summary.get("kept") else ""
    where = f"; {summary.get('device', 0):,} tokens on the device, {summary.get('l1', 0):,} in L1"
    where += f" of the {rows:,} least idle" if count > rows else ""
    counted = "1 session" if count == 1 else f"{count:,} sessions"
    return counted + (": " + ", ".join(states) if states else "") + (where if count else "") + kept


def _row(row: Facts, *, ids: bool) -> Sequence[str]:
    name = str(row.get("session", ""))
    shown = name if ids else f"…{name[-4:]}"
    tool = f" ({row['tool']})" if row.get("tool") else ""
    returns = [
        f"{quantile} {seconds(row[key])}"
        for quantile, key in (("p50", "returns_p50_s"), ("p90", "returns_p90_s"))
        if key in row
    ]
    idle = seconds(row["idle_s"]) if "idle_s" in row else ""
    return (
        str(row.get("tenant", "")), shown + tool, str(row["state"]), idle, f"{row['tokens']:,}",
        f"{row['device']:,}", f"{row['l1']:,}", f"{row['l2']:,}", ", ".join(returns), _next_turn(row),
    )  # fmt: skip


def _next_turn(row: Facts) -> str:
    load, compute = row.get("load_s", 0), row.get("compute_s", 0)
    parts = [seconds(load) if load else "", f"computed {seconds(compute)}" if compute else ""]
    return ", ".join(part for part in parts if part)


def _learned(summary: Facts) -> list[str]:
    tools = [
        f"{tool['tool']} p50 {seconds(tool['p50_us'] / 1e6)} ({tool['pauses']:,})"
        for tool in summary.get("tools", ())[:MOST_TOOLS]
    ]
    lost = summary.get("lost_pm", 0)
    never = f"; {lost / 10:g} % never returned" if lost else ""
    lines = [f"  tools learned: {', '.join(tools)}{never}"] if tools else []
    returns = summary.get("returns", {})
    if total := sum(returns.values()):
        parts = ", ".join(_shares(returns, total))
        lines.append(f"  {total:,} returns: {parts}{_outcomes(summary)}")
    return lines


def _shares(returns: Facts, total: int) -> Iterable[str]:
    return (
        f"{100 * returns[key] / total:.0f} % {words}" for key, words in _BY_COUNT.items() if returns.get(key)
    )


def _outcomes(summary: Facts) -> str:
    words = ("released", "superseded", "prefetched", "wasted")
    shown = [f"{summary[word]:,} {word}" for word in words if summary.get(word)]
    return "; " + ", ".join(shown) if shown else ""


def seconds(value: float) -> str:
    """A time of two digits, with its unit."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument(
        "--ids", action="store_true", help="whole names of sessions, by which verbs find them"
    )
    parser.set_defaults(
        run=lambda given: asyncio.run(sessions(*find_fleet(given), as_json=given.json, ids=given.ids))
    )
