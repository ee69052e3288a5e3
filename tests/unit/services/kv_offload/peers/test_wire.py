"""Two kv_offloads as actors of two hosts, over a memory bus and a transport that reads the other's file."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.kv_offload.file_wire import FileWire
from support.memory_bus import MemoryBroker

from services.kv_offload.actor import KvOffloadActor, OpenWire, metric_points
from services.kv_offload.backends.arena import SHM, Plan, sweep
from services.kv_offload.backends.interface import RemoteError
from services.kv_offload.l2.worker import verify_payload
from shared.actor.mailbox import Mailbox
from shared.actor.membership import PEER_READS
from shared.actor.runtime import Actor, Runtime
from shared.messages import (
    KvCommit,
    KvFound,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    ints,
)
from shared.telemetry.counters import MetricPoint

PAGE, PRINT, WAIT_S = 4096, "00112233445566778899aabbccddeeff", 20
_NAMES = (f"test-peers-{os.getpid()}-{i}" for i in itertools.count())


class Scheduler(Actor):
    """Asks kv_offloads, and waits for each answer."""

    kind = "scheduler"

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Message] = asyncio.Queue()

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def receive(self, source: str, message: Message, trace: str) -> None:
        self.answers.put_nowait(message)

    async def ask(self, of: str, message: Message, kind: type[Message]) -> Message:
        self.mailbox.send(f"kv_offload.{of}", message)
        async with asyncio.timeout(WAIT_S):
            while not isinstance(answer := await self.answers.get(), kind):
                pass
        return answer


@dataclass
class Hosts:
    """kv_offloads a and b, each on a host of its own."""

    broker: MemoryBroker = field(default_factory=MemoryBroker)
    scheduler: Scheduler = field(default_factory=Scheduler)
    actors: dict[str, KvOffloadActor] = field(default_factory=dict)
    wires: dict[str, FileWire] = field(default_factory=dict)
    runtimes: dict[str, Runtime] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)

    async def start(self, name: str, open_wire: OpenWire | None = None, host: str = "") -> KvOffloadActor:
        def opened(path: Path) -> FileWire:
            self.wires[name] = FileWire(path)
            return self.wires[name]

        self.plans.append(next(_NAMES))
        actor = KvOffloadActor(Plan(self.plans[-1], 20 * PAGE), open_wire=open_wire or opened)
        self.actors[name] = actor
        await self.run(name, actor, host or name)
        return actor

    async def run(self, name: str, actor: Actor, host: str) -> None:
        runtime = Runtime(actor, self.broker.connect(), "f", name, host_id=host, heartbeat_interval_us=20_000)
        await runtime.start()
        self.runtimes[name] = runtime

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0.002)

    async def met(self) -> None:
        """Each may read the other's L1."""
        await self.until(lambda: all(len(self.peers(name).peers) == 1 for name in self.actors))

    def peers(self, name: str):  # noqa: ANN201 - the core's, as it is
        return self.actors[name]._core.peers

    async def store(self, of: str, *numbers: int) -> None:
        keys = b"".join(bytes([n]) * 32 for n in numbers)
        asked = KvReserve(
            job=1, owner="executor.e", keys=keys, value_bytes=PAGE, lease_us=10**7,
            valid_tokens=ints(numbers), fingerprint=PRINT,
        )  # fmt: skip
        reserved = await self.scheduler.ask(of, asked, KvReserved)
        assert isinstance(reserved, KvReserved)
        with (SHM / self.actors[of].heartbeat_payload().arena).open("r+b") as arena:
            for number, offset in zip(numbers, reserved.offsets, strict=True):
                arena.seek(offset)
                arena.write(bytes([number + 100]) * PAGE)
        await self.scheduler.ask(of, KvCommit(job=1, written=ints([1] * len(numbers))), KvStored)

    async def look_up(self, of: str, *numbers: int) -> list[int]:
        keys = b"".join(bytes([n]) * 32 for n in numbers)
        found = await self.scheduler.ask(of, KvLookup(job=2, keys=keys, fingerprint=PRINT), KvFound)
        assert isinstance(found, KvFound)
        return list(found.tiers)

    async def found(self, of: str, *numbers: int, tiers: list[int]) -> None:
        """Asked until the peer has answered: it has 10 ms a time, which a busy machine may miss."""
        async with asyncio.timeout(WAIT_S):
            while await self.look_up(of, *numbers) != tiers:
                pass

    async def load(self, of: str, *numbers: int, deadline_us: int = 10**7) -> list[int]:
        """The numbers of the blocks that came, with the bytes that were stored."""
        keys = b"".join(bytes([n]) * 32 for n in numbers)
        asked = KvPrefetch(
            job=3, owner="executor.e", keys=keys, deadline_us=deadline_us, lease_us=10**7, fingerprint=PRINT
        )
        ready = await self.scheduler.ask(of, asked, KvReady)
        assert isinstance(ready, KvReady)
        memory = (SHM / self.actors[of].heartbeat_payload().arena).read_bytes()
        came = [
            (n, o, v) for n, o, v in zip(numbers, ready.offsets, ready.valid_tokens, strict=True) if o >= 0
        ]
        for number, offset, valid in came:
            assert memory[offset : offset + PAGE] == bytes([number + 100]) * PAGE
            assert valid == number
        self.scheduler.mailbox.send(f"kv_offload.{of}", KvRelease(jobs=ints([3])))
        return [number for number, _, _ in came]

    async def idle(self) -> None:
        """Nothing is leased, asked or read on any host."""

        def nothing() -> bool:
            found = [actor.status() for actor in self.actors.values()]
            return not any(s["reads"] or s["loads"] or s["lookups"] or s["peers"]["open"] for s in found)  # type: ignore[index]

        await self.until(nothing)


