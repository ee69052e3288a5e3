"""The executor's shell and the host's arena: which one it maps, what it copies, and what it reports."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
from support.actor_fleet import Fleet, Hand, watched_fleet
from support.shm import Segment, segment

from services.executor.actor import STUCK_US, ExecutorActor
from services.executor.sim.engine import SIGNATURE_BYTES, SimBackend, SimCopier, SimOptions
from shared.actor.runtime import HeartbeatPayload, Runtime
from shared.errors import EngineError
from shared.messages import (
    ArenaReleased,
    ExecHello,
    ExecReset,
    ExecWelcome,
    KvCopied,
    KvCopy,
    Message,
    SlotOpen,
    StepPlan,
    StepResult,
    ints,
    longs,
)

SIZE = 4_096
ROOM = 64


class Scheduler(Hand):
    def __init__(self) -> None:
        super().__init__("scheduler")

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(model=SimOptions().model)

    def deliver(self, *messages: Message) -> None:
        for message in messages:
            self.mailbox.send("executor.e", message)


class Offload(Hand):
    """A kv_offload of which only the beat matters."""

    def __init__(self, file: Segment | None) -> None:
        super().__init__("kv_offload")
        self.file = file

    def heartbeat_payload(self) -> HeartbeatPayload:
        if self.file is None:
            return HeartbeatPayload()
        return HeartbeatPayload(arena=self.file.name, arena_generation=self.file.generation)


class Held(SimCopier):
    """Its pieces, of two blocks, wait for `go` once `hold` is set."""

    def __init__(self, engine: SimBackend) -> None:
        super().__init__(engine._blocks, engine._timing.copies)
        self.piece_bytes = 2 * SIZE
        self.hold = False
        self.began, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.pieces: list[list[int]] = []

    def load(self, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        self.pieces.append(list(blocks))
        if self.hold:
            self.began.release()
            assert self.go.acquire(timeout=30)
        super().load(blocks, offsets)


class World:
    """An executor on `host`, its scheduler, and the kv_offload of that host."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.engine = SimBackend(SimOptions(timing=f"step=0,block={SIZE}", blocks=100))
        self.copier = self.engine.copier = Held(self.engine)
        self.actor = ExecutorActor(lambda: self.engine, "host")
        self.scheduler = Scheduler()
        self.offload: Offload
        self.offload_runtime: Runtime
        self._jobs = 0

    async def start(self, file: Segment | None) -> ExecHello:
        await self.begin_offload(file)
        await self.fleet.started(self.scheduler, "s")
        self.runtime = await self.fleet.started(self.actor, "e")
        return await self.welcomed(1)

    async def begin_offload(self, file: Segment | None, actor_id: str = "k") -> None:
        self.offload = Offload(file)
        self.offload_runtime = await self.fleet.started(self.offload, actor_id)

    async def new_arena(self, file: Segment | None) -> None:
        self.offload.file = file
        self.offload_runtime.send_heartbeat()
        await self.fleet.broker.settle()

    async def welcomed(self, count: int) -> ExecHello:
        hello = await self.scheduler.until(ExecHello, count)
        self.scheduler.deliver(ExecWelcome(exec_epoch=hello.exec_epoch))
        return hello

    def copy(self, *blocks: int, store: bool = True, after: int = 0, **other: object) -> KvCopy:
        self._jobs += 1
        assert self.offload.file is not None
        asked = KvCopy(
            job=self._jobs,
            to_arena=store,
            after_step=after,
            arena_generation=self.offload.file.generation,
            blocks=ints(blocks),
            offsets=longs(i * SIZE for i in range(len(blocks))),
            block_bytes=SIZE,
        )
        return dataclasses.replace(asked, **other)  # type: ignore[arg-type]  # fields of it

    async def copied(self, copy: KvCopy) -> KvCopied:
        """Its answer."""
        count = len(self.scheduler.of(KvCopied))
        self.scheduler.deliver(copy)
        answer = await self.scheduler.until(KvCopied, count + 1)
        assert answer.job == copy.job
        return answer

    def run_step(self, hello: ExecHello, step: int = 1) -> None:
        """A prompt of 20 tokens into blocks 7 and 3."""
        opened = SlotOpen(slot=0, generation=1, seq=55, prompt_tokens=20, tokens=ints([300] * 20))
        plan = StepPlan(
            exec_epoch=hello.exec_epoch, step=step, mode="single", micro_batch=0, slots=ints([0]),
            starts=ints([0]), counts=ints([20]), from_device=ints([0]), sample_rows=ints([0]),
            sample_slots=ints([0]), table_slots=ints([0]), table_first=ints([0]), table_counts=ints([2]),
            table_blocks=ints([7, 3]),
        )  # fmt: skip
        self.scheduler.deliver(opened, plan)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with watched_fleet() as fleet:
        made = World(fleet)
        yield made
        made.copier.hold = False
        made.copier.go.release(1_000)


