"""`headrace model ...`: the models of a server with their states, aliases, and what their executors hold.

list, alias     a tokenizer answers; an alias takes effect at once, for requests that arrive from then on
sleep, wake     requests to the model's schedulers, which drain first: the processes stay
load, unload    requests to each `headrace up` that has executors of the model: it starts or ends processes
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.launcher.console import actions_of
from services.launcher.session import (
    NOT_STORED,
    Facts,
    Target,
    ask_for_change,
    ask_scheduler,
    connected,
    find_fleet,
    services_of,
)
from services.launcher.supervisor import ASLEEP, CHANGING, LOADED, UNLOADED
from shared import bodies
from shared.client.client import Client, request_all
from shared.errors import BadRequest, Unavailable
from shared.nats import subjects
from shared.nats.interface import Bus, NoResponders, RequestTimeout

WAIT_US = 10_000_000  # JetStream may be asked first, for a second each
MOST_DIGITS = 12  # the tokenizer knows the highest weight
HOSTS_WAIT_S = 1.0  # for the answers of all hosts
# What a host answers to `load` and `unload`, by the state of the model there.
_STATES = {
    "load": {
        CHANGING: "is being loaded, `headrace model list` shows when it is",
        UNLOADED: "is loaded with the first request for it, since others use its memory now",
        ASLEEP: "asleep, the first request wakes it",
    },
    "unload": {
        LOADED: "requests that run end, then it is unloaded",
        ASLEEP: "is being unloaded",
        CHANGING: "is being unloaded",
    },
}
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
        print(_line(entry))


async def alias(target: Target, name: str, targets: Sequence[str], *, delete: bool = False) -> None:
    """Set what an alias stands for, or delete it, and print what it was and is. Raises BadRequest,
    UnknownModel for a model that is not served, Unavailable."""
    if delete == bool(targets):
        raise BadRequest("name models like `big=95 new=5`, or --delete")
    body = bodies.encode(read_targets(targets))
    try:
        subject = subjects.set_alias(name)
    except (ValueError, UnicodeEncodeError):
        raise BadRequest(f"{name!r:.80} cannot be the name of an alias") from None
    async with connected(target.nats_url) as bus:
        answer = await ask_for_change(bus, subject, body, WAIT_US, "headrace model list", NONE)
    print(f"{name}:\n  before {_shown(answer['before'])}\n  after  {_shown(answer['after'])}")
    if not answer.get("stored"):
        print(NOT_STORED)


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
    if "adapter" in entry:
        return f"{entry['id']}: {entry.get('state', 'of another fleet')}, an adapter of {entry['root']}"
    if "targets" not in entry:
        root = f", a name of {entry['root']}" if entry["root"] != entry["id"] else ""
        return f"{entry['id']}: {entry.get('state', 'of another fleet')}{root}"
    targets = [
        f"{each['model']}={each['weight']} ({each.get('state', 'not of this fleet')})"
        for each in entry["targets"]
    ]
    gone = [each["model"] for each in entry["targets"] if each.get("state") == "gone"]
    note = f"; the others take the part of {', '.join(gone)}" if 0 < len(gone) < len(targets) else ""
    return f"{entry['id']}: alias of {', '.join(targets)}{note}"


def _shown(targets: Mapping[str, int]) -> str:
    return ", ".join(f"{model}={weight}" for model, weight in targets.items()) or "none"


async def sleep(target: Target, fleet: str, what: str, model: str) -> int:
    """Request from the schedulers of a model that its executors `sleep` or `wake`; print their states.
    Returns 1 if a scheduler has not answered. Raises Unavailable without one."""
    services = await services_of(target, fleet)
    ids = [str(s["id"]) for s in services if s.get("kind") == "scheduler" and s.get("model") == model]
    if not ids:
        raise Unavailable(f"no scheduler of {model} answers: see `headrace status`")
    async with connected(target.nats_url) as bus:
        answers = await asyncio.gather(
            *(ask_scheduler(bus, bodies.SleepStates, subjects.sleep(scheduler), what) for scheduler in ids)
        )
    for scheduler, answer in zip(ids, answers, strict=True):
        if not answer:
            print(f"scheduler {scheduler}: no answer: `headrace status` shows whether it has changed")
        elif not answer["executors"]:
            print(f"scheduler {scheduler}: it has no executor")
        for executor, state in answer["executors"].items() if answer else ():
            print(f"{executor}: {state}")
    return 0 if all(answers) else 1


async def load(target: Target, fleet: str, what: str, model: str) -> int:
    """Request from every `headrace up` with this model to `load` or `unload` it; print its state on each
    host. Returns 1 if one has refused. Raises Unavailable if none answers."""
    async with connected(target.nats_url) as bus:
        answers = await _ask_hosts(bus, model, what)
    if not answers:
        raise Unavailable(
            f"no `headrace up` with a model {model!r:.80} answers: processes that a container engine has "
            "started are loaded and unloaded there"
        )
    for answer in answers:
        error = answer.get("error")
        outcome = _STATES[what].get(answer["state"], answer["state"]) if error is None else error["message"]
        print(f"{model} on host {answer['host']}: {outcome}")
    return 1 if any("error" in answer for answer in answers) else 0


async def _ask_hosts(bus: Bus, model: str, what: str) -> list[Facts]:
    try:
        return await request_all(bus, subjects.load(model), HOSTS_WAIT_S, body=what.encode())
    except NoResponders:
        return []


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    act = actions_of(parser)
    listed = act("list", "models and aliases, with their states")
    listed.add_argument("--json", action="store_true", help="everything, as JSON")
    alias = act("alias", "let a name stand for one model, or for several with weights")
    alias.add_argument("name", metavar="NAME", help="of no served model")
    alias.add_argument(
        "targets", nargs="*", metavar="MODEL[=WEIGHT]", help="like big=95 new=5; the default weight is 1"
    )
    alias.add_argument("--delete", action="store_true", help="delete the alias")
    for name, text in (
        ("load", "start the executors of a model that was unloaded"),
        ("unload", "drain and end the executors of a model; its name stays"),
        ("sleep", "free the device memory of a model once its requests have ended; a request wakes it"),
        ("wake", "take the device memory back before a request comes"),
    ):
        act(name, text).add_argument("name", metavar="MODEL", help="as in `headrace status`")
    parser.set_defaults(run=_act)


def _act(given: argparse.Namespace) -> int:
    target, fleet = find_fleet(given)
    if given.action in ("load", "unload"):
        return asyncio.run(load(target, fleet, given.action, given.name))
    if given.action in ("sleep", "wake"):
        return asyncio.run(sleep(target, fleet, given.action, given.name))
    if given.action == "list":
        asyncio.run(list_models(target, as_json=given.json))
    else:
        asyncio.run(alias(target, given.name, given.targets, delete=given.delete))
    return 0
