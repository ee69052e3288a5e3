"""A fleet of processes with its own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from loadtest.fleet import Fleet, until_ready
from shared.client.client import Client, request_all
from shared.nats import subjects
from shared.nats.bus import NatsBus

Body = dict[str, Any]
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
        answers = await request_all(self.bus, subjects.STATUS, ANSWER_S)
        (scheduler,) = (a for a in answers if a["kind"] == "scheduler")
        counted: Body = scheduler["measured"]
        return counted


def real_env(threads: int, **settings: object) -> dict[str, str]:
    """The default model in float32."""
    return env_of(
        backend="torch", dtype="f32", threads=threads, slots=32, max_context=2048, kv_blocks=1024, **settings
    )


def env_of(**settings: object) -> dict[str, str]:
    """Settings as the environment of a fleet."""
    return {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}


@asynccontextmanager
async def served(env: Mapping[str, str]) -> AsyncGenerator[Served]:
    """A fleet for the length of a block."""
    fleet = Fleet(env)
    try:
        bus = await NatsBus.connect(fleet.server.url, name="bench")
        client = await Client.open(bus)
        await until_ready(client)
        yield Served(bus, client, fleet)
        await bus.drain()
    finally:
        await asyncio.to_thread(fleet.stop)