def signature(seq: int, index: int, end: int, step: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in (seq, index, end, step))


def held(file: Segment, place: int) -> bytes:
    return file.read()[place * SIZE : place * SIZE + SIGNATURE_BYTES]


async def test_blocks_are_stored_after_their_step_and_loaded_again(world: World) -> None:
    with segment(ROOM * SIZE) as file:
        hello = await world.start(file)
        world.scheduler.deliver(world.copy(3, 7, after=1))
        world.run_step(hello)
        stored = await world.scheduler.until(KvCopied)
        assert (stored.status, stored.bytes) == ("ok", 2 * SIZE)
        assert (held(file, 0), held(file, 1)) == (signature(55, 1, 20, 1), signature(55, 0, 16, 1))
        loaded = await world.copied(world.copy(90, 91, store=False))
        assert (loaded.status, loaded.bytes) == ("ok", 2 * SIZE)
        assert world.engine._blocks.signatures[90].tobytes() == signature(55, 1, 20, 1)
        assert world.engine._blocks.signatures[91].tobytes() == signature(55, 0, 16, 1)
        status = world.actor.status()
        wanted = {
            "arena_generation": file.generation, "copies_queued": 0, "copies_stored": 1, "copies_loaded": 1,
            "stored_bytes": 2 * SIZE, "loaded_bytes": 2 * SIZE, "store_mb_s": 0, "load_mb_s": 0,
        }  # fmt: skip  # no time passes on the clock by hand
        assert {name: status[name] for name in wanted} == wanted
        assert world.actor.heartbeat_payload().arena_generation == file.generation


async def test_a_new_generation_is_mapped_and_the_old_one_released(world: World) -> None:
    with segment(ROOM * SIZE) as old, segment(ROOM * SIZE) as new:
        await world.start(old)
        before = world.copy(1)
        assert (await world.copied(before)).status == "ok"
        await world.new_arena(new)
        released = await world.scheduler.until(ArenaReleased)
        assert released == ArenaReleased(executor="e", arena_generation=old.generation)
        stale = dataclasses.replace(before, job=50)
        assert (await world.copied(stale)).status == "stale_arena"
        assert (await world.copied(world.copy(1))).status == "ok"
        assert world.actor.heartbeat_payload().arena_generation == new.generation


async def test_a_dead_kv_offload_leaves_its_mapping_until_the_next(world: World) -> None:
    with segment(ROOM * SIZE) as old, segment(ROOM * SIZE) as new:
        await world.start(old)
        assert (await world.copied(world.copy(1))).status == "ok"
        old.path.unlink()
        await world.offload_runtime.finish(0)
        world.runtime.upkeep()
        assert (await world.copied(world.copy(1))).status == "ok"
        await world.begin_offload(new, "k2")
        await world.scheduler.until(ArenaReleased)
        assert (await world.copied(world.copy(1))).status == "ok"


async def test_an_arena_that_comes_later_is_mapped_and_one_switched_off_is_not_kept(world: World) -> None:
    with segment(ROOM * SIZE) as file:
        await world.start(None)
        assert world.actor.heartbeat_payload().arena_generation == 0
        await world.new_arena(file)
        assert (await world.copied(world.copy(1))).status == "ok"
        asked = world.copy(1)
        await world.new_arena(None)
        await world.scheduler.until(ArenaReleased)
        assert (await world.copied(asked)).status == "no_arena"


async def test_another_hosts_arena_is_not_used(world: World) -> None:
    with segment(ROOM * SIZE) as file, segment(ROOM * SIZE) as other:
        await world.start(file)
        elsewhere = world.fleet.runtime(Offload(other), "k2")
        elsewhere.host_id = "elsewhere"
        await elsewhere.start()
        await world.fleet.broker.settle()
        assert (await world.copied(world.copy(1))).status == "ok"
        assert set(other.read()) == {0xA5}


async def test_the_latest_kv_offload_of_the_host_is_used(world: World) -> None:
    """A restarted one has another name, and the old one is not known to be dead yet."""
    with segment(ROOM * SIZE) as old, segment(ROOM * SIZE) as new:
        await world.start(old)
        assert (await world.copied(world.copy(1))).status == "ok"
        before = world.offload_runtime
        await world.begin_offload(new, "k2")
        assert (await world.scheduler.until(ArenaReleased)).arena_generation == old.generation
        before.state = "draining"
        before.send_heartbeat()
        before.state = "ready"  # as if it had thought better of it
        before.send_heartbeat()
        await world.fleet.broker.settle()
        assert (await world.copied(world.copy(1))).status == "ok"
        assert len(world.scheduler.of(ArenaReleased)) == 1


