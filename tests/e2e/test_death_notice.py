"""`headrace up` announces the death of a service: the streams of a killed executor go on long before its
heartbeats are missed, over real processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.running_up import StartUp

from loadtest import faults
from loadtest.leaks import settle
from shared.client.client import Client
from shared.nats.bus import NatsBus

MODEL = "smollm2-135m-instruct"
HEARTBEAT_MS = 3_000
STREAMS, TOKENS, BEGUN = 32, 300, 30
EXPECTED = {"tokenizer": 1, "scheduler": 1, "executor": 2, "kv_offload": 1, "detokenizer": 1}
SETTLE_S = 60


@dataclass
class Read:
    """What a reader has seen of one stream."""

    text: str = ""
    times_s: list[float] = field(default_factory=list)

    @property
    def pause_s(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.times_s))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    bus = await NatsBus.connect(url, timeout_s=30)
    try:
        yield await Client.open(bus)
    finally:
        await bus.drain()


async def read(client: Client, seed: int, into: Read) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True, "seed": seed}
    async for frame in client.stream({**body, "temperature": 1.0}, timeout_s=60):
        if frame["type"] == "delta":
            into.text += frame["choices"][0]["text"]
            into.times_s.append(time.monotonic())


async def streams(client: Client, victim: int = 0) -> list[Read]:
    """All streams; `victim`, a process id, is killed once each of them has begun."""
    reads = [Read() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(read(client, seed, each)) for seed, each in enumerate(reads)]
    if victim:
        async with asyncio.timeout(60):
            while min(len(each.times_s) for each in reads) < BEGUN:
                await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        faults.kill(victim)
    await asyncio.gather(*tasks)
    return reads


@pytest.mark.timed
async def test_streams_of_a_killed_executor_pause_for_less_than_a_heartbeat(start_up: StartUp) -> None:
    up = start_up(
        HEADRACE_SIM="step=10000,token=20",
        HEADRACE_EXECUTORS="2",
        HEADRACE_HEARTBEAT_INTERVAL_MS=str(HEARTBEAT_MS),
    )
    async with connected(up.nats_url) as client:
        await settle(client.bus, EXPECTED, SETTLE_S)
        expected = await streams(client)
        victim = faults.pids_of(up.process.pid, "executor")[0]
        found = await streams(client, victim)
        pauses_s = sorted(each.pause_s for each in found)
        print(f"pauses of streams: median {pauses_s[STREAMS // 2]:.2f} s, longest {pauses_s[-1]:.2f} s")
        assert [each.text for each in found] == [each.text for each in expected]
        assert pauses_s[-1] < HEARTBEAT_MS / 1000
        await settle(client.bus, EXPECTED, SETTLE_S)  # the new instance serves
        assert victim not in faults.pids_of(up.process.pid, "executor")
        again = await streams(client)
        assert [each.text for each in again] == [each.text for each in expected]
        (scheduler,) = [s for s in await settle(client.bus, EXPECTED, SETTLE_S) if s["kind"] == "scheduler"]
        assert len(scheduler["executors"]) == 2
