"""`headrace replay`: recompute a scheduler's log, or simulate it under another policy. `headrace shadow` does
the latter live."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.simulator.replay.counterfactual import compare, compare_file
from loadtest.simulator.replay.rerun import rerun_file
from services.launcher.console import bold, dim, paint, print_line
from services.scheduler.reports import event_log
from services.scheduler.reports.event_log import LogError
from services.scheduler.state import policies

COLUMNS = ("happened", "same", "changed")
_RED, _GREEN = 31, 32

Body = dict[str, Any]


def replay(path: Path, *, last_only: bool, as_json: bool) -> int:
    """Recompute the log at `path` and print the result; the exit status is 1 where it differs. Raises
    SetupError, and LogError for a file that is no log."""
    body: Body = rerun_file(path, last_only=last_only).body
    if as_json:
        print_line(json.dumps(body, indent=2))
    else:
        for line in report_lines(body):
            print_line(line)
    return 0 if body["difference"] is None else 1


def counterfactual(path: Path, policy: str, *, as_json: bool) -> None:
    """Simulate the log at `path` with another policy, and print it beside what happened. Raises SetupError,
    and LogError for a file that is no log or has no step times."""
    body: Body = compare_file(path, policy).body
    for line in [json.dumps(body, indent=2)] if as_json else compared(body):
        print_line(line)


def shadow(policy: str) -> Callable[[bytes], list[str]]:
    """A function from the bytes of a log to the lines about it under another policy. Raises SetupError for a
    policy that does not exist."""
    policies.parse(policy)

    def lines(log: bytes) -> list[str]:
        try:
            return compared(compare(event_log.read(io.BytesIO(log)), policy).body)
        except LogError as error:
            return [f"nothing to compare yet: {error.message}"]

    return lines


def compared(body: Body) -> list[str]:
    """The table of a counterfactual."""
    before, after = body["policies"]
    lines = [
        bold(f"simulation of {body['requests']} requests from the log; only the first column was measured"),
        f"  policy of the log  {before}",
        f"  other policy       {after}",
    ]
    for name, machine in body["machines"].items():
        lines.append(
            f"  {name}: {machine['steps']} steps fitted, mean error {machine['error_pct']} %, "
            f"{machine['hop_us']} us each way"
        )
    if body["left_out"]:
        lines.append(f"  {body['left_out']} requests ran already when the log began: left out")
    rows = [("", "happened", "simulated", "simulated, other policy")]
    rows += [(name, *(f"{body[c][name]:,}" for c in COLUMNS)) for name in body["happened"]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = [
        f"  {row[0]:<{widths[0]}}  " + "  ".join(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3)) for row in rows
    ]
    return [*lines, "", *table]


def report_lines(body: Body) -> list[str]:
    """The lines about a rerun."""
    facts = body["facts"]
    virtual_s, wall_s = body["virtual_us"] / 1e6, body["wall_us"] / 1e6
    head = f"scheduler {facts.get('scheduler', '?')}, model {facts.get('model', '?')}"
    lines = [
        f"{bold(head)}, from event {body['first_event']}",
        f"  {body['events']} events, {body['commands']} commands, {body['hashes']} hashes of the state, "
        f"{body['snapshots']} snapshots",
        f"  {virtual_s:.3f} s of the scheduler's time in {wall_s:.3f} s",
    ]
    difference = body["difference"]
    if difference is None:
        return [*lines, paint("  equal: every command and every hash", _GREEN, sys.stdout)]
    return [*lines, *_difference(difference)]


def _difference(difference: Body) -> list[str]:
    event, at_s, equal = difference["event"], difference["at_us"] / 1e6, difference["equal_until"]
    head = {
        "commands": f"the commands of event {event} differ",
        "state": f"the state after event {event} differs; after event {equal} it was equal",
        "failure": f"the scheduler fails on event {event}",
    }[difference["what"]]
    lines = [paint(f"  {head}, {at_s:.6f} s after the first event", _RED, sys.stdout)]
    if difference["got"]:
        lines.append(f"    in the log {difference['expected']}, recomputed {difference['got']}")
    return lines + [f"    {dim(line)}" for line in difference["details"]]
