"""The five services in one process and one event loop, over a MemoryBus: no server, no sockets, one GIL."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from loadtest.fleet import KINDS, until_ready
from services.launcher.serve import builder
from shared.actor.runtime import Runtime
from shared.client import Client
from shared.config import Settings
from shared.nats.memory import MemoryBroker

DRAIN_S = 5.0


@asynccontextmanager
async def one_process(settings: Settings) -> AsyncGenerator[Client]:
    """A client of the services, which answer."""
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        for kind in reversed(KINDS):  # who is sent to starts first; they end the other way round
            runtime = Runtime(builder(kind)(settings), broker.connect(), settings.fleet, f"{kind}-1")
            stack.push_async_callback(runtime.finish, DRAIN_S)
            await runtime.start()
        client = await Client.open(broker.connect())
        await until_ready(client)
        yield client
