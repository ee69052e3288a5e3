"""Clients of a fleet in processes of their own: one process would be late with the frames of two GPUs."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from loadtest.fleet import Body, connected
from loadtest.gpu.readers import LAST_ID, Answer, body_of, read, read_all, some_tokens
from shared.client.client import Client

PROCESSES, BEGIN_S = 4, 0.7
TOKEN = re.compile(r"t(\d+)")  # as loadtest.gpu.serve.write_model writes most of them
Due = tuple[float, Body]  # seconds after the start; a closed loop takes none


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations whose turns follow each other."""

    count: int
    turns: int
    shared: int  # tokens of a system prompt, the same for all
    first: tuple[int, int]
    added: int
    answer: int
    think_s: float
    spread_s: float  # from the first chat's begin to the last one's


@dataclass
class Load:
    """Processes with clients of any fleet."""

    pool: ProcessPoolExecutor = field(
        default_factory=lambda: ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
    )

    async def warm(self) -> None:
        """Import what the clients need."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self.pool, time.sleep, 0.5) for _ in range(PROCESSES)))

    async def run(self, url: str, asked: Sequence[Due], in_flight: int = 0) -> list[Answer]:
        """All of these, when they are due, or so many at a time."""
        each = -(-in_flight // PROCESSES)
        shares = [(url, asked[part::PROCESSES], each) for part in range(PROCESSES)]
        return await self._of_all(_read_share, shares)

    async def chat(self, url: str, name: str, chats: Chats) -> list[Answer]:
        """The turns of all chats."""
        shares = [(url, name, range(part, chats.count, PROCESSES), chats) for part in range(PROCESSES)]
        return await self._of_all(_chat_share, shares)

    async def _of_all(self, run: Callable[..., list[Answer]], shares: Sequence[Any]) -> list[Answer]:
        loop, begins_s = asyncio.get_running_loop(), time.monotonic() + BEGIN_S
        found = await asyncio.gather(
            *(loop.run_in_executor(self.pool, run, begins_s, *share) for share in shares)
        )
        return [answer for part in found for answer in part]


def _run(url: str, begins_s: float, all_of: Callable[[Client], Coroutine[Any, Any, list[Answer]]]) -> Any:
    async def run() -> list[Answer]:
        async with connected(url) as client:
            gc.collect()
            gc.freeze()
            await asyncio.sleep(max(0.0, begins_s - time.monotonic()))
            return await all_of(client)

    return asyncio.run(run())


def _read_share(begins_s: float, url: str, asked: Sequence[Due], in_flight: int) -> Any:
    async def all_of(client: Client) -> list[Answer]:
        if in_flight:
            return await read_all(client, [body for _, body in asked], in_flight)

        async def one(due_s: float, body: Body) -> Answer:
            await asyncio.sleep(max(0.0, begins_s + due_s - time.monotonic()))
            return await read(client, body)

        return list(await asyncio.gather(*(one(*due) for due in asked)))

    return _run(url, begins_s, all_of)


def _chat_share(begins_s: float, url: str, name: str, numbers: Sequence[int], chats: Chats) -> Any:
    shared = some_tokens(random.Random(name), chats.shared)

    async def one(client: Client, number: int) -> list[Answer]:
        rng, found = random.Random(f"{name} {number}"), list[Answer]()
        prompt = shared + some_tokens(rng, rng.randrange(*chats.first))
        due_s = begins_s + chats.spread_s * number / chats.count
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        for turn in range(chats.turns):
            body = body_of(f"{name}-{number}-{turn}", list(prompt), chats.answer, slo_class="interactive")
            found.append(await read(client, body, turn))
            # a digit of its own after a name makes another name, perhaps of no token
            prompt += [at for token in TOKEN.findall(found[-1].text) if (at := int(token)) <= LAST_ID]
            prompt += some_tokens(rng, chats.added)
            await asyncio.sleep(rng.expovariate(1 / chats.think_s))
        return found

    async def all_of(client: Client) -> list[Answer]:
        answers = await asyncio.gather(*(one(client, number) for number in numbers))
        return [answer for chat in answers for answer in chat]

    return _run(url, begins_s, all_of)
