"""A week of a fleet, in virtual time: nothing that any core holds grows with it.

Requests of many tenants and classes, plain and streamed, good and bad; cancels of some, and of what never
was; an executor, a detokenizer and a kv_offload that die again and again and come back under new names.
Scheduler, tokenizer, one detokenizer and one kv_offload live for all of it, and are looked into.

    HEADRACE_WEEK=1 pytest tests/pipeline/test_bounded_collections.py  the whole week; without it half an hour
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import virtual_loop
from support.containers import grown, sizes
from support.executor import paged_engine
from support.pipeline.virtual_fleet import VirtualFleet
from support.text_models import served

from services.scheduler import lifecycle, load_shedding
from services.scheduler.sessions import pauses, table
from services.scheduler.state import block_pool, counters, requests, state
from services.tokenizer import prepare
from shared.actor import mailbox
from shared.client.client import Client
from shared.errors import HeadraceError

SAMPLES = 40
FULL_EARLY = (
    (requests, "MAX_ENDED"), (counters, "MAX_KEPT"), (block_pool, "MOST_LOST"), (mailbox, "HISTORY"),
    (state, "MAX_DROPPED"), (state, "MAX_MOVED"), (prepare, "MAX_CANCELS"), (lifecycle, "MAX_TOMBSTONES"),
    (load_shedding, "MAX_REFUSED"), (table, "MOST_SESSIONS"), (table, "MOST_OF_TENANT"), (table, "MOST_SEEN"),
    (pauses, "MOST_NAMES"),
)  # fmt: skip
DYING = (("executor", "h"), ("detokenizer", "h"), ("kv_offload", "other"))


@dataclass(frozen=True)
class Span:
    """How long, and how often what happens."""

    hours: float
    beat_s: int
    request_s: float  # between two requests
    death_s: float


WEEK = Span(hours=168, beat_s=30, request_s=60, death_s=3_600)
SHORT = Span(hours=0.5, beat_s=5, request_s=4, death_s=150)


def body_of(number: int, dice: random.Random) -> dict[str, Any]:
    shared = "the same words for all " * dice.randint(0, 2)
    body: dict[str, Any] = {"model": "tiny", "prompt": f"{shared}{number}", "max_tokens": dice.randint(1, 12)}
    body |= {"request_id": f"r{number}", "seed": number, "n": dice.choice([1, 1, 1, 2])}
    body["timeout_s"] = 280  # longer than a death goes unnoticed
    if number % 2:
        body |= {"slo_class": "batch", "timeout_s": 86_400}
    if number % 9 == 0:
        body["temperature"] = -1
    return body


async def ask(client: Client, body: dict[str, Any], *, streamed: bool, gives_up: bool) -> str:
    """What has become of a request."""
    try:
        async with asyncio.timeout(0.003 if gives_up else 600):
            if not streamed:
                await client.complete(body)
                return "answered"
            async for _ in client.stream(body):
                pass
            return "answered"
    except TimeoutError:
        return "given up"
    except HeadraceError as error:
        return str(error.code)


async def deaths(fleet: VirtualFleet, span: Span) -> None:
    """One of those that die is always there, beside the one that lives."""
    there = {kind: await fleet.add(kind, host) for kind, host in DYING}
    while True:
        for kind, host in DYING:
            await asyncio.sleep(span.death_s)
            await fleet.kill(there[kind])
            there[kind] = await fleet.add(kind, host)


async def live(fleet: VirtualFleet, span: Span) -> tuple[list[dict[str, int]], dict[str, int]]:
    """The containers of those that live for all the time, at SAMPLES moments; and what became of requests."""
    dice = random.Random(1)
    kinds = ("kv_offload", "scheduler", "detokenizer", "executor", "tokenizer")
    watched = [fleet.runtimes[await fleet.add(kind)] for kind in kinds]
    client = await Client.open(fleet.broker.connect())
    dying = asyncio.ensure_future(deaths(fleet, span))
    await asyncio.sleep(3 * span.beat_s)
    asking: set[asyncio.Task[str]] = set()
    ends: dict[str, int] = {}

    def ended(task: asyncio.Task[str]) -> None:
        asking.discard(task)
        ends[task.result()] = ends.get(task.result(), 0) + 1

    samples = []
    count = int(span.hours * 3600 / span.request_s)
    for number in range(count):
        await asyncio.sleep(span.request_s * dice.expovariate(1))
        one = client.as_tenant(f"t{number % 97}")
        work = ask(one, body_of(number, dice), streamed=number % 3 == 0, gives_up=number % 7 == 0)
        task = asyncio.ensure_future(work)
        asking.add(task)
        task.add_done_callback(ended)
        if number % 5 == 0:
            one.cancel(f"never{number}")
        if (number + 1) % (count // SAMPLES) == 0:
            samples.append(sizes(*(part for each in watched for part in (each.actor, each.mailbox))))
    await asyncio.wait(asking)
    dying.cancel()
    assert [each.failure for each in watched] == [None] * len(watched)
    return samples, ends


@pytest.mark.timeout(1800)  # the week takes three to seven minutes
def test_collections_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    span = WEEK if "HEADRACE_WEEK" in os.environ else SHORT
    model = served(tmp_path)
    monkeypatch.setattr(paged_engine, "VOCAB", model.vocabulary.size)
    for module, name in FULL_EARLY:
        monkeypatch.setattr(module, name, 16)

    async def week() -> tuple[list[dict[str, int]], dict[str, int]]:
        fleet = VirtualFleet(model, span.beat_s)
        found = await live(fleet, span)
        await fleet.stop()
        return found

    samples, ends = virtual_loop.run(week())
    assert grown(samples) == {}
    assert set(ends) <= {"answered", "400", "given up", "429", "503"}
    assert ends["answered"] > 0.6 * sum(ends.values())
    for name in (
        "Deadlines.heap",
        "State.dropped",
        "State.moved",
        "Mailbox._outbound",
        "Cancels._at_us",
        "EndedRequests.by_key",
    ):
        assert name in samples[-1], "it is looked at"


def test_growing_collection_is_found() -> None:
    def sample(heap: int, burst: int) -> dict[str, int]:
        return {"Deadlines.heap": heap, "State.requests": burst}

    assert grown([sample(50 * i, 9 * (i % 2)) for i in range(8)]) == {
        "Deadlines.heap": [50 * i for i in range(8)]
    }
