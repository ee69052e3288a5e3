"""Services with a keeper, on a nats-server with JetStream: what durable requests need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from support.pipeline.five_actors import Connect, Pipeline

from services.keeper.actor import KeeperActor
from services.launcher import nats_server as servers
from services.launcher.nats_server import ServerLimits
from shared.actor.runtime import Actor
from shared.client.client import Client
from shared.errors import HeadraceError
from shared.nats.bus import NatsBus


class Kept(Pipeline):
    """All services and a keeper."""

    def build(self, kind: str) -> Actor:
        return KeeperActor() if kind == "keeper" else super().build(kind)

    async def begin(self) -> None:
        await super().begin()
        await self.add("keeper", "keeper-1")

    async def stop(self) -> None:
        await self.runtimes.pop("keeper-1").finish(5)
        await super().stop()

    async def die(self, *names: str) -> None:
        """These actors, or all, end at once and without a word."""
        gone = [self.runtimes.pop(name) for name in names or [*self.runtimes]]
        for runtime in gone:
            runtime.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]  # unheard
        await asyncio.gather(*(runtime.finish(0) for runtime in gone))


@asynccontextmanager
async def jetstream() -> AsyncIterator[Connect]:
    """A nats-server with room for the streams of aliases and of durable requests, to connect to."""
    server = servers.start(limits=replace(ServerLimits(), jetstream_memory="16MB", jetstream_file="1GB"))
    async with AsyncExitStack() as stack:

        async def open_bus() -> NatsBus:
            bus = await NatsBus.connect(server.url, timeout_s=30)
            stack.push_async_callback(bus.drain)
            return bus

        yield open_bus
    server.stop()


async def ended(client: Client, name: str, within_s: float) -> dict[str, Any]:
    """The state of a durable request once it has ended, also if services are away meanwhile."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                found = await client.state(name)
            except HeadraceError as error:
                if not error.retryable:
                    raise
                found = {"status": "away"}
            if found["status"] not in ("queued", "running", "away"):
                return found
            await asyncio.sleep(0.02)
