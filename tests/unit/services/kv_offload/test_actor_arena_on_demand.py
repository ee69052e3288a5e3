"""L1 by need: without a GPU it opens once it is shared, and its pages are reserved as ranges are taken."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.kv_offload.memory_remote import MemoryRemote
from support.memory_bus import MemoryBroker

from services.kv_offload import actor as module
from services.kv_offload.actor import KvOffloadActor
from services.kv_offload.backends import arena as arenas
from services.kv_offload.backends.arena import SHM, Plan, shared_arena, sweep
from shared.actor.membership import ONLY_TIER
from shared.actor.runtime import Actor, HeartbeatPayload, Runtime
from shared.nats.interface import Bus

PAGE = 4096
ALONE = HeartbeatPayload(model="m", load=((ONLY_TIER, 1),))
_HOSTS = (f"test-need-{os.getpid()}-{i}" for i in itertools.count())


@pytest.fixture
def host() -> Iterator[str]:
    name = next(_HOSTS)
    yield name
    assert not [left for left in sweep(name) if name in left], "it has left a segment"


class Executor(Actor):
    kind = "executor"

    def __init__(self, payload: HeartbeatPayload) -> None:
        self._payload = payload

    def heartbeat_payload(self) -> HeartbeatPayload:
        return self._payload


class House:
    """One kv_offload, and what it sees."""

    def __init__(self, host: str, **plan: bool) -> None:
        self._broker = MemoryBroker()
        self._plan = replace(Plan(host, 8 * PAGE, by_need=True), **plan)
        self._runtimes: list[Runtime] = []

    async def start(self, *, l2: bool = False) -> KvOffloadActor:
        kv = KvOffloadActor(self._plan, MemoryRemote if l2 else None)
        await self.join(kv, "k")
        return kv

    async def join(self, actor: Actor, name: str, host_id: str = "local") -> Runtime:
        bus: Bus = self._broker.connect()
        runtime = Runtime(actor, bus, "f", name, heartbeat_interval_us=10_000, host_id=host_id)
        self._runtimes.append(runtime)
        await runtime.start()
        return runtime

    async def beats(self, kv: KvOffloadActor, count: int = 5) -> None:
        """Until the kv_offload has looked around so many times."""
        seen, looks = asyncio.Event(), itertools.count(1)
        upkeep = kv.upkeep

        def counted() -> None:
            upkeep()
            if next(looks) == count:
                seen.set()

        kv.upkeep = counted  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            await seen.wait()
        kv.upkeep = upkeep  # type: ignore[method-assign]

    async def stop(self) -> None:
        while self._runtimes:
            await self._runtimes.pop().finish(5)


async def opened(kv: KvOffloadActor) -> bool:
    async with asyncio.timeout(60):
        while not kv.heartbeat_payload().arena:
            await asyncio.sleep(0.002)
    return not kv.status().get("not_shared")


async def test_arena_is_not_opened_for_one_executor_with_its_share(host: str) -> None:
    house = House(host)
    kv = await house.start()
    await house.join(Executor(ALONE), "e")
    await house.join(Executor(replace(ALONE, model="another")), "e2")
    await house.join(Executor(ALONE), "far", host_id="elsewhere")
    await house.beats(kv)
    assert (kv.heartbeat_payload().arena, kv.status()["not_shared"]) == ("", True)
    await house.stop()


@pytest.mark.parametrize(
    "others",
    [[ALONE], [HeartbeatPayload(model="another")], [HeartbeatPayload(model="m")]],
    ids=["a second one of the model", "one of another model on a GPU", "an older one of the model"],
)
async def test_l1_opens_when_an_executor_shares_it(host: str, others: list[HeartbeatPayload]) -> None:
    house = House(host)
    kv = await house.start()
    await house.join(Executor(ALONE), "e")
    await house.beats(kv)
    assert not kv.heartbeat_payload().arena
    for i, payload in enumerate(others):
        await house.join(Executor(payload), f"other{i}")
    assert await opened(kv)
    await house.stop()


async def test_arena_is_opened_at_the_start_for_an_l2_and_for_a_given_size(host: str) -> None:
    for l2, by_need in ((True, True), (False, False)):
        house = House(host, by_need=by_need)
        kv = await house.start(l2=l2)
        assert kv.heartbeat_payload().arena
        assert "not_shared" not in kv.status()
        await house.stop()


async def test_no_room_for_it_is_reported_as_at_the_start(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size_bytes: int) -> None:
        raise arenas.NoRoom("no room")

    monkeypatch.setattr(arenas, "check_room", full)
    house = House(host)
    kv = await house.start()
    await house.join(Executor(replace(ALONE, load=())), "e")
    async with asyncio.timeout(60):
        while "why_off" not in kv.status():
            await asyncio.sleep(0.002)
    assert (kv.status()["why_off"], "not_shared" in kv.status()) == ("no room", False)
    await house.stop()


@pytest.mark.parametrize("by_need", [False, True])
async def test_arena_is_opened_once_there_is_room(
    host: str, by_need: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = []

    def check(size_bytes: int) -> None:
        if not room:
            raise arenas.NoRoom("no room")

    monkeypatch.setattr(arenas, "check_room", check)
    monkeypatch.setattr(module, "AGAIN_US", 0)
    house = House(host, by_need=by_need)
    kv = await house.start()
    await house.join(Executor(replace(ALONE, load=())), "e")
    for _ in range(3):
        await house.beats(kv)
    assert (kv.status()["why_off"], kv.heartbeat_payload().arena) == ("no room", "")
    room.append(True)
    assert await opened(kv)
    assert "why_off" not in kv.status()
    assert caplog.text.count("no KV tiers: no room") == 1
    await house.stop()


def test_pages_are_reserved_as_ranges_are_taken(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "RESERVE_BYTES", 2 * PAGE)
    arena = shared_arena(host, 1, 8 * PAGE, by_need=True)
    file = SHM / arena.name
    found = [file.stat().st_blocks * 512]
    for size in (1, PAGE, PAGE, 4 * PAGE):
        assert arena.allocate(os.urandom(32), size) is not None
        found.append(file.stat().st_blocks * 512)
    assert [each // PAGE for each in found] == [0, 2, 2, 4, 7], "what is taken, or a step more"
    assert file.stat().st_size == 8 * PAGE
    arena.close()
    arena.close()


def test_a_full_shared_memory_is_an_arena_without_room(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "RESERVE_BYTES", PAGE)
    arena = shared_arena(host, 1, 4 * PAGE, by_need=True)
    kept = os.urandom(32)
    assert arena.allocate(kept, PAGE) == 0
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        full.setattr(os, "posix_fallocate", refuse)
        assert arena.allocate(os.urandom(32), PAGE) is None
        assert arena.free_bytes() == 3 * PAGE
        arena.discard(kept)
        assert arena.allocate(kept, PAGE) == 0, "reserved pages can be used again"
    assert arena.allocate(os.urandom(32), PAGE) == PAGE, "and new ones, once there is room"
    arena.close()


@pytest.mark.parametrize("by_need", [True, False])
def test_lmcache_is_not_imported_without_an_l2(by_need: bool, host: str) -> None:
    program = """
import asyncio, sys
from services.kv_offload.actor import KvOffloadActor
from services.kv_offload.backends.arena import Plan
from shared.actor.runtime import Runtime
from support.memory_bus import MemoryBroker

async def main():
    actor = KvOffloadActor(Plan(sys.argv[1], 4096, by_need=len(sys.argv) > 2))
    runtime = Runtime(actor, MemoryBroker().connect(), "f", "k")
    await runtime.start()
    print(runtime.state, {"lmcache", "torch"} & set(sys.modules))
    await runtime.finish(1)

asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, host, *["by need"] * by_need],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    assert done.stdout == "ready set()\n"
