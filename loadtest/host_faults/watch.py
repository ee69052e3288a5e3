"""Clients that send until they are stopped, durable requests beside them, and the verdict over each of them.

An answer is right if a whole model of the case gives it: texts and counts of tokens, greedy, in float32. What
mixes two models, or is none of theirs, is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest.chaos.cells import COUNTED, Answers, Cell, Counts, Span, Target, judged
from loadtest.clients import Ask, Clients, Outcome, mixed, oracle_key, send
from loadtest.durable import record_of
from loadtest.fleet import MODEL, connected
from shared.client.client import Client
from shared.errors import HeadraceError
from shared.nats import subjects
from shared.nats.interface import NoResponders, RequestTimeout

HTTP_CLIENTS, NATS_CLIENTS = 3, 3
LIMIT_S = 300.0  # of a client's patience
DURABLE_EVERY_S = 1.0
RECORDS_S = 300.0  # after the fault, for the last durable request


def asks() -> list[Ask]:
    """The requests of a case: greedy chats, one or two choices, streams and plain."""
    return mixed(random.Random(1), 24, MODEL, temperature=0, max_tokens=24)


async def answers(fleet: Target) -> Answers:
    """What each request answers in a fleet without a fault."""
    found = {}
    async with connected(fleet.nats_url, 60) as client:
        for ask in asks():
            outcome = Outcome(ask)
            await send(client, ask, outcome, LIMIT_S)
            found[oracle_key(ask)] = outcome.answer
    return found


@dataclass(slots=True)
class Durable:
    """Durable requests, one a second: which were accepted, and why others were not."""

    accepted: dict[str, Ask] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # by code and message
    silent: int = 0

    async def run(self, url: str, stop: asyncio.Event) -> None:
        """Submit until `stop`."""
        async with connected(url, 60) as client:
            for number, ask in enumerate(itertools.cycle(asks())):
                try:
                    await submitted(client, {**ask.body, "stream": False, "request_id": f"d{number}"})
                    self.accepted[f"d{number}"] = ask
                except TimeoutError:
                    self.silent += 1
                except HeadraceError as error:
                    key = f"{error.code} {shortened(error.message)}"
                    self.refused[key] = self.refused.get(key, 0) + 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), DURABLE_EVERY_S)
                if stop.is_set():
                    return

    async def judged(self, url: str, right: Sequence[Answers]) -> dict[str, Any]:
        """What became of the accepted ones."""
        counts, why = {"right": 0, "wrong": 0, "lost": 0, "failed": 0}, dict[str, int]()
        async with connected(url, 60) as client:
            for name, ask in self.accepted.items():
                try:
                    async with asyncio.timeout(RECORDS_S):
                        record = await record_of(client, "public", name)
                except TimeoutError:
                    counts["lost"] += 1
                    continue
                if "answer" not in record:
                    counts["lost" if record.get("code") == 404 else "failed"] += 1
                    key = shortened(json.dumps(record.get("error", record)))
                    why[key] = why.get(key, 0) + 1
                    continue
                outcome = Outcome(ask)
                outcome.on_answer(record["answer"])
                is_right = any(outcome.answer == each[oracle_key(ask)] for each in right)
                counts["right" if is_right else "wrong"] += 1
        found: dict[str, Any] = {"accepted": len(self.accepted), **counts, "silent": self.silent}
        return {**found, "refused": self.refused, **({"why_failed": why} if why else {})}


async def submitted(client: Client, body: dict[str, Any]) -> None:
    """Submit a request, again under its id while there is no reply. Raises a refusal, and TimeoutError."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await client.request(subjects.submit("public", MODEL), body)
                return
            except (RequestTimeout, NoResponders):
                await asyncio.sleep(0.2)


class Traffic:
    """Clients over HTTP and NATS, from `begin` to `end`."""

    def __init__(self, fleet: Target) -> None:
        self.clients = Clients(fleet.nats_url, fleet.http_url, LIMIT_S)
        self.durable = Durable()
        self._url = fleet.nats_url
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, answered: int) -> None:
        """Return once so many requests have ended."""
        some = asyncio.Event()
        self.clients.on_end = lambda _: some.set() if len(self.clients.ended) >= answered else None
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.clients.run(self._endless(), HTTP_CLIENTS, NATS_CLIENTS)),
            loop.create_task(self.durable.run(self._url, self._stop)),
        ]
        await some.wait()

    def _endless(self) -> Iterator[Ask]:
        rng, known = random.Random(2), asks()
        while not self._stop.is_set():
            yield rng.choice(known)

    async def recovered(self, undone_s: float, within_s: float) -> float | None:
        """The time from `undone_s` to the first right end of a request that began after it and the last wrong
        end; None if there is none within `within_s`."""
        until = undone_s + within_s
        while time.monotonic() < until:
            good = [
                e.ended_s for e in self.clients.ended if e.began_s >= undone_s and e.outcome.end == "answer"
            ]
            if good:
                bad = [e.ended_s for e in self.clients.ended if e.outcome.end != "answer"]
                return round(max([min(good), *bad]) - undone_s, 1)
            await asyncio.sleep(0.2)
        return None

    async def end(self) -> None:
        """Send no more, and wait for what runs."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def counts(self, name: str, victims: tuple[str, ...], right: Sequence[Answers], away: Span) -> Counts:
        """The verdicts: right is the answer of one of the models. A typed error is a refusal, also after the
        request was accepted: `lost` has no reason."""
        found = Counts(name)
        for each in self.clients.ended:
            key = oracle_key(each.outcome.ask)
            mine = next((model for model in right if model[key] == each.outcome.answer), right[0])
            if each.outcome.end == "error":
                each = replace(each, outcome=replace(each.outcome, accepted=False))
            one = Clients(self.clients.nats_url, self.clients.http_url, LIMIT_S, [each])
            _add(found, judged(Cell(victims, name), one, mine, away))
        found.doubled += 0 if "nats-server" in victims else self.clients.repeated
        return found


def _add(total: Counts, one: Counts) -> None:
    for name in COUNTED:
        setattr(total, name, getattr(total, name) + getattr(one, name))
    total.longest_s = max(total.longest_s, one.longest_s)
    for key, count in one.messages.items():
        total.messages[key] = total.messages.get(key, 0) + count


def shortened(text: str) -> str:
    """A message without its numbers and ids, for counting."""
    return re.sub(r"\b[0-9a-f]{8,}\b|\d+", "…", text)[:240]
