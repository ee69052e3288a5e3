"""The executor actor passes messages from its mailbox to the device thread and sends results to the
scheduler.

The launcher builds it (`build`). It serves one scheduler of its own model. With empty slots it sends
ExecHello until that scheduler welcomes this incarnation of its device state; a restarted or lost scheduler, a
lost stream or a reset starts a new incarnation. So do sleep and wake:

    JOINING ──ExecWelcome──▶ SERVING ──ExecSleep, ExecWake──▶ STOPPING ──copies end──▶ SWITCHING
       ▲    ◀──new incarnation──┘                                                          │
       └────────────────────── the engine sleeps, or is awake again ───────────────────────┘

An engine that sleeps joins and is welcomed as one that is awake, and gets no plans.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from enum import Enum
from typing import Any

from services.executor.build import engine_builder
from services.executor.device_thread import Between, DeviceThread, Reset, Switch, checked_slot
from services.executor.engine import (
    Alarm,
    Backend,
    BackendInfo,
    GrammarNews,
    adapter_loads_of,
    open_error,
    plan_error,
)
from services.executor.kv_transfer.worker import ArenaTransfers, CopyWorker, on_loop
from shared import messages
from shared.actor.mailbox import Mailbox
from shared.actor.membership import ASLEEP, NEED, ONLY_TIER, SLEEPS, Peer, Peers, vocabulary_number
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.config import Settings
from shared.errors import EngineError, SetupError
from shared.kv_blocks import rendezvous
from shared.telemetry.counters import (
    Counted,
    ExecutorCounter,
    MetricPoint,
    Metrics,
    SchedulerCounter,
    in_load,
    in_status,
    lately,
    points,
)

log = logging.getLogger("headrace.executor")

STOP_TIMEOUT_S = 5.0
STUCK_US = 120_000_000  # far above any step: the device call never returns, so the process must be replaced
MAX_FAILED_STEPS = 3  # one may be a request's fault, three in a row are the engine's


class Incarnation(Enum):
    """What an incarnation does, see the module. A new one goes on with the switch of the one before."""

    JOINING = "sends ExecHello"
    SERVING = "welcomed by its scheduler"
    STOPPING = "waits for the end of its copies, then switches"
    SWITCHING = "the engine falls asleep or wakes"


class ExecutorActor(Actor):
    """Runs the plans of its scheduler, see the module."""

    kind = "executor"

    def __init__(
        self,
        build_backend: Callable[[], Backend],
        host_id: str,
        alarm: Alarm | None = None,
        news: GrammarNews | None = None,
    ) -> None:
        """`alarm` and `news` are shared with the engine: its death, and the end of a grammar's
        compilation."""
        self._build_backend = build_backend
        self._host_id = host_id
        self._alarm = alarm or Alarm()
        self._grammar_news = news or GrammarNews()
        self._backend: Backend | None = None
        self._arenas: ArenaTransfers | None = None  # since the engine is built
        self._adapters: Any = None  # its loads, if it has places for some
        self._scheduler = ""  # kind.id
        self._incarnation = Incarnation.JOINING
        self._kept_out = ""  # why the scheduler refuses this executor
        self._exec_epoch = 0
        self._asleep = False  # the engine sleeps, or is to sleep once it has switched
        self._last_step = 0
        self._steps = 0
        self._open_slots: set[int] = set()
        self._empty = asyncio.Event()  # no slot is open
        self._empty.set()
        self._failed_steps = 0
        self._failed_in_a_row = 0

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        loop = asyncio.get_running_loop()
        built: asyncio.Future[Backend] = loop.create_future()
        take_result = mailbox.guarded(self._on_result)

        def on_built(result: Backend | BaseException) -> None:
            if built.done():  # a signal has ended the start
                return
            if isinstance(result, BaseException):
                built.set_exception(result)
            else:
                built.set_result(result)

        def on_result(result: messages.StepResult) -> None:
            assert self._arenas is not None, "a step before the engine was built"
            loop.call_soon_threadsafe(take_result, result)  # before copies that wait for it
            self._arenas.worker.on_stepped(result.exec_epoch, result.step)

        self._report_switch = on_loop(mailbox, self._on_switched)
        self._grammar_news.report = on_loop(mailbox, self._on_grammar)
        self._device = DeviceThread(self._build_backend, mailbox.clock, on_result)
        self._device.start(on_loop(mailbox, on_built))
        self._backend = await built
        from shared.vocab import gguf  # with tokenizers, which the engine has imported meanwhile

        gguf.forget_header()  # the last reader was the engine
        computing = lambda: self._device.since_us > 0  # noqa: E731
        self._adapters = adapter_loads_of(
            self._backend, mailbox, self._backend.info.model, self._between_steps
        )
        if self._adapters is not None:
            await self._adapters.start()
        self._arenas = ArenaTransfers(self._backend, mailbox, self._host_id, self._send_hello, computing)

    def _between_steps(self, run: Callable[[], None]) -> None:
        self._device.put(Between(run))

    def on_ready(self) -> None:
        self._join()

    def receive(self, source: str, message: messages.Message, trace: str) -> None:
        if source != self._scheduler:
            return  # from a scheduler that this executor has left, or never joined
        match message:
            case messages.ExecWelcome(exec_epoch=epoch):
                if epoch == self._exec_epoch:  # else it welcomes an earlier incarnation
                    self._incarnation, self._kept_out = Incarnation.SERVING, ""
            case messages.ExecRefused(exec_epoch=epoch, why=why) if epoch == self._exec_epoch:
                if why != self._kept_out:
                    log.warning("kept out by %s: %s", source, why)
                self._kept_out = why
            case messages.ExecReset(exec_epoch=epoch, why=why, scheduler=given) if epoch == self._exec_epoch:
                log.warning("reset by the scheduler: %s", why)
                ready = self._mailbox.peers.ready("scheduler")
                self._choose_scheduler(given if given in ready else source.removeprefix("scheduler."))
            case messages.ExecSleep(exec_epoch=epoch) | messages.ExecWake(exec_epoch=epoch):
                if epoch == self._exec_epoch:
                    self._switch(asleep=isinstance(message, messages.ExecSleep))
            case _ if self._is_welcomed and not self._asleep:
                self._apply(message)

    def on_restart(self, source: str) -> None:
        if source == self._scheduler:
            self._begin_incarnation()

    on_stream_lost = on_restart

    def on_peer(self, peer: Peer) -> None:
        if self._arenas is not None:
            self._arenas.on_peer(peer)
        if self._backend is None or peer.heartbeat.kind != "scheduler" or peer.heartbeat.state != "ready":
            return
        if not self._scheduler and peer.heartbeat.model == self._backend.info.model:
            self._choose_scheduler(peer.heartbeat.actor)
        elif peer.source == self._scheduler and not self._is_welcomed:
            self._send_hello()

    def on_peer_gone(self, peer: Peer) -> None:
        if self._arenas is not None:
            self._arenas.on_peer_gone(peer)
        if peer.source == self._scheduler and self._backend is not None:
            self._join()

    def upkeep(self) -> None:
        if self._alarm.why:
            raise EngineError(self._alarm.why)
        if self._backend is not None and self._device.gone is not None:
            raise self._device.gone
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineError(f"{self._failed_in_a_row} steps in a row failed: the engine is broken")
        copying_us = self._arenas.worker.since_us if self._arenas is not None else 0
        for what, since_us in (("step", self._device.since_us), ("copy", copying_us)):
            if since_us and self._mailbox.clock.now_us() - since_us > STUCK_US:
                raise EngineError(f"a {what} has not ended for {STUCK_US / 1e6:g} s: the device is stuck")
        if self._backend is not None and self._is_welcomed:
            self._has_other_vocabulary()
        if self._scheduler:
            self._send_hello()
        elif self._backend is not None:  # a draining scheduler needs an executor for its last requests
            for draining in self._mailbox.peers.draining("scheduler", self._backend.info.model)[:1]:
                self._choose_scheduler(draining)

    @property
    def _is_welcomed(self) -> bool:
        return self._incarnation is Incarnation.SERVING

    @property
    def _is_switching(self) -> bool:
        return self._incarnation in (Incarnation.STOPPING, Incarnation.SWITCHING)

    def heartbeat_payload(self) -> HeartbeatPayload:
        load, model = dict(in_load(self._counted)), ""
        if self._backend is not None:
            info = self._backend.info
            model, grammars = info.model, int(info.follows_grammars)
            load |= {"context": info.context, "grammars": grammars, "block_tokens": info.block_tokens}
            if info.only_tier:
                load[ONLY_TIER] = 1
            if info.memory_bytes:
                load |= {NEED: info.memory_bytes >> 20, SLEEPS: int(info.sleeps)}
        if self._asleep and not self._is_switching:
            load[ASLEEP] = 1
        return HeartbeatPayload(
            model=model,
            load=tuple(load.items()),
            arena_generation=self._arenas.worker.generation if self._arenas is not None else 0,
            scheduler=self._scheduler.removeprefix("scheduler.") if self._is_welcomed else "",
            counts=lately(self._counted),
        )

    @property
    def metrics(self) -> Metrics:
        """`device.idle` is the time that the device thread waited for a plan: its share of `device.idle` +
        `device.busy` is the idle share under load. It grows when the plan comes, so not while no plan
        comes."""
        if self._arenas is None:
            return ()
        worker = self._arenas.worker
        return [
            *points({**self._counted, ExecutorCounter.COPIES_QUEUED: worker.queued}),
            *_copy_metrics(worker),
        ]

    @property
    def _counted(self) -> Counted:
        return {
            ExecutorCounter.STEPS: self._steps,
            ExecutorCounter.FAILED: self._failed_steps,
            ExecutorCounter.OPEN_SLOTS: len(self._open_slots),
            ExecutorCounter.QUEUED: self._device.queued,
            ExecutorCounter.BUSY: self._device.busy_us,
            ExecutorCounter.IDLE: self._device.idle_us,
        }

    def status(self) -> dict[str, object]:
        if self._backend is None or self._arenas is None:
            return {"loading": True}
        info = self._backend.info
        return {
            "model": info.model,
            "backend": info.backend,
            "dtype": info.dtype,
            "context": info.context,
            ExecutorCounter.KV_BYTES.status: info.blocks * info.bytes_per_block,
            "model_digest": info.model_digest,
            "scheduler": self._scheduler,
            "asleep": self._asleep,
            **({"kept_out": self._kept_out} if self._kept_out else {}),
            **in_status(self._counted),
            **self._arenas.status(),
            **(self._adapters.status() if self._adapters is not None else {}),
        }

    async def drain(self) -> None:
        """Wait for the open slots to close; the scheduler places no new sequences on a draining executor."""
        await self._empty.wait()

    async def stop(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        gone = self._alarm.why or (self._backend is not None and self._device.gone is not None)
        within_s = 0.0 if gone else STOP_TIMEOUT_S  # a dead engine's work never ends: do not wait
        if self._arenas is not None:
            await asyncio.to_thread(self._arenas.worker.close, within_s)
        if self._backend is not None:
            await asyncio.to_thread(self._device.join, within_s)

    def _join(self) -> None:
        assert self._backend is not None
        box = self._mailbox
        self._choose_scheduler(scheduler_for(box.peers, self._backend.info.model, box.actor))

    def _choose_scheduler(self, scheduler: str) -> None:
        """Start a new incarnation for this scheduler; "" for none."""
        self._scheduler = f"scheduler.{scheduler}" if scheduler else ""
        self._begin_incarnation()

    def _begin_incarnation(self) -> None:
        """Empty the slots and number them anew. ExecHello announces the incarnation once the copies of the
        one before have ended."""
        if self._arenas is None:
            return
        box = self._mailbox  # not below its epoch: a scheduler would take it for that of a process before
        self._exec_epoch = epoch = max(box.clock.wall_us(), box.epoch, self._exec_epoch + 1)
        if not self._is_switching:
            self._incarnation = Incarnation.JOINING
        self._kept_out = ""
        self._last_step = 0
        self._open_slots.clear()
        self._empty.set()
        if self._adapters is not None:
            self._adapters.begin()
        arenas = self._arenas
        arenas.begin(self._scheduler, epoch)
        self._device.put(Reset(lambda: arenas.worker.on_stepped(epoch, 0)))
        self._send_hello()

    def _switch(self, *, asleep: bool) -> None:
        """Sleep or wake, as a new incarnation. An engine that cannot sleep stays awake."""
        assert self._backend is not None, "it has a scheduler before it was built"
        if asleep and not self._backend.info.sleeps:
            log.warning("this engine does not sleep: several ranks stay awake")
        elif asleep != self._asleep:
            self._asleep, self._incarnation = asleep, Incarnation.STOPPING
        self._begin_incarnation()

    def _on_switched(self, error: Exception | None) -> None:
        if error is not None:
            raise EngineError(f"the engine did not {'go to sleep' if self._asleep else 'wake'}: {error}")
        self._incarnation = Incarnation.JOINING
        log.info("asleep: its device memory is free" if self._asleep else "awake")
        self._send_hello()

    def _send_hello(self) -> None:
        if self._backend is None or self._arenas is None or not self._arenas.worker.is_idle:
            return  # the end of the copies calls this again
        if self._incarnation is Incarnation.STOPPING:  # no copy of the one before touches the blocks any more
            self._incarnation = Incarnation.SWITCHING
            self._device.put(Switch(self._asleep, self._report_switch))
        joins = self._scheduler and self._incarnation is Incarnation.JOINING
        if joins and not self._has_other_vocabulary():
            hello = hello_of(self._backend.info, self._mailbox.actor, self._exec_epoch, self._host_id)
            self._mailbox.send(self._scheduler, replace(hello, asleep=self._asleep))

    def _has_other_vocabulary(self) -> bool:
        """Whether the ids of this engine mean other tokens to the tokenizers or detokenizers, which have read
        their vocabulary at another time: it must not join, and starts again if it has joined."""
        assert self._backend is not None, "an engine that is not built joins nothing"
        info = self._backend.info
        if not info.tokens_digest:
            return False
        other = self._mailbox.peers.of_other_tokens(info.model, vocabulary_number(info.tokens_digest))
        if not other:
            return False
        why = (
            f"its tokens are not those of {other}: the files of {info.model!r} are not those "
            "with which that one was started; put these back, or start all services of the model again"
        )
        if self._is_welcomed:
            raise SetupError(why)
        if why != self._kept_out:
            log.warning("it does not join: %s", why)
        self._kept_out = why
        return True

    def _apply(self, message: messages.Message) -> None:
        assert self._backend is not None, "welcomed before it was built"
        info = self._backend.info
        match message:
            case messages.StepPlan(exec_epoch=epoch, step=step):
                if epoch == self._exec_epoch and step == self._last_step + 1:
                    self._last_step = step
                    self._device.refuse(plan_error(message, info, self._open_slots))
                    self._device.put(message)
                elif epoch == self._exec_epoch and step > self._last_step:
                    log.error("step %d was planned, step %d expected", step, self._last_step + 1)
                    self._begin_incarnation()  # the plans between are lost
            case messages.SlotOpen() if error := open_error(message, info):
                self._device.refuse(error)
            case messages.SlotOpen(slot=slot):
                self._open_slots.add(slot)
                self._empty.clear()
                self._device.put(checked_slot(message, info))
            case messages.SlotClose(slot=slot):
                self._open_slots.discard(slot)
                if not self._open_slots:
                    self._empty.set()
                self._device.put(message)
            case messages.AdapterLoad() if self._adapters is not None:
                self._adapters.load(self._scheduler, message)
            case messages.KvCopy() if self._arenas is not None:
                self._arenas.copy(message)

    def _on_grammar(self, news: messages.GrammarReady | messages.GrammarFailed) -> None:
        if news.slot in self._open_slots:  # the scheduler compares the generation: the slot may be reused
            self._mailbox.send(self._scheduler, news)

    def _on_result(self, result: messages.StepResult) -> None:
        if result.exec_epoch != self._exec_epoch:
            return  # the step belongs to an earlier incarnation
        self._steps += 1
        self._failed_steps += bool(result.error)
        self._failed_in_a_row = self._failed_in_a_row + 1 if result.error else 0
        if result.error:
            log.error("step %d failed: %s", result.step, result.error)
        self._mailbox.send(self._scheduler, result)
        self._device.published_us = max(0, self._mailbox.clock.wall_us() - result.end_wall_us)


def scheduler_for(peers: Peers, model: str, executor: str) -> str:
    """The scheduler of `model` that `executor` joins, "" without one. First a scheduler with requests and no
    executor, then one with executors, which checks the kind of this one: a scheduler without executors gets
    some from others (scheduler/executors/roles.py). The executors of a dead scheduler are dealt out in the
    order of their names, each to the scheduler with the fewest, then by rendezvous."""
    ready, served = peers.ready("scheduler", model), peers.executors_of(model)

    def is_starved(actor: str) -> bool:
        peer = peers.get(f"scheduler.{actor}")
        return (
            not served[actor]
            and peer is not None
            and SchedulerCounter.REQUESTS.loaded(peer.heartbeat.load) > 0
        )

    serving = {actor: served[actor] for actor in ready if served[actor]}
    if not serving or any(map(is_starved, ready)):
        return next((actor for actor in ready if is_starved(actor)), min(ready, default=""))
    found = (peers.get(f"executor.{actor}") for actor in peers.ready("executor", model))
    homeless = {peer.heartbeat.actor for peer in found if peer and peer.heartbeat.scheduler not in ready}
    for each in sorted({*homeless, executor}):
        fewest = min(serving.values())
        chosen = rendezvous(each, [actor for actor in serving if serving[actor] == fewest])
        if each == executor:
            return chosen
        serving[chosen] += 1
    return ""


def build(settings: Settings) -> ExecutorActor:
    """The executor of this configuration. Its engine is built on the device thread."""
    alarm, news = Alarm(), GrammarNews()
    return ExecutorActor(engine_builder(settings, alarm, news), settings.host_id, alarm, news)


def hello_of(info: BackendInfo, executor: str, exec_epoch: int, host_id: str) -> messages.ExecHello:
    """The message that announces an incarnation, with the engine's facts that the scheduler plans with: the
    fields that both have."""
    names = {each.name for each in fields(messages.ExecHello)} & {each.name for each in fields(info)}
    facts: dict[str, Any] = {name: getattr(info, name) for name in names}
    return messages.ExecHello(executor=executor, exec_epoch=exec_epoch, host_id=host_id, **facts)


def _copy_metrics(worker: CopyWorker) -> Iterator[MetricPoint]:
    for direction, done in (("store", worker.stored), ("load", worker.loaded)):
        yield ExecutorCounter.COPIES.point(done.copies, direction)
        yield ExecutorCounter.COPIED.point(done.bytes, direction)