async def test_an_arena_is_mapped_although_the_clock_went_back(world: World) -> None:
    """The new kv_offload looks older than the dead one, which is not missed yet."""
    with segment(ROOM * SIZE) as old, segment(ROOM * SIZE) as new:
        await world.start(old)
        assert (await world.copied(world.copy(1))).status == "ok"
        before = world.offload_runtime
        world.fleet.clock.advance(-3_600_000_000)
        await world.begin_offload(new, "k2")
        world.fleet.clock.advance(3_600_000_000)
        assert world.actor.heartbeat_payload().arena_generation == old.generation
        await before.finish(0)
        world.runtime.upkeep()
        released = await world.scheduler.until(ArenaReleased)
        assert released.arena_generation == old.generation
        assert (await world.copied(world.copy(1))).status == "ok"


async def test_no_hello_before_the_copies_of_the_incarnation_before_have_ended(world: World) -> None:
    """The scheduler gives their blocks to others as soon as it gets the message."""
    with segment(ROOM * SIZE) as file:
        hello = await world.start(file)
        world.copier.hold = True
        world.scheduler.deliver(world.copy(*range(6), store=False), world.copy(8, store=False))
        await asyncio.to_thread(world.copier.began.acquire)
        world.scheduler.deliver(ExecReset(exec_epoch=hello.exec_epoch, why="test"))
        await world.fleet.broker.settle()
        world.actor.upkeep()
        await world.fleet.broker.settle()
        assert len(world.scheduler.of(ExecHello)) == 1
        world.copier.hold = False
        world.copier.go.release()
        fresh = await world.welcomed(2)
        assert fresh.exec_epoch > hello.exec_epoch
        assert world.copier.pieces == [[0, 1]]
        assert (await world.copied(world.copy(9, store=False))).status == "ok"
        assert world.copier.pieces == [[0, 1], [9]]
        assert len(world.scheduler.of(KvCopied)) == 1  # the old ones are not reported


async def test_copies_of_a_new_incarnation_wait_until_the_device_has_begun_it(world: World) -> None:
    """Steps of the old one may still write their blocks."""
    entered, released = threading.Event(), threading.Event()
    forward = world.engine.forward

    def stuck(plan: StepPlan) -> object:
        entered.set()
        released.wait(30)
        return forward(plan)

    with segment(ROOM * SIZE) as file:
        hello = await world.start(file)
        world.engine.forward = stuck  # type: ignore[method-assign,assignment]  # only this one engine's
        world.run_step(hello)
        await asyncio.to_thread(entered.wait, 30)
        world.scheduler.deliver(ExecReset(exec_epoch=hello.exec_epoch, why="test"))
        await world.welcomed(2)
        world.scheduler.deliver(world.copy(7, store=False))
        await world.fleet.broker.settle()
        assert (world.copier.pieces, world.actor.status()["copies_queued"]) == ([], 1)
        released.set()
        assert (await world.scheduler.until(KvCopied)).status == "ok"
        assert world.scheduler.of(StepResult) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"blocks": ints([1, 2])}, "it has 2 blocks and 1 offsets"),
        ({"blocks": ints([100])}, "it names a block that is not one of 100"),
        ({"blocks": ints([-1])}, "it names a block that is not one of 100"),
        ({"block_bytes": SIZE // 2}, f"its blocks have {SIZE // 2} bytes, those of this engine {SIZE}"),
        ({"offsets": longs([ROOM * SIZE])}, "an offset is outside the arena of"),
        ({"offsets": longs([-2])}, "an offset is outside the arena of"),
    ],
)
async def test_a_copy_that_makes_no_sense_fails_alone(
    world: World, caplog: pytest.LogCaptureFixture, change: dict[str, object], why: str
) -> None:
    with segment(ROOM * SIZE) as file:
        await world.start(file)
        assert (await world.copied(world.copy(1, **change))).status == "failed"
        assert why in caplog.text
        assert (await world.copied(world.copy(1))).status == "ok"
        assert set(file.read()[SIZE:]) == {0xA5}


async def test_a_copy_that_never_ends_fails_the_executor(world: World) -> None:
    with segment(ROOM * SIZE) as file:
        await world.start(file)
        world.copier.hold = True
        world.scheduler.deliver(world.copy(1, store=False))
        await asyncio.to_thread(world.copier.began.acquire)
        world.actor.upkeep()
        world.fleet.clock.advance(STUCK_US + 1)
        with pytest.raises(EngineError, match="a copy has not ended for 120 s: the device is stuck"):
            world.actor.upkeep()


async def test_stopping_releases_the_arena(world: World) -> None:
    with segment(ROOM * SIZE) as file:
        await world.start(file)
        assert (await world.copied(world.copy(1))).status == "ok"
        await world.runtime.finish(0)
        assert (await world.scheduler.until(ArenaReleased)).arena_generation == file.generation
