"""`headrace model list|alias`: the models of a server with their states, and aliases for them.

A tokenizer answers both. An alias takes effect at once, for requests that arrive from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.launcher.console import print_line
from services.launcher.session import Target, connected
from shared.client import Client, error_of
from shared.errors import BadRequest, Unavailable
from shared.nats import subjects
from shared.nats.interface import NoResponders, RequestTimeout

WAIT_US = 10_000_000  # JetStream may be asked first, for a second each
MOST_DIGITS = 12  # the tokenizer knows the highest weight
NONE = "no tokenizer answers: start a fleet with `headrace up`, or see `headrace status`"


async def list_models(target: Target, *, as_json: bool) -> None:
    """Print a line for each model and alias, or `/v1/models` as JSON. Raises Unavailable."""
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        try:
            found = await client.request(subjects.models(target.tenant))
        except (NoResponders, RequestTimeout):
            raise Unavailable(NONE) from None
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for entry in found["data"]:
        print_line(_line(entry))


async def alias(target: Target, name: str, targets: Sequence[str], *, delete: bool = False) -> None:
    """Set what an alias stands for, or delete it, and print what it was and is. Raises BadRequest,
    UnknownModel for a model that is not served, Unavailable."""
    if delete == bool(targets):
        raise BadRequest("name models like `big=95 new=5`, or --delete")
    body = json.dumps(read_targets(targets)).encode()
    try:
        subject = subjects.set_alias(name)
    except (ValueError, UnicodeEncodeError):
        raise BadRequest(f"{name!r:.80} cannot be the name of an alias") from None
    async with connected(target.nats_url) as bus:
        try:
            answer = json.loads((await bus.request(subject, body, timeout_us=WAIT_US)).data)
        except NoResponders:
            raise Unavailable(NONE) from None
        except RequestTimeout:
            raise Unavailable("no answer: `headrace model list` shows whether it has changed") from None
    if "error" in answer:
        raise error_of(answer)
    print_line(f"{name}:\n  before {_shown(answer['before'])}\n  after  {_shown(answer['after'])}")
    if not answer["stored"]:
        print_line("not stored, without JetStream: it ends with the last tokenizer")


def read_targets(targets: Sequence[str]) -> dict[str, int]:
    """Models with their weights from `MODEL[=WEIGHT]`. Raises BadRequest."""
    found: dict[str, int] = {}
    for given in targets:
        model, equals, weight = given.rpartition("=")
        if not equals:
            model, weight = given, "1"
        if not (model and weight.isascii() and weight.isdecimal() and len(weight) < MOST_DIGITS):
            raise BadRequest(f"{given!r:.80} is not MODEL or MODEL=WEIGHT with a whole number")
        if model in found:
            raise BadRequest(f"{model!r:.80} is named twice")
        found[model] = int(weight)
    return found


def _line(entry: Mapping[str, Any]) -> str:
    if "targets" not in entry:
        root = f", a name of {entry['root']}" if entry["root"] != entry["id"] else ""
        return f"{entry['id']}: {entry.get('state', 'of another fleet')}{root}"
    targets = (
        f"{each['model']}={each['weight']} ({each.get('state', 'not of this fleet')})"
        for each in entry["targets"]
    )
    return f"{entry['id']}: alias of {', '.join(targets)}"


def _shown(targets: Mapping[str, int]) -> str:
    return ", ".join(f"{model}={weight}" for model, weight in targets.items()) or "none"
