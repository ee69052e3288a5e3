"""`headrace adapter ...`: the LoRA adapters of a server: add one from a folder, list them, remove one.

A tokenizer makes the change once an executor has read the folder; it holds for requests that arrive from
then on. Requests name the adapter as their model.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.launcher.console import actions_of
from services.launcher.session import NOT_STORED, Target, ask_for_change, connected, find_fleet
from shared import bodies
from shared.client.client import Client
from shared.errors import BadRequest, Unavailable
from shared.nats import subjects
from shared.nats.interface import NoResponders, RequestTimeout

WAIT_US = 70_000_000
NONE = "no tokenizer answers: start a fleet with `headrace up --lora-places 8`, or see `headrace status`"


async def change(target: Target, name: str, body: bodies.AdapterSet) -> None:
    """Add, replace or remove an adapter, and print it. Raises the tokenizer's error, Unavailable."""
    try:
        subject = subjects.adapter(name)
    except (ValueError, UnicodeEncodeError):
        raise BadRequest(f"{name!r:.80} cannot be the name of an adapter") from None
    sent = bodies.encode(body)
    async with connected(target.nats_url) as bus:
        answer = await ask_for_change(bus, subject, sent, WAIT_US, "headrace adapter list", NONE)
    shown = answer.get("after")
    print(f"{name}: removed" if shown is None else f"{name}: {_facts(shown)} from {shown['path']}")
    if not answer.get("stored"):
        print(NOT_STORED)


async def list_adapters(target: Target) -> None:
    """Print a line for each adapter. Raises Unavailable."""
    async with connected(target.nats_url) as bus:
        client = await Client.open(bus, target.tenant)
        try:
            found = await client.request(subjects.models(target.tenant))
        except (NoResponders, RequestTimeout):
            raise Unavailable(NONE) from None
    adapters = [entry for entry in found["data"] if "adapter" in entry]
    for entry in adapters:
        print(f"{entry['id']}: {_facts({'model': entry['root'], **entry['adapter']})}")
    if not adapters:
        print("no adapters: `headrace adapter add NAME FOLDER` adds one")


def _facts(entry: Mapping[str, Any]) -> str:
    size = f"{entry['bytes'] / 1e6:.1f} MB"
    return f"of {entry['model']}, rank {entry['rank']}, {size}, digest {entry['digest'][:12]}"


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    act = actions_of(parser)
    act("list", "the adapters that requests may name as their model")
    added = act("add", "add the adapter in a folder of PEFT, where the executors run")
    added.add_argument("name", metavar="NAME", help="of no model; like base:name, or any other")
    added.add_argument("path", metavar="FOLDER", help="with adapter_config.json")
    added.add_argument("--of", metavar="MODEL", default="", help="its model; default: the only one")
    added.add_argument("--tenant", default="", help="that alone may use it; default: any")
    added.add_argument("--replace", action="store_true", help="put it in the place of one with this name")
    act("remove", "remove an adapter; requests that run go on").add_argument("name", metavar="NAME")
    parser.set_defaults(run=_act)


def _act(given: argparse.Namespace) -> int:
    target, _ = find_fleet(given)
    if given.action == "list":
        asyncio.run(list_adapters(target))
        return 0
    body = bodies.AdapterSet()
    if given.action == "add":
        body = bodies.AdapterSet(path=str(Path(given.path).expanduser().absolute()), replace=given.replace)
        body |= {"model": given.of} if given.of else {}
        body |= {"tenant": given.tenant} if given.tenant else {}
    asyncio.run(change(target, given.name, body))
    return 0
