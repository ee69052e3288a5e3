"""`headrace status`: what every service says about itself, asked over NATS."""

from __future__ import annotations

import json
import sys
from typing import Any

from services.launcher.connect import Target, connected
from services.launcher.console import has_colour
from shared import login, subjects
from shared.client import ask_all
from shared.errors import Unavailable

WAIT_S = 0.5  # answers come within milliseconds; a service busy with a start may take longer
_ORDER = ("gateway", "tokenizer", "scheduler", "executor", "kv_offload", "detokenizer")
_IDENTITY = ("kind", "id", "state", "epoch", "fleet")


async def status(target: Target, fleet: str, *, as_json: bool) -> None:
    """Print the services of `fleet`. Raises Unavailable when there are none."""
    services = await services_of(target, fleet)
    if as_json:
        print(
            json.dumps(
                {"nats_url": login.shown(target.nats_url), "fleet": fleet, "services": services}, indent=2
            )
        )
    else:
        _print_table([("service", "state", "details"), *(row for s in services for row in _rows(s))])


async def services_of(target: Target, fleet: str) -> list[dict[str, Any]]:
    """What each service of `fleet` says, in the order of the pipeline. Raises Unavailable when none does."""
    async with connected(target.nats_url) as bus:
        answers = await ask_all(bus, subjects.STATUS, WAIT_S)
    services = sorted((a for a in answers if a.get("fleet") == fleet), key=_place)
    if not services:
        fleets = ", ".join(sorted({str(a.get("fleet")) for a in answers}))
        raise Unavailable(f"no service of fleet {fleet!r} answers; there are: {fleets or 'none'}")
    return services


def details(answer: dict[str, Any]) -> list[str]:
    """What a service adds to its identity: one line of `name value` pairs, and one for each member of a
    group, such as the executors of a scheduler."""
    plain, groups = [], []
    for name, value in answer.items():
        if name in _IDENTITY:
            continue
        if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            groups += [f"{name} {member}: {_pairs(facts)}" for member, facts in value.items()]
        else:
            plain.append((name, value))
    return [_pairs(dict(plain)), *groups]


def _pairs(facts: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_text(value)}" for name, value in facts.items())


def _text(value: object) -> str:
    if isinstance(value, list) and value and not isinstance(value[0], dict | list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _place(answer: dict[str, Any]) -> tuple[int, str]:
    kind = str(answer.get("kind"))
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), f"{kind}.{answer.get('id')}")


def _rows(answer: dict[str, Any]) -> list[tuple[str, str, str]]:
    first, *more = details(answer)
    head = (f"{answer.get('kind')}.{answer.get('id')}", str(answer.get("state")), first)
    return [head, *(("", "", f"  {line}") for line in more)]


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    if has_colour(sys.stdout):
        from rich.console import Console
        from rich.table import Table

        table = Table(*rows[0], box=None, header_style="bold")
        for row in rows[1:]:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for service, state, rest in rows:
        print(f"{service:<{widths[0]}}  {state:<{widths[1]}}  {rest}".rstrip())
