"""Clients of short requests: most read to the end, the others cancel or vanish at a random moment."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadtest.clients import WORDS, Ask, Clients, Ended, Outcome, send
from loadtest.fleet import MODEL, Body, connected

KINDS_OF_REQUEST = 200  # distinct; each one's answer is known from an undisturbed run
LIMIT_S = 60.0
# Shares of what clients do, in thousandths; each leaves after a random number of frames.
WAYS = {
    "nats": {"whole": 150, "stream": 150, "cancel": 120, "leave": 60, "gone": 10, "wrong": 20},
    "http": {"whole": 120, "stream": 180, "leave": 130, "half": 40, "wrong": 20},
}
WRONG = (
    {"messages": "not a list"},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0},
)


def known(number: int) -> Body:
    """A short request with a seed."""
    rng = random.Random(number)
    more: Body = {"stop": ["e", " the"]} if rng.random() < 0.2 else {}
    words = rng.choices(WORDS, k=rng.choice((1, 3, 12, 40)))
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": rng.choice((1, 2, 4, 8, 16)),
        "seed": number,
        "n": rng.choice((1, 1, 1, 2)),
        "ignore_eos": True,
        **more,
    }


@dataclass
class Traffic:
    """Sends requests over NATS and HTTP and counts their ends."""

    url: str
    http_url: str
    per_second: float = 0  # requests begun in a second, at most; 0: as many as the fleet answers
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    right: dict[int, tuple[dict[int, str], int]] = field(default_factory=dict)
    done: int = 0
    _awaited: tuple[int, asyncio.Event] = field(default_factory=lambda: (0, asyncio.Event()))

    async def learn(self) -> None:
        """The answer to every known request, from a quiet fleet."""
        async with connected(self.url) as client:
            for number in range(KINDS_OF_REQUEST):
                outcome = Outcome(Ask(known(number)))
                await send(client, outcome.ask, outcome, LIMIT_S)
                self.right[number] = outcome.answer

    async def until(self, done: int) -> None:
        """Return once so many requests have ended."""
        self._awaited = done, asyncio.Event()
        if self.done < done:
            await self._awaited[1].wait()

    async def run(self, seed: int, requests: int, clients: int) -> None:
        """Send so many requests, `clients` at a time, about half of them over HTTP."""
        async with asyncio.TaskGroup() as group:
            for over in WAYS:
                of = Clients(
                    self.url, self.http_url, LIMIT_S, on_end=self._count, keep=False, keep_alive=True
                )
                if self.per_second:
                    of.pace(requests / self.per_second, requests // 2)
                asks = _asks(random.Random(f"{seed} {over}"), over, requests // 2)
                counts = (clients // 2, 0) if over == "http" else (0, clients // 2)
                group.create_task(of.run(asks, *counts))

    def _count(self, ended: Ended) -> None:
        ask, end = ended.outcome.ask, ended.outcome.end
        what = ask.behaviour if ask.behaviour != "read" else ("stream" if ask.body.get("stream") else "whole")
        if end == "error":
            end = f"error {ended.outcome.code}"
        elif end == "answer" and ended.outcome.answer != self.right.get(ask.body.get("seed", -1)):
            self.wrong.append(f"{ended.over} {what}: {ended.outcome}")
        self.ends[f"{ended.over} {what}: {end}"] += 1
        self.done += 1
        if self.done >= self._awaited[0]:
            self._awaited[1].set()


def _asks(rng: random.Random, over: str, requests: int) -> Iterator[Ask]:
    for _ in range(requests):
        (what,) = rng.choices([*WAYS[over]], [*WAYS[over].values()])
        number, frames = rng.randrange(KINDS_OF_REQUEST), rng.choice((0, 0, 1, 1, 2, 3, 5))
        if what == "wrong":
            yield Ask({**rng.choice(WRONG), "model": MODEL}, "wrong")
        elif what in ("whole", "stream"):
            yield Ask({**known(number), "stream": what == "stream"})
        else:
            yield Ask({**known(number), "stream": what == "cancel" or rng.random() < 0.9}, what, frames)
