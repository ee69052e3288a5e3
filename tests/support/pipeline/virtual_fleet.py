"""A fleet of the real actors in virtual time, on an engine that takes no time to compute. Any may die."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from support.executor.paged_engine import PagedEngine
from support.memory_bus import MemoryBroker
from support.scheduler.fake_tier import Arena
from support.virtual_loop import LoopClock

from services.detokenizer.actor import DetokenizerActor
from services.kv_offload.actor import KvOffloadActor
from services.kv_offload.backends import arena as arenas
from services.kv_offload.backends.arena import Plan
from services.kv_offload.core import KvCore
from services.scheduler.actor import SchedulerActor
from services.scheduler.state.state import Limits
from services.tokenizer.actor import TokenizerActor
from services.tokenizer.prepare import ServedModel
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer, detection_us
from shared.actor.runtime import Actor, HeartbeatPayload, Runtime
from shared.messages import (
    ExecHello,
    ExecReset,
    ExecWelcome,
    KvCopy,
    Message,
    SlotClose,
    SlotOpen,
    StepPlan,
)

STEP_S = 0.002
L1_PAGES = 64


class PagedExecutor(Actor):
    """The engine of the scheduler's tests, as an actor: it computes at once, and sends the result STEP_S
    later."""

    kind = "executor"

    def __init__(self, host_id: str, arenas: dict[int, Arena]) -> None:
        self._host_id = host_id
        self._arenas = arenas  # of this host, by generation
        self._generation = 0
        self._scheduler = ""
        self._welcomed = False
        self._epoch = 0

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def heartbeat_payload(self) -> HeartbeatPayload:
        return HeartbeatPayload(model="tiny", arena_generation=self._generation)

    def on_peer(self, peer: Peer) -> None:
        heartbeat = peer.heartbeat
        if (
            heartbeat.kind == "kv_offload"
            and heartbeat.host_id == self._host_id
            and heartbeat.arena_generation
        ):
            self._generation = heartbeat.arena_generation
            arena = self._arenas.setdefault(self._generation, Arena(self._generation))
            if self._scheduler:
                self._engine.arena = arena
        if heartbeat.kind == "scheduler" and heartbeat.state == "ready" and not self._scheduler:
            self._scheduler = peer.source
            self._begin()

    def on_peer_gone(self, peer: Peer) -> None:
        if peer.source == self._scheduler:
            others = self._mailbox.peers.ready("scheduler")
            self._scheduler = f"scheduler.{others[0]}" if others else ""
            if others:
                self._begin()

    def on_stream_lost(self, source: str) -> None:
        if source == self._scheduler:
            self._begin()

    def upkeep(self) -> None:
        if self._scheduler and not self._welcomed:
            self._mailbox.send(self._scheduler, self._engine.hello)

    def receive(self, source: str, message: Message, trace: str) -> None:
        if source != self._scheduler:
            return  # of one that was given up
        match message:
            case ExecWelcome(exec_epoch=epoch):
                self._welcomed |= epoch == self._epoch
            case ExecReset():
                self._begin()
            case _ if not self._welcomed:
                pass  # for the incarnation before
            case SlotOpen():
                self._engine.open(message)
            case SlotClose():
                self._engine.close(message)
            case StepPlan(exec_epoch=epoch) if epoch == self._epoch:
                self._later(self._engine.run(message))
            case KvCopy():
                self._later(self._engine.copy(message))

    def _begin(self) -> None:
        self._epoch, self._welcomed = max(self._epoch + 1, self._mailbox.epoch), False
        hello = ExecHello(
            executor=self._mailbox.actor,
            exec_epoch=self._epoch,
            host_id=self._host_id,
            model="tiny",
            fingerprint="f",
            vocab_digest="v",
            vocab=1000,
            blocks=32,
            block_tokens=4,
            slots=4,
            max_step_tokens=64,
            max_context=128,
            bytes_per_block=256,
        )
        self._engine = PagedEngine(hello)
        self._engine.arena = self._arenas.get(self._generation)
        self._mailbox.send(self._scheduler, hello)

    def _later(self, answer: Message) -> None:
        scheduler = self._scheduler
        asyncio.get_running_loop().call_later(STEP_S, lambda: self._mailbox.send(scheduler, answer))


class CountedOffload(KvOffloadActor):
    """kv_offload on an arena without memory, and without threads."""

    def __init__(self) -> None:
        super().__init__(Plan("", 0))

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        arena = arenas.Arena(L1_PAGES * 4_096, generation=mailbox.epoch)
        arena.name = f"arena-{mailbox.epoch}"
        self._core = KvCore(arena)
        for actor in mailbox.peers.ready("executor"):
            if (peer := mailbox.peers.get(f"executor.{actor}")) is not None:
                self.on_peer(peer)


@dataclass
class VirtualFleet:
    """Start actors with `add`; `kill` lets one fall silent."""

    model: ServedModel
    beat_s: int
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    runtimes: dict[str, Runtime] = field(default_factory=dict)
    clocks: dict[str, LoopClock] = field(default_factory=dict)  # by actor: a test may set its wall clock
    _arenas: dict[str, dict[int, Arena]] = field(default_factory=dict)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def _beat_us(self) -> int:
        return self.beat_s * 1_000_000

    def actor(self, kind: str, host: str) -> Actor:
        """A new one of a kind."""
        if kind == "executor":
            return PagedExecutor(host, self._arenas.setdefault(host, {}))
        if kind == "detokenizer":
            return DetokenizerActor(self.model.vocabulary, "tiny", 1 << 23)
        if kind == "scheduler":
            return SchedulerActor(Limits(ended_within_us=detection_us(self._beat_us)), "tiny")
        return (
            CountedOffload()
            if kind == "kv_offload"
            else TokenizerActor(self.model, give_up_us=detection_us(self._beat_us))
        )

    async def add(self, kind: str, host: str = "h", wall_s: int = 0) -> str:
        """One more of a kind; its name is new. `wall_s`: by which its wall clock is off. A process takes a
        moment to start."""
        await asyncio.sleep(0.1)
        name = f"{kind}{next(self._names)}"
        bus, clock = self.broker.connect(), LoopClock()
        clock.offset_us += wall_s * 1_000_000
        runtime = Runtime(self.actor(kind, host), bus, "week", name, host, clock, self._beat_us)
        self.runtimes[name], self.clocks[name] = runtime, clock
        await runtime.start()
        return name

    async def kill(self, name: str) -> None:
        """It falls silent, without a word."""
        runtime = self.runtimes.pop(name)
        assert runtime.failure is None
        assert runtime._heartbeats is not None
        runtime._heartbeats.cancel()
        await runtime.bus.drain()
        runtime.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]  # what it still does is unheard

    async def stop(self) -> None:
        """All end in good order."""
        for runtime in self.runtimes.values():
            await runtime.finish(5)
            assert runtime.failure is None
