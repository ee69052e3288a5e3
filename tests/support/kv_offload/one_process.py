"""One kv_offload in its shell, with an executor and schedulers that a program controls."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from services.kv_offload.actor import KvOffloadActor
from services.kv_offload.backends.arena import MIB, SHM, Plan
from services.launcher import nats_server
from shared.actor.mailbox import Mailbox
from shared.actor.runtime import Actor, Runtime
from shared.messages import (
    KvCommit,
    KvFound,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    ints,
)
from shared.nats.bus import NatsBus

PRINT = "00112233445566778899aabbccddeeff"
KV, OWNER = "kv_offload.k", "executor.e"
BLOCK_BYTES = 256 * 1024
LONG_US = 600_000_000
ANSWER_S, ANSWER_US = 30.0, 30_000_000
_ANSWERS = {KvLookup: KvFound, KvReserve: KvReserved, KvPrefetch: KvReady, KvCommit: KvStored}


class Scheduler(Actor):
    """Asks; a question that it does not wait for is a cancelled one."""

    kind = "scheduler"

    def __init__(self) -> None:
        self._waiting: dict[tuple[type[Message], int], asyncio.Future[Any]] = {}

    async def start(self, port: Mailbox) -> None:
        self._port = port

    def receive(self, source: str, message: Message, trace: str) -> None:
        asked = self._waiting.pop((type(message), getattr(message, "job", 0)), None)
        if asked is not None and not asked.done():
            asked.set_result(message)

    def send(self, message: Message) -> None:
        self._port.send(KV, message)

    async def ask(self, message: Message) -> Any:
        """The answer. Raises TimeoutError."""
        key = (_ANSWERS[type(message)], getattr(message, "job", 0))
        self._waiting[key] = asyncio.get_running_loop().create_future()
        self.send(message)
        return await asyncio.wait_for(self._waiting[key], ANSWER_S)


class Executor(Actor):
    """Is there."""

    kind = "executor"


class Segment:
    """L1 as an executor maps it."""

    def __init__(self, name: str) -> None:
        self._file = (SHM / name).open("r+b")

    def write(self, numbers: list[int], offsets: list[int]) -> None:
        """These blocks, where they found room."""
        for number, offset in zip(numbers, offsets, strict=True):
            if offset >= 0:
                self._file.seek(offset)
                self._file.write(_value(number))
        self._file.flush()

    def intact(self, numbers: list[int], offsets: list[int]) -> bool:
        """What lies there is what was written."""
        return all(self._read(offset) == _value(n) for n, offset in zip(numbers, offsets, strict=True))

    def close(self) -> None:
        self._file.close()

    def _read(self, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(BLOCK_BYTES)


class House:
    """One kv_offload, one executor, one scheduler after the other."""

    def __init__(self, l1_bytes: int) -> None:
        self.kv = KvOffloadActor(Plan(f"churn-{os.getpid()}", l1_bytes), None)
        self.blocks = l1_bytes // BLOCK_BYTES
        self._server = nats_server.start()
        self._runtimes: dict[str, Runtime] = {}
        self._jobs = 0

    async def open(self) -> None:
        await self._run("k", self.kv)
        await self.open_again()
        self.segment = Segment(self.kv.heartbeat_payload().arena)

    async def open_again(self) -> None:
        """An executor and a scheduler."""
        await self._run("e", Executor())
        await self.new_scheduler()

    async def new_scheduler(self) -> None:
        """The one before is dead."""
        await self.end("s")
        self.scheduler = Scheduler()
        await self._run("s", self.scheduler)

    async def end(self, name: str) -> None:
        if name in self._runtimes:
            await self._runtimes.pop(name).finish(5)

    def l1(self) -> dict[str, Any]:
        """Its status of L1."""
        tiers: Any = self.kv.status()["tiers"]
        return dict(tiers["l1"])

    def held(self) -> dict[str, Any]:
        """What is open, leased or in quarantine; empty when nothing is."""
        counts = {
            name: self.kv.status()[name] for name in ("lookups", "loads", "reads", "writes", "quarantine")
        }
        l1 = self.l1()
        counts |= {name: l1[name] for name in ("read_bytes", "written_bytes", "quarantined_bytes")}
        return {name: count for name, count in counts.items() if count}

    async def until_free(self, longest_s: float) -> None:
        """Return when nothing is held, or after so long."""
        ends_at = time.monotonic() + longest_s
        for _ in iter(lambda: bool(self.held()) and time.monotonic() < ends_at, False):
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        self.segment.close()
        for name in list(self._runtimes):
            await self.end(name)
        await asyncio.to_thread(self._server.stop)

    def job(self) -> int:
        self._jobs += 1
        return self._jobs

    def reserve(self, numbers: list[int], lease_us: int, urgent: bool = False) -> KvReserve:
        return KvReserve(
            job=self.job(), owner=OWNER, keys=keys(numbers), value_bytes=BLOCK_BYTES, lease_us=lease_us,
            valid_tokens=ints([16] * len(numbers)), fingerprint=PRINT, priority=int(urgent),
        )  # fmt: skip

    def prefetch(self, numbers: list[int], lease_us: int) -> KvPrefetch:
        return KvPrefetch(
            job=self.job(), owner=OWNER, keys=keys(numbers), deadline_us=ANSWER_US, lease_us=lease_us,
            fingerprint=PRINT,
        )  # fmt: skip

    async def store(self, numbers: list[int]) -> int:
        """How many found room."""
        asked = self.reserve(numbers, LONG_US)
        offsets = list((await self.scheduler.ask(asked)).offsets)
        self.segment.write(numbers, offsets)
        await self.scheduler.ask(KvCommit(job=asked.job, written=ints(int(o >= 0) for o in offsets)))
        return sum(offset >= 0 for offset in offsets)

    async def _run(self, name: str, actor: Actor) -> None:
        bus = await NatsBus.connect(self._server.url, timeout_s=5)
        runtime = Runtime(actor, bus, "churn", name, heartbeat_interval_us=100_000)
        await runtime.start()
        self._runtimes[name] = runtime


async def burst(times: int, l1_mib: int) -> dict[str, Any]:
    """`times` what L1 holds is stored, four reservations of eight blocks at a time; an eighth is pinned."""
    house = House(l1_mib * MIB)
    await house.open()
    pinned = list(range(house.blocks // 8))
    await house.store(pinned)
    asked = house.prefetch(pinned, LONG_US)
    offsets = list((await house.scheduler.ask(asked)).offsets)
    waiting = [list(range(first, first + 8)) for first in range(1_000, 1_000 + times * house.blocks, 8)]
    count, began = 8 * len(waiting), time.monotonic()

    async def one_after_the_other() -> int:
        return sum([await house.store(waiting.pop()) for _ in range(len(waiting)) if waiting])

    accepted = sum(await asyncio.gather(*(one_after_the_other() for _ in range(4))))
    took_s = time.monotonic() - began
    found = {
        "blocks_of_l1": house.blocks, "pinned": len(pinned), "offered": count, "accepted": accepted,
        "accepted_pct": round(100 * accepted / count, 2),
        "pinned_intact": house.segment.intact(pinned, offsets),
        "gb_per_s": round(accepted * BLOCK_BYTES / took_s / 1e9, 2),
    }  # fmt: skip
    await house.close()
    return found


def keys(numbers: list[int]) -> bytes:
    """The names of blocks."""
    return b"".join(number.to_bytes(32, "big") for number in numbers)


def _value(number: int) -> bytes:
    return number.to_bytes(8, "big") * (BLOCK_BYTES // 8)
