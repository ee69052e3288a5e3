"""kv_offload as an actor: a real segment, threads, an L2 in memory; sizes, stale segments, start and stop."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.kv_offload.memory_remote import MemoryRemote
from support.memory_bus import MemoryBroker

from services.kv_offload import actor
from services.kv_offload.actor import KvOffloadActor, build
from services.kv_offload.backends import arena
from services.kv_offload.backends.arena import (
    GIB,
    MIB,
    SHM,
    Plan,
    hold,
    let_go,
    plan,
    segment_name,
    shared_arena,
    size_bytes,
    sweep,
)
from services.kv_offload.backends.interface import RemoteError
from services.kv_offload.l2 import worker
from services.kv_offload.l2.worker import CANARY
from shared.actor.mailbox import Mailbox
from shared.actor.runtime import Actor, Runtime
from shared.config import load
from shared.errors import SetupError
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

PAGE = 4096
PRINT = "00112233445566778899aabbccddeeff"
KV = "kv_offload.k"
_HOSTS = (f"test-actor-{os.getpid()}-{i}" for i in itertools.count())


def test_l1_size_follows_the_setting_and_the_memory() -> None:
    assert size_bytes("off", 100 * GIB, 100 * GIB) == 0
    assert size_bytes("512", GIB, GIB) == 512 * MIB
    assert size_bytes("auto", 40 * GIB + 5, 100 * GIB) == 10 * GIB
    assert size_bytes("auto", 100 * GIB, 10 * GIB) == 5 * GIB
    assert size_bytes("auto", 1000 * GIB, 1000 * GIB) == 64 * GIB
    assert size_bytes("auto", 40 * GIB, 100 * GIB, 2 * GIB) == 2 * GIB, "the engine is in the same memory"
    assert size_bytes("auto", 100 * GIB, 16 * MIB) == 0, "next to nothing is of no use"
    for wrong in ("", "0", "-5", "1g", "1.5", "on", "9" * 10):
        with pytest.raises(SetupError, match="MiB of memory for KV copies, auto or off"):
            size_bytes(wrong, GIB, GIB)


def test_plan_has_the_figures_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan("auto", "fleet", "a host")
    assert found.bytes % PAGE == 0
    assert segment_name(found.host, 1)
    monkeypatch.setattr(arena, "available_bytes", lambda: 2 * GIB)
    assert plan("auto", "fleet", "a host").bytes <= GIB // 2
    assert plan("auto", "fleet", "b").host != found.host != plan("auto", "f", "a host").host


@pytest.fixture
def host() -> Iterator[str]:
    name = next(_HOSTS)
    yield name
    assert not [left for left in sweep(name) if name in left], "it has left a segment"


def test_segments_of_dead_owners_are_removed_and_segments_of_living_owners_stay(host: str) -> None:
    dead, other = shared_arena(host, 1, PAGE), shared_arena(f"{host}-b", 1, PAGE)
    living = arena.open_arena(Plan(host, PAGE), 2)
    assert not (SHM / dead.name).exists()
    third = arena.open_arena(Plan(host, PAGE), 3)
    assert (SHM / living.arena.name).exists()
    assert (SHM / other.name).exists()
    with pytest.raises(BlockingIOError):
        hold(third.arena.name)
    for opened in (living, third):
        opened.close()
        assert not (SHM / opened.arena.name).exists()
    other.close()
    dead.close()


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(arena, "SHM", tmp_path)
    monkeypatch.setattr(arena, "SHM", tmp_path)
    return tmp_path


@pytest.mark.parametrize("ends", [("",), (".lock",), ("", ".lock")], ids=["segment", "lock", "both"])
def test_segment_of_another_user_is_left_alone(
    shm: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[str, ...]
) -> None:
    """Also by root, which may remove it."""
    names = sorted(f"{segment_name('fleet', 1)}{end}" for end in ends)
    for name in names:
        (shm / name).touch(0o666)
    own = os.getuid()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: own + 1)
        assert sweep("fleet") == []
    assert sorted(path.name for path in shm.iterdir()) == names
    assert sweep("fleet") == ([segment_name("fleet", 1)] if "" in ends else [])
    assert list(shm.iterdir()) == []


def test_segment_that_cannot_be_removed_stops_no_start(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, folder, link = (segment_name(host, 1) for host in ("fleet", "folder", "link"))
    (shm / f"{folder}.lock").mkdir()
    (shm / f"{link}.lock").symlink_to("/dev/null")
    for name in (kept, f"{kept}.lock", link):
        (shm / name).touch()

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    descriptors = os.listdir("/proc/self/fd")
    assert [plan(l1, "fleet", "a host").bytes for l1 in ("off", "16")] == [0, 16 * MIB]
    assert sweep("fleet") == []
    assert os.listdir("/proc/self/fd") == descriptors
    assert len(list(shm.iterdir())) == 5


def test_segments_of_dead_owners_of_other_fleets_are_removed_with_their_locks(host: str) -> None:
    names = [segment_name(f"{host}-{other}", 1) for other in "abc"]
    dead, unborn, living = names
    for name in (dead, unborn):  # one died before it had made its segment
        os.close(hold(name))
    lock = hold(living)
    for name in (dead, living):
        (SHM / name).write_bytes(b"x")
    assert not {unborn, living} & set(sweep(host))
    left = {path.name for path in SHM.iterdir() if path.name.startswith(segment_name(host, 1)[:-3])}
    assert left == {living, f"{living}.lock"}
    (SHM / living).unlink()
    let_go(living, lock)
    assert not (SHM / f"{living}.lock").exists()


@dataclass
class Shared:
    """An L2 whose connections share their values, and can be made to fail or to hang."""

    values: dict[str, bytes] = field(default_factory=dict)
    failing: bool = False
    going: threading.Event = field(default_factory=threading.Event)
    opened: int = 0

    def __post_init__(self) -> None:
        self.going.set()

    def connect(self) -> MemoryRemote:
        self.opened += 1
        return Connection(self)


class Connection(MemoryRemote):
    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    @property
    def _values(self) -> dict[str, bytes]:
        self._shared.going.wait()
        if self._shared.failing:
            raise RemoteError("down")
        return self._shared.values

    def close(self) -> None:
        pass


ANSWERS = {KvLookup: KvFound, KvReserve: KvReserved, KvPrefetch: KvReady, KvCommit: KvStored}


class Scheduler(Actor):
    """Asks and waits for the answer, among unrequested messages (KvGone)."""

    kind = "scheduler"

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Message] = asyncio.Queue()

    async def start(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def receive(self, source: str, message: Message, trace: str) -> None:
        self.answers.put_nowait(message)

    async def ask(self, message: Message) -> Message:
        self.mailbox.send(KV, message)
        kind, job = ANSWERS[type(message)], getattr(message, "job", None)
        async with asyncio.timeout(60):
            while True:
                answer = await self.answers.get()
                if isinstance(answer, kind) and answer.job == job:
                    return answer


@dataclass
class House:
    """A scheduler and some kv_offloads, one after the other, with one L2."""

    host: str
    l2: Shared
    broker: MemoryBroker
    scheduler: Scheduler
    runtimes: list[Runtime] = field(default_factory=list)
    kv: KvOffloadActor | None = None

    async def start(self, *, blocks: int = 20, l2: bool = True) -> KvOffloadActor:
        """A new incarnation."""
        connect = self.l2.connect if l2 else None
        self.kv = KvOffloadActor(Plan(self.host, blocks * PAGE), connect)
        await self.run(self.kv, "k")
        return self.kv

    async def run(self, actor: Actor, name: str) -> Runtime:
        runtime = Runtime(actor, self.broker.connect(), "f", name, heartbeat_interval_us=20_000)
        await runtime.start()
        self.runtimes.append(runtime)
        return runtime

    async def stop(self) -> None:
        while self.runtimes:
            await self.runtimes.pop().finish(5)

    @property
    def file(self) -> Path:
        assert self.kv is not None
        return SHM / self.kv.heartbeat_payload().arena

    async def store(self, *numbers: int, value_bytes: int = PAGE) -> None:
        """As an executor does: into the segment by its name."""
        ask = self.scheduler.ask
        keys = b"".join(bytes([n]) * 32 for n in numbers)
        reserve = KvReserve(
            job=1, owner="executor.e", keys=keys, value_bytes=value_bytes, lease_us=10**7,
            valid_tokens=ints(numbers), fingerprint=PRINT,
        )  # fmt: skip
        reserved = await ask(reserve)
        assert isinstance(reserved, KvReserved)
        with self.file.open("r+b") as arena:
            for number, offset in zip(numbers, reserved.offsets, strict=True):
                if offset >= 0:
                    arena.seek(offset)
                    arena.write(bytes([number + 100]) * value_bytes)
        marks = ints(offset >= 0 for offset in reserved.offsets)
        assert await ask(KvCommit(job=1, written=marks)) == KvStored(job=1, tiers=ints([1] * len(numbers)))

    async def look_up(self, *numbers: int) -> list[int]:
        keys = b"".join(bytes([n]) * 32 for n in numbers)
        found = await self.scheduler.ask(KvLookup(job=2, keys=keys, fingerprint=PRINT))
        assert isinstance(found, KvFound)
        return list(found.tiers)

    async def found(self, *numbers: int, tiers: list[int]) -> None:
        """Repeated until L2 has answered: it has 10 ms a time, which a busy machine may miss."""
        async with asyncio.timeout(60):
            while await self.look_up(*numbers) != tiers:
                pass

    async def load(self, *numbers: int) -> list[int | None]:
        """First byte of each block as an executor would read it."""
        keys = b"".join(bytes([n]) * 32 for n in numbers)
        asked = KvPrefetch(
            job=3, owner="executor.e", keys=keys, deadline_us=10**7, lease_us=10**7, fingerprint=PRINT
        )
        ready = await self.scheduler.ask(asked)
        assert isinstance(ready, KvReady)
        memory = self.file.read_bytes()
        read = [memory[offset : offset + PAGE] if offset >= 0 else None for offset in ready.offsets]
        for block, number, valid in zip(read, numbers, ready.valid_tokens, strict=True):
            assert block is None or (block == bytes([number + 100]) * PAGE and valid == number)
        self.scheduler.mailbox.send(KV, KvRelease(jobs=ints([3])))
        return [None if block is None else number for block, number in zip(read, numbers, strict=True)]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.002)

    async def copied(self, *numbers: int) -> None:
        """Used a second time, so in L2, and no longer held for the way there."""
        await self.load(*numbers)
        names = [worker.remote_name((PRINT, bytes([n]) * 32)) for n in numbers]
        assert self.kv is not None
        calls = self.kv._core.state.l2.calls
        await self.until(lambda: set(names) <= set(self.l2.values) and not calls)


@pytest.fixture
async def house(host: str) -> AsyncIterator[House]:
    made = House(host, Shared(), MemoryBroker(), Scheduler())
    scheduler = await made.run(made.scheduler, "s")
    yield made
    made.l2.going.set()
    await made.stop()
    assert scheduler.failure is None


async def test_blocks_come_back_from_the_segment_that_the_heartbeat_names(house: House) -> None:
    kv = await house.start(l2=False)
    await house.store(1, 2, 3)
    assert await house.look_up(1, 2, 3, 4) == [1, 1, 1, 0]
    assert await house.load(1, 2, 3, 4) == [1, 2, 3, None]
    facts = kv.heartbeat_payload()
    assert (facts.tiers, facts.rates) == (("l1",), (0, 0))
    assert facts.arena_generation == house.runtimes[-1].mailbox.epoch
    assert facts.arena == segment_name(house.host, facts.arena_generation)
    assert dict(facts.load)["l1_used"] == 3 * PAGE
    await house.until(lambda: kv.status()["reads"] == 0)
    assert kv.status()["stuck_calls"] == 0
    path = house.file
    await house.stop()
    assert not path.exists()


class Executor(Actor):
    """Is there."""

    kind = "executor"


async def test_shell_reports_living_new_and_lost_peers(house: House) -> None:
    early = await house.run(Executor(), "e")
    kv = await house.start(l2=False)
    state = kv._core.state
    await house.until(lambda: state.executors == {"executor.e": early.mailbox.epoch})
    again = await house.run(Executor(), "e")
    await house.until(lambda: state.executors == {"executor.e": again.mailbox.epoch})
    await early.finish(1)
    await again.finish(1)
    await house.until(lambda: state.executors == {})

    await house.store(1)
    await house.scheduler.ask(
        KvPrefetch(job=9, owner="e", keys=bytes([1]) * 32, deadline_us=1, lease_us=10**8, fingerprint=PRINT)
    )
    assert state.l1.pinned_bytes == PAGE
    await house.run(Scheduler(), "s")
    await house.until(lambda: state.l1.pinned_bytes == 0)


async def test_figures_count_each_event(house: House) -> None:
    kv = await house.start()
    await house.store(1, 2)
    await house.copied(1, 2)
    assert await house.look_up(1, 2, 3) == [1, 1, 0]
    state = kv._core.state
    read = {
        (r.name, *r.attributes): r.value for r in actor.metric_points(state) if isinstance(r, MetricPoint)
    }
    assert read["headrace.kv_offload.hit_keys", ("tier", "l1")] == 2
    assert read["headrace.kv_offload.lookup_keys",] == 3
    assert read["headrace.kv_offload.l1.size", ("state", "used")] == 2 * PAGE
    assert read["headrace.kv_offload.l2.rate", ("direction", "put")] == state.l2.put_rate.bytes_per_s > 0
    keys = kv.status()["keys"]
    assert isinstance(keys, dict)
    assert (keys["asked"]["misses"], keys["asked"]["hit_rate"]) == (1, 0.6667)
    assert keys["moved"]["l2_puts"] == 2


async def test_a_new_incarnation_has_the_blocks_from_l2(house: House) -> None:
    await house.start()
    await house.store(1, 2)
    await house.copied(1, 2)
    assert house.kv is not None
    assert house.kv.heartbeat_payload().tiers == ("l1", "l2")
    await house.runtimes.pop().finish(5)
    await house.start()
    await house.found(1, 2, 3, tiers=[2, 2, 0])
    assert await house.load(1, 2) == [1, 2]
    assert await house.look_up(1, 2) == [1, 1]


async def damaged(house: House, change: Callable[[dict[str, bytes], list[str]], None]) -> int:
    """Two blocks lie in L2; `change` them and read them as another incarnation. How many it found damaged."""
    await house.start()
    await house.store(1, 2)
    await house.copied(1, 2)
    await house.runtimes.pop().finish(5)
    change(house.l2.values, [worker.remote_name((PRINT, bytes([n]) * 32)) for n in (1, 2)])
    kv = await house.start()
    await house.found(1, 2, tiers=[2, 2])
    assert await house.load(1, 2) == [None, None]
    figures = kv._core.state.counters
    assert figures.promotions == 0
    await house.until(lambda: worker.remote_name((PRINT, bytes([1]) * 32)) not in house.l2.values)
    return figures.corrupt


def flip(values: dict[str, bytes], names: list[str]) -> None:
    for name in names:
        values[name] = values[name][:-1] + bytes([values[name][-1] ^ 1])


def cut(values: dict[str, bytes], names: list[str]) -> None:
    for name in names:
        values[name] = values[name][:-1]


def swap(values: dict[str, bytes], names: list[str]) -> None:
    values[names[0]], values[names[1]] = values[names[1]], values[names[0]]


@pytest.mark.parametrize("change", [flip, cut, swap])
async def test_a_damaged_value_is_never_loaded_but_deleted_and_counted(
    house: House, change: Callable[[dict[str, bytes], list[str]], None]
) -> None:
    assert await damaged(house, change) in (1, 2)  # the second may be ended by the miss of the first


async def test_values_of_another_layout_or_salt_are_not_found(house: House) -> None:
    await house.start()
    await house.store(1)
    await house.copied(1)
    for fingerprint, key in (("f" * 32, bytes([1]) * 32), (PRINT, bytes([2]) * 32)):
        found = await house.scheduler.ask(KvLookup(job=8, keys=key, fingerprint=fingerprint))
        assert found == KvFound(job=8, tiers=ints([0]))


async def test_l1_is_served_while_l2_hangs_and_l2_again_when_it_goes_on(house: House) -> None:
    kv = await house.start()
    await house.store(1, 2)
    await house.copied(1, 2)
    house.l2.going.clear()
    asked = 0
    async with asyncio.timeout(60):
        while not kv._core.state.l2.breaker.open:
            assert await house.load(1, 2) == [1, 2]
            assert await house.look_up(1, 2, 50) == [1, 1, 0]
            asked += 1
    assert asked > 3
    assert kv.heartbeat_payload().tiers == ("l1",)
    house.l2.going.set()
    await house.until(lambda: kv.heartbeat_payload().tiers == ("l1", "l2"))
    await house.until(lambda: kv.status()["stuck_calls"] == 0)


async def test_connection_to_l2_is_open_before_the_first_answer(house: House) -> None:
    """A lookup has 10 ms, and a worker that opens a connection first may miss them."""
    house.l2.going.clear()
    starting = asyncio.create_task(house.start())
    await house.until(lambda: house.l2.opened == 2)  # one to find a wrong URL, and one that stays
    assert house.runtimes == [house.runtimes[0]], "it is not ready"
    house.l2.going.set()
    kv = await starting
    assert list(house.l2.values) == [worker.remote_name(CANARY)]
    assert (house.l2.opened, kv.status()["stuck_calls"]) == (2, 0)


async def test_hanging_l2_delays_no_start(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GREET_S", 0.0)
    house.l2.going.clear()
    kv = await house.start()
    await house.store(1)
    assert await house.look_up(1) == [1]
    house.l2.going.set()
    await house.until(lambda: kv.status()["stuck_calls"] == 0)


async def test_an_l2_that_is_down_at_the_start_is_used_once_it_is_up(house: House) -> None:
    house.l2.failing = True
    kv = await house.start()
    for number in range(3):
        assert await house.look_up(60 + number) == [0]
    await house.until(lambda: kv._core.state.l2.breaker.open)
    house.l2.failing = False
    await house.until(lambda: kv._core.state.l2.is_usable)
    await house.store(1)
    await house.copied(1)


async def test_values_that_l1_pushes_out_come_back_from_l2(house: House) -> None:
    await house.start(blocks=10)
    await house.store(1, 2, 3)
    await house.copied(1, 2, 3)
    await house.store(*range(10, 19))
    assert await house.look_up(1, 2, 3) == [2, 2, 2]
    assert await house.load(1, 2, 3) == [1, 2, 3]


async def test_a_shell_that_fails_between_messages_fails_the_actor(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = await house.start(l2=False)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(kv._core, "handle", fail)
    kv._later(lambda: kv._core.handle())  # type: ignore[call-arg]  # replaced
    assert isinstance(await house.runtimes[-1].failed(), ZeroDivisionError)


async def test_an_l1_that_shared_memory_cannot_hold_costs_the_tiers_and_nothing_else(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    actor = KvOffloadActor(Plan(host, 1 << 50), Shared().connect)
    runtime = Runtime(actor, MemoryBroker().connect(), "f", "k")
    await runtime.start()
    assert (runtime.state, actor.heartbeat_payload().tiers) == ("ready", ())
    why = str(actor.status()["why_off"])
    assert re.fullmatch(
        r"/dev/shm has \d+ MiB left and L1 needs 1073741824: make L1 smaller .* larger .*", why
    )
    assert f"no KV tiers: {why}" in caplog.text
    runtime.upkeep()
    await runtime.finish(1)
    assert runtime.state == "stopped"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
async def test_a_shared_memory_that_cannot_be_written_costs_the_tiers_alone(
    number: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> int:
        raise OSError(number, os.strerror(number), f"/dev/shm/{name}")

    monkeypatch.setattr(arena, "hold", refuse)
    actor = KvOffloadActor(Plan(host, PAGE))
    runtime = Runtime(actor, MemoryBroker().connect(), "f", "k")
    await runtime.start()
    assert "let this user write there, or start without tiers" in str(actor.status()["why_off"])
    await runtime.finish(1)


def test_segments_of_dead_owners_are_removed_before_the_size_is_chosen_and_with_l1_off(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = segment_name(f"{host}-b", 1)
    seen: list[bool] = []
    monkeypatch.setattr(arena, "_shm_free_bytes", lambda: seen.append((SHM / left).exists()) or GIB)
    for l1 in ("auto", "off"):
        os.close(hold(left))
        (SHM / left).write_bytes(b"x")
        plan(l1, "fleet", host)
        assert not (SHM / f"{left}.lock").exists()
    assert seen == [False, False]


async def test_a_start_that_is_broken_off_leaves_no_segment(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    open_arena = arena.open_arena

    def slow(what: Plan, generation: int) -> arena.Opened:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return open_arena(what, generation)

    monkeypatch.setattr(arena, "open_arena", slow)
    runtime = Runtime(KvOffloadActor(Plan(host, PAGE)), MemoryBroker().connect(), "f", "k")
    starting = asyncio.create_task(runtime.start())
    await begun.wait()
    starting.cancel()
    await asyncio.wait({starting})
    go_on.set()
    await runtime.finish(1)
    assert runtime.state == "stopped"


def test_parts_are_built_by_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    off = build(load(flags={"l1": "off", "l2": "redis://h"}).settings)
    assert "l2 is not used" in caplog.text
    assert off.heartbeat_payload().tiers == ()
    assert build(load(flags={"l1": "16"}).settings).status()["l2_url"] == ""
    with pytest.raises(SetupError, match="auto or off"):
        build(load(flags={"l1": "much"}).settings)
