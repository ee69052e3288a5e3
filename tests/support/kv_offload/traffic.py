"""Requests for the tests of the KV tiers, whose answers are token ids and what came how late."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.running_up import Up
from support.small_llama import VOCAB
from support.token_tap import Tap

from loadtest.leaks import settle
from shared.client.client import Client, request_all
from shared.errors import HeadraceError
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

PROMPT_TOKENS, ANSWER_TOKENS = 320, 16
KINDS = {"tokenizer", "scheduler", "executor", "kv_offload", "detokenizer"}
WAIT_S = 60.0  # for a frame; a guard against a hang
MOST_MESSAGE_BYTES = 64 * 1024
_NAMES = itertools.count()

Status = dict[str, Any]


def prompt(number: int) -> list[int]:
    """Token ids that no other number begins with, of the small Llama's vocabulary."""
    return random.Random(number).choices(range(3, VOCAB), k=PROMPT_TOKENS)


@dataclass(slots=True)
class Answer:
    """What one client saw."""

    number: int  # of the prompt
    request: str
    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    error: str = ""
    first_s: float = 0.0  # to the first text
    gaps_s: list[float] = field(default_factory=list)  # between two pieces of text


class Traffic:
    """One client's connection to a fleet, which also watches the services' messages to each other."""

    def __init__(self, bus: NatsBus, client: Client, model: str) -> None:
        self.bus = bus
        self.largest: dict[str, int] = {}  # message kind -> bytes
        self.on_message: Callable[[Delivery], None] = lambda delivery: None
        self._client = client
        self._model = model
        self._tap = Tap()

    @classmethod
    async def open(cls, bus: NatsBus, model: str, tenant: str) -> Traffic:
        traffic = cls(bus, await Client.open(bus, tenant), model)
        await bus.subscribe("hr.*.detokenizer.*.in.*", traffic._tap.take)
        for kind in ("kv_offload", "scheduler", "executor"):
            await bus.subscribe(f"hr.*.{kind}.*.in.*", traffic._weigh)
        await bus.flush()
        return traffic

    async def ask(self, number: int, **more: Any) -> Answer:
        """One streamed request, to its end."""
        name = f"kv-{next(_NAMES)}"
        answer = Answer(number, name)
        body = {
            "model": self._model, "prompt": prompt(number), "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "request_id": name, **more,
        }  # fmt: skip
        body = {key: value for key, value in body.items() if value is not None}
        last_s, began_s = 0.0, time.monotonic()
        try:
            async for frame in self._client.stream(body, timeout_s=WAIT_S):
                now_s = time.monotonic()
                if frame["type"] == "delta" and not last_s:
                    answer.first_s = now_s - began_s
                if last_s:
                    answer.gaps_s.append(now_s - last_s)
                if frame["type"] == "delta":
                    last_s = now_s
                if frame["type"] == "done":
                    details = frame["usage"].get("prompt_tokens_details") or {}
                    answer.cached_tokens = details.get("cached_tokens", 0)
        except HeadraceError as error:
            answer.error = f"{error.code} {error.message}"
        answer.ids = self._tap.ids[name, 0]
        return answer

    async def many(
        self, numbers: Iterable[int], clients: int, on_answer: Callable[[int], None] = lambda _: None
    ) -> list[Answer]:
        """All of them, so many at a time; `on_answer` gets how many have ended."""
        queue, answers = iter(numbers), list[Answer]()

        async def one_client() -> None:
            for number in queue:
                answers.append(await self.ask(number))
                on_answer(len(answers))

        await asyncio.gather(*(one_client() for _ in range(clients)))
        return answers

    async def services(self, *, all_answers: bool = False) -> dict[str, Status]:
        """The status of each service of a fleet, by kind; of several of a kind the last. It returns when each
        kind has answered, or with `all_answers` not before the time for answers has passed."""
        found: dict[str, Status] = {}

        def take(answer: Status) -> bool:
            found[answer["kind"]] = answer
            return not all_answers and found.keys() >= KINDS

        await request_all(self.bus, subjects.STATUS, 0.3, take)
        return found

    async def tiers(self) -> Status:
        """What the scheduler has counted of the tiers, and of tokens."""
        measured = (await self.services())["scheduler"]["measured"]
        return {**measured["tokens"], **measured["tiers"]}

    async def until(self, true: Callable[[dict[str, Status]], bool], within_s: float = 60.0) -> float:
        """Ask the services until something is true of them; how long that took. Fails after a time that only
        a fault can take."""
        began_s = time.monotonic()
        found = await self.services()
        while not true(found):
            assert time.monotonic() - began_s < within_s, found
            found = await self.services(all_answers=True)
        return time.monotonic() - began_s

    async def settle(self, executors: int = 1) -> None:
        """Nothing is held any more: no request, block, slot, lookup, lease or range."""
        await settle(self.bus, {**dict.fromkeys(KINDS, 1), "executor": executors}, WAIT_S)
        await self.until(lambda found: not any(leased(found["kv_offload"])))

    def _weigh(self, delivery: Delivery) -> None:
        kind = delivery.subject.rpartition(".")[2]
        self.largest[kind] = max(self.largest.get(kind, 0), len(delivery.data))
        self.on_message(delivery)


def leased(store: Status) -> list[int]:
    """What a kv_offload must be rid of when nothing runs. A quarantine ends in its own time."""
    l1 = store["tiers"]["l1"]
    open_now = [store[name] for name in ("lookups", "loads", "reads", "writes")]
    return [*open_now, l1["read_bytes"], l1["written_bytes"]]


@asynccontextmanager
async def traffic_to(up: Up, model: str, tenant: str = subjects.DEFAULT_TENANT) -> AsyncIterator[Traffic]:
    """A connection for the length of a block, when kv_offload is ready."""
    bus = await NatsBus.connect(up.nats_url, timeout_s=30)
    try:
        traffic = await Traffic.open(bus, model, tenant)
        await traffic.until(lambda found: found.get("kv_offload", {}).get("state") == "ready")
        yield traffic
    finally:
        await bus.drain()


def assert_same(answers: Iterable[Answer], reference: dict[int, list[int]]) -> None:
    """No request failed, and every id is the one that was computed without any tier."""
    for answer in answers:
        assert not answer.error, answer
        assert answer.ids == reference[answer.number], f"prompt {answer.number}"
