"""The two sides whose difference is the broker's cost, each with the load client in a process of its own.

    memory   client and five services in this process, over a MemoryBus
    nats     the client alone; the services are a fleet of processes on a nats-server

Commands come through a pipe: a point to run, answered by its figures and the CPU time of this process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from loadtest.bench.asked import Options
from loadtest.bench.loop import runner
from loadtest.bench.over_http import DEFAULT_TIMEOUT_S
from loadtest.bench.over_nats import NatsTransport
from loadtest.bench.pacer import Pacer
from loadtest.bench.run import Asked, Bench, Point
from loadtest.fleet import MODEL, until_ready
from loadtest.one_process import one_process
from shared.actor.runtime import settle_garbage_collector
from shared.client import Client
from shared.config import load
from shared.nats.bus import NatsBus

READY = "ready"


@dataclass(frozen=True, slots=True)
class Side:
    """A side in its process. Made by `start`."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection

    @classmethod
    async def start(cls, env: Mapping[str, str], nats_url: str = "") -> Side:
        """With a URL the client of that server, else everything. Returns when requests are answered."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, dict(env), nats_url), daemon=True)
        process.start()
        theirs.close()
        side = cls(process, ours)
        assert await side._heard() == READY
        return side

    async def run(self, number: int, asked: Asked, point: Point) -> dict[str, Any]:
        """The figures of one run, `cpu_s` among them. Raises EOFError when the process has ended."""
        self.pipe.send((number, asked, point))
        figures: dict[str, Any] = await self._heard()
        return figures

    def stop(self) -> None:
        """End the process."""
        self.pipe.send(None)
        self.process.join(30)
        self.process.kill()

    async def _heard(self) -> Any:
        return await asyncio.to_thread(self.pipe.recv)


def serve(pipe: Connection, env: dict[str, str], nats_url: str) -> None:
    """The process of a side."""
    os.environ.update(env)
    with runner() as loop:
        loop.run(_answer(pipe, nats_url))


async def _answer(pipe: Connection, nats_url: str) -> None:
    reached: AbstractAsyncContextManager[Client] = (
        _over_nats(nats_url) if nats_url else one_process(load().settings)
    )
    async with reached as client:
        pacer = Pacer()
        transport = NatsTransport(client, MODEL, pacer, DEFAULT_TIMEOUT_S)
        settle_garbage_collector()
        pipe.send(READY)
        while (command := await asyncio.to_thread(pipe.recv)) is not None:
            number, asked, point = command
            busy_s = time.process_time()
            run = await Bench(transport, asked, Options(), {}, pacer).point(number, point)
            pipe.send({**run["figures"], "cpu_s": time.process_time() - busy_s})


@asynccontextmanager
async def _over_nats(url: str) -> AsyncGenerator[Client]:
    bus = await NatsBus.connect(url, name="bench")
    client = await Client.open(bus)
    await until_ready(client)
    yield client
    await bus.drain()
