"""Many clients at once, each with the outcome of its request. For fault tests and the soak."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shared.client.client import Client, NoAnswer
from shared.errors import HeadraceError
from shared.nats import subjects
from shared.nats.bus import NatsBus

PAUSE_S = 0.1  # of a client that was refused without a hint when to come again
WORDS = ["river", "turbine", "water", "channel", "gate", "wheel", "power", "mill", "stone", "spring"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and how its client behaves."""

    body: dict[str, Any]
    behaviour: str = "read"  # cancel: after the first text; leave: the connection ends; err: it is wrong


@dataclass(slots=True)
class Outcome:
    """What one client saw."""

    ask: Ask
    end: str = ""  # answer; error (typed, from the service); silence (the client's own limit); left
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    tokens: int = 0
    code: int = 0
    message: str = ""
    accepted: bool = False
    attempts: int = 0
    seconds: float = 0.0

    @property
    def answer(self) -> tuple[dict[int, str], int]:
        """(texts by choice, tokens). An empty text has no frame in a stream."""
        return {i: text for i, text in self.texts.items() if text}, self.tokens


class Storm:
    """Sends requests over one connection, `clients` at a time. `outcomes` grows in order of ending."""

    def __init__(self, client: Client, timeout_s: float, url: str = "") -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._url = url  # for clients that leave: each has its own connection
        self.keep = True
        self.outcomes: list[Outcome] = []
        self.on_outcome: Callable[[Outcome], None] = lambda outcome: None

    async def run(self, asks: Iterable[Ask], clients: int) -> None:
        """Send all of `asks` and wait for their ends. A refused client waits before its next one."""
        queue = iter(asks)
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._one_client(queue))

    async def _one_client(self, queue: Iterator[Ask]) -> None:
        for ask in queue:
            outcome, started_at = Outcome(ask), time.monotonic()
            pause_s = 0.0
            try:
                if ask.behaviour == "leave":
                    await self._leave(ask)
                    outcome.end = "left"
                else:
                    await send(self._client, ask, outcome, self._timeout_s)
                    outcome.end = "answer"
            except NoAnswer as error:
                outcome.end, outcome.message = "silence", error.message
            except HeadraceError as error:
                outcome.end, outcome.code, outcome.message = "error", error.code, error.message
                pause_s = (error.retry_after_ms / 1000 or PAUSE_S) if error.retryable else 0.0
            outcome.seconds = time.monotonic() - started_at
            if self.keep:
                self.outcomes.append(outcome)
            self.on_outcome(outcome)
            await asyncio.sleep(pause_s)

    async def _leave(self, ask: Ask) -> None:
        """Send, and end the connection: at the first frame of a stream, at once for a plain request."""
        bus = await NatsBus.connect(self._url, timeout_s=self._timeout_s)
        heard = asyncio.Event()
        inbox = bus.new_inbox()
        await bus.subscribe(inbox, lambda _: heard.set())
        subject = subjects.generate(subjects.DEFAULT_TENANT, str(ask.body["model"]))
        bus.publish(subject, json.dumps(ask.body).encode(), reply=inbox)
        if ask.body["stream"]:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(heard.wait(), self._timeout_s)
        await bus.drain()


async def send(client: Client, ask: Ask, outcome: Outcome, timeout_s: float) -> None:
    """Send one request over NATS and fill in what came. Raises as the client does."""
    if not ask.body.get("stream"):
        reply = await client.complete(ask.body, timeout_s=timeout_s)
        outcome.texts = {c["index"]: c["message"]["content"] for c in reply["choices"]}
        outcome.tokens = reply["usage"]["completion_tokens"]
        return
    async for frame in client.stream(ask.body, timeout_s=timeout_s):
        if frame["type"] == "accepted":
            outcome.accepted = True
            outcome.attempts += 1
            outcome.texts.clear()
        elif frame["type"] == "delta":
            for choice in frame["choices"]:
                text = outcome.texts.get(choice["index"], "")
                outcome.texts[choice["index"]] = text + choice["delta"]["content"]
            if ask.behaviour == "cancel":
                client.cancel(frame["request_id"])
        elif frame["type"] == "done":
            outcome.tokens = frame["usage"]["completion_tokens"]


def oracle_key(ask: Ask) -> str:
    """Names the answer of a request, however it is delivered."""
    return str(ask.body["seed"])


def mixed(rng: random.Random, count: int, model: str, **more: Any) -> list[Ask]:
    """`count` requests of mixed length and options, each with a seed: the same answer at any time."""
    asks = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.choice((3, 12, 40, 150)))
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": rng.choice((4, 24, 64, 120)),
            "seed": rng.getrandbits(32),
            "n": rng.choice((1, 1, 1, 2)),
            "stream": rng.random() < 0.75,
            "ignore_eos": True,
            **more,
        }
        if rng.random() < 0.2:
            body["stop"] = ["e", " the"]
        asks.append(Ask(body))
    return asks
