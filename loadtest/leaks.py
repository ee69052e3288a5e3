"""What a fleet still holds when nothing runs, by its status answers. For tests and the soak."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shared.client.client import request_all
from shared.nats import subjects
from shared.nats.interface import Bus, NoResponders

Status = dict[str, Any]

# By kind: counters that are 0 when nothing runs.
MUST_BE_ZERO = {
    "tokenizer": ("pending",),
    "scheduler": ("requests", "waiting", "running", "closing"),
    "executor": ("open_slots", "queued"),
    "detokenizer": ("sequences", "requests", "failover", "unconfirmed"),
}
MUST_BE_ZERO_OF_ENGINE = ("reserved_blocks", "fenced_blocks", "copying_blocks", "in_flight", "running")


def leaks(status: Sequence[Status], expected: Mapping[str, int]) -> list[str]:
    """What is missing (`expected` services by kind) or not free; empty when all is well."""
    there = Counter(s["kind"] for s in status if s["state"] == "ready")
    held = [
        f"{kind}: {there[kind]} of {count} ready" for kind, count in expected.items() if there[kind] != count
    ]
    for service in status:
        name = f"{service['kind']}.{service['id']}"
        counters = MUST_BE_ZERO.get(service["kind"], ())
        held += [f"{name}: {counter} {service[counter]}" for counter in counters if service.get(counter)]
        if service["kind"] == "scheduler":
            detokenizers = [s for s in status if s["kind"] == "detokenizer"]
            held += _of_scheduler(name, service, sum(s["model"] == service["model"] for s in detokenizers))
    used = sum(len(s.get("executors", {})) for s in status if s["kind"] == "scheduler")
    return held if used == expected["executor"] else [*held, f"the schedulers know {used} executors"]


def _of_scheduler(name: str, service: Status, detokenizers: int) -> list[str]:
    engines, shards = service.get("executors", {}), service.get("detokenizers", [])
    held = [] if len(shards) == detokenizers else [f"{name}: knows {len(shards)} detokenizers"]
    for engine_name, engine in engines.items():
        unheld = engine["free_blocks"] + engine["dirty_blocks"]  # the latter may be wanted by a tier below
        if unheld != engine["blocks"] or engine["free_slots"] != engine["slots"]:
            held.append(f"{name}: {engine_name}: {unheld} blocks and {engine['free_slots']} slots are free")
        held += [f"{name}: {engine_name}: {n} {engine[n]}" for n in MUST_BE_ZERO_OF_ENGINE if engine[n]]
    return held


async def settle(bus: Bus, expected: Mapping[str, int], timeout_s: float) -> list[Status]:
    """Wait until every service is there and nothing is held; the status then. Raises AssertionError with
    what is still held after `timeout_s`."""
    held: list[str] = ["no answer"]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        status: list[Status] = []

        def complete(answer: Status, so_far: list[Status] = status) -> bool:
            so_far.append(answer)
            return not leaks(so_far, expected)

        with contextlib.suppress(NoResponders):
            await request_all(bus, subjects.STATUS, 0.3, complete)
        if not (held := leaks(status, expected)):
            return status
    raise AssertionError(f"after {timeout_s:g} s: {held}")