@pytest.fixture
async def hosts() -> AsyncIterator[Hosts]:
    made = Hosts()
    await made.run("s", made.scheduler, "a")
    yield made
    for wire in made.wires.values():
        wire.going.set()
    for runtime in made.runtimes.values():
        await runtime.finish(5)
        assert runtime.failure is None
    for plan in made.plans:
        assert sweep(plan) == [], "it has left a segment"


async def test_blocks_of_another_host_come_into_l1(hosts: Hosts) -> None:
    await hosts.start("a")
    await hosts.start("b")
    await hosts.met()
    assert (PEER_READS, 1) in hosts.actors["a"].heartbeat_payload().load
    await hosts.store("a", 1, 2, 3)
    await hosts.found("b", 1, 2, 3, 4, tiers=[2, 2, 2, 0])
    assert await hosts.load("b", 1, 2, 3) == [1, 2, 3]
    assert await hosts.look_up("b", 1, 2, 3) == [1, 1, 1]
    await hosts.idle()
    shown = hosts.actors["b"].status()["peers"]
    assert isinstance(shown, dict)
    assert (shown["gets"], shown["bytes"], shown["failures"]) == (3, 3 * PAGE, 0)
    assert hosts.actors["a"].status()["peers"]["leased"] == 3  # type: ignore[index]
    points = [p for p in metric_points(hosts.actors["b"]._core.state) if isinstance(p, MetricPoint)]
    read = {(p.name, *p.attributes): p.value for p in points}
    assert read["headrace.kv_offload.peer.keys", ("what", "read")] == 3
    assert read["headrace.kv_offload.peer.read",] == 3 * PAGE
    assert read["headrace.kv_offload.hit_keys", ("tier", "peer")] >= 3


async def test_two_on_one_host_are_no_peers(hosts: Hosts) -> None:
    await hosts.start("a", host="h")
    await hosts.start("b", host="h")
    await hosts.start("c")
    await hosts.until(lambda: set(hosts.peers("c").peers) == {"kv_offload.a", "kv_offload.b"})
    await hosts.until(lambda: set(hosts.peers("b").peers) == {"kv_offload.c"})


async def test_wrong_bytes_and_failed_reads_are_not_found(hosts: Hosts) -> None:
    await hosts.start("a")
    await hosts.start("b")
    await hosts.met()
    await hosts.store("a", 1, 2)
    await hosts.found("b", 1, 2, tiers=[2, 2])
    hosts.wires["b"].wrong = True
    assert await hosts.load("b", 1, 2) == [1]
    hosts.wires["b"].wrong, hosts.wires["b"].fails = False, True
    await hosts.found("b", 2, tiers=[2])
    assert await hosts.load("b", 2) == []
    assert hosts.actors["b"].status()["peer_error"] == "the peer is gone"
    await hosts.idle()


async def test_a_peer_dies_in_the_middle_of_a_read(hosts: Hosts) -> None:
    await hosts.start("a")
    await hosts.start("b")
    await hosts.met()
    await hosts.store("a", 1, 2)
    await hosts.found("b", 1, 2, tiers=[2, 2])
    hosts.wires["b"].going.clear()
    loading = asyncio.create_task(hosts.load("b", 1, 2))
    await asyncio.to_thread(hosts.wires["b"].begun.wait, WAIT_S)
    await hosts.runtimes["a"].finish(5)
    del hosts.actors["a"]
    assert await loading == [], "before the read's own end, by the heartbeat"
    await hosts.until(lambda: hosts.peers("b").peers == {})
    hosts.wires["b"].going.set()
    await hosts.idle()
    await hosts.start("a")
    await hosts.met()
    assert await hosts.look_up("b", 1) == [0], "another arena"


async def test_a_transport_that_does_not_open_leaves_everything_as_it_was(hosts: Hosts) -> None:
    def broken(path: Path) -> FileWire:
        raise RemoteError(f"no network for {path.name}")

    await hosts.start("a", broken)
    await hosts.start("b")
    await hosts.until(lambda: "no network" in str(hosts.actors["a"].status().get("peer_error")))
    await hosts.store("a", 1)
    assert await hosts.look_up("a", 1) == [1]
    assert hosts.peers("b").peers == {}
    assert (PEER_READS, 1) not in hosts.actors["a"].heartbeat_payload().load


def test_a_header_that_is_too_short_is_wrong() -> None:
    assert verify_payload(b"", b"bytes", (PRINT, bytes(32))) is None
