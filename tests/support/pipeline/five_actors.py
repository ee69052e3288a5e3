"""The five real actors in one event loop, on any bus that a test brings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from services.detokenizer import actor as detokenizer
from services.executor import actor as executor
from services.kv_offload import actor as kv_offload
from services.scheduler import actor as scheduler
from services.tokenizer import actor as tokenizer
from shared.actor.runtime import Actor, Runtime
from shared.client.client import Client
from shared.config import Settings, load
from shared.nats.interface import Bus

Connect = Callable[[], Awaitable[Bus]]

KINDS = {
    "kv_offload": kv_offload.build,
    "scheduler": scheduler.build,
    "detokenizer": detokenizer.build,
    "executor": executor.build,
    "tokenizer": tokenizer.build,
}


@dataclass
class Pipeline:
    """Start with `await Pipeline.start(...)`, end with `await pipeline.stop()`."""

    heartbeat_us = 50_000  # at least 250,000 beside a real model: five actors handle each in the steps' loop

    connect: Connect
    settings: Settings
    runtimes: dict[str, Runtime] = field(default_factory=dict)
    suffix: str = ""  # of the ids of its actors, where a fleet has another pipeline
    client: Client = field(init=False)

    @classmethod
    async def start(cls, connect: Connect, fleet: str, **settings: Any) -> Pipeline:
        flags = {"fleet": fleet, "backend": "sim", "sim": "step=200", "l1": "off", **settings}
        pipeline = cls(connect, load(flags=flags).settings)
        if pipeline.settings.backend == "torch":
            pipeline.heartbeat_us = max(pipeline.heartbeat_us, 250_000)
        await pipeline.begin()
        return pipeline

    async def begin(self) -> None:
        """Start an actor of each kind, and a client."""
        for kind in KINDS:
            await self.add(kind, f"{kind}-1")
        self.client = await Client.open(await self.connect())
        await self.until(lambda: bool(self.status("scheduler")["executors"]))

    def build(self, kind: str) -> Actor:
        """An actor of this kind, as the settings ask for it."""
        return KINDS[kind](self.settings)

    async def add(self, kind: str, name: str) -> Runtime:
        runtime = Runtime(
            self.build(kind),
            await self.connect(),
            self.settings.fleet,
            name + self.suffix,
            self.settings.host_id,
            heartbeat_interval_us=self.heartbeat_us,
        )
        self.runtimes[name] = runtime
        await runtime.start()
        return runtime

    def status(self, kind: str) -> dict[str, Any]:
        return self.runtimes[f"{kind}-1"].actor.status()

    async def until(self, true: Callable[[], bool], timeout_s: float = 20) -> None:
        """Wait for an observable state; fail loudly if it does not come."""
        async with asyncio.timeout(timeout_s):
            while not true():
                await asyncio.sleep(0.005)

    async def assert_idle(self) -> None:
        """Every request, block and slot is free, everywhere, within moments."""

        def idle() -> bool:
            status = self.status("scheduler")
            engines = status["executors"].values()
            return status["requests"] == 0 and all(
                e["free_blocks"] + e["dirty_blocks"] == e["blocks"]
                and e["free_slots"] == e["slots"]
                and e["reserved_blocks"] == e["fenced_blocks"] == 0
                for e in engines
            )

        await self.until(idle)
        await self.until(lambda: self.status("executor")["open_slots"] == 0)

    async def stop(self) -> None:
        for kind in ("tokenizer", "scheduler", "executor", "detokenizer", "kv_offload"):
            for name, runtime in self.runtimes.items():
                if name.startswith(kind):
                    await runtime.finish(5)
                    assert runtime.failure is None
