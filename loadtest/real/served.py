"""A fleet of processes with a client of its own; several stand side by side, loaded one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from loadtest.fleet import MODEL, Fleet, until_ready
from shared.client import Client, ask_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

Body = dict[str, Any]
WAIT = "wait=services.executor.sampling.logits_processors:Wait,in_turn=loadtest.wait_in_turn:WaitInTurn"
ANSWER_S = 0.3  # for the status of services on this machine


@dataclass(frozen=True, slots=True)
class Served:
    """A running fleet, and the way to ask it."""

    bus: NatsBus
    client: Client
    fleet: Fleet

    async def all(self, bodies: Iterable[Body]) -> None:
        """Send all at once, wait for every answer."""
        await asyncio.gather(*(self.client.complete(body) for body in bodies))

    async def measured(self) -> Body:
        """What the scheduler has counted since its start."""
        answers = await ask_all(self.bus, subjects.STATUS, ANSWER_S)
        (scheduler,) = (a for a in answers if a["kind"] == "scheduler")
        counted: Body = scheduler["measured"]
        return counted


def real_env(threads: int, **settings: object) -> dict[str, str]:
    """The default model in float32."""
    return env_of(
        backend="torch", dtype="f32", threads=threads, slots=32, max_context=2048, kv_blocks=1024,
        logits_processors=WAIT, **settings,
    )  # fmt: skip


def env_of(**settings: object) -> dict[str, str]:
    """Settings as the environment of a fleet."""
    return {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}


@asynccontextmanager
async def served(
    env: Mapping[str, str], executor_url: Callable[[str], str] = lambda url: url
) -> AsyncGenerator[Served]:
    """A fleet for the length of a block."""
    fleet = Fleet(env, executor_url)
    try:
        bus = await NatsBus.connect(fleet.server.url, name="bench")
        client = await Client.open(bus)
        await until_ready(client)
        yield Served(bus, client, fleet)
        await bus.drain()
    finally:
        await asyncio.to_thread(fleet.stop)


@asynccontextmanager
async def side_by_side(
    envs: Mapping[str, Mapping[str, str]], executor_url: Callable[[str], str] = lambda url: url
) -> AsyncGenerator[dict[str, Served]]:
    """A fleet for each name. Those that are not asked are idle."""
    async with AsyncExitStack() as stack:
        entered = [stack.enter_async_context(served(env, executor_url)) for env in envs.values()]
        yield dict(zip(envs, await asyncio.gather(*entered), strict=True))


def decode_bodies(name: str, rows: int, tokens: int, prompt_tokens: int = 32, **more: Any) -> list[Body]:
    """`rows` requests that differ; the same ones at each call, so that their prompts are cached."""
    return [
        {
            "model": MODEL,
            "prompt": [300 + i, *range(1_000, 999 + prompt_tokens)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": i,
            "request_id": f"{name}-{i}",
            **more,
        }
        for i in range(rows)
    ]
