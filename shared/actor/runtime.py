"""Runtime gives an actor its life: start, ready, drain, stop; beats, signals, status.

A service subclasses Actor. `run` makes it a process (uvloop, NATS, signals, garbage collector); `Runtime`
alone places it on any bus, as the tests do with MemoryBus. Handlers are plain functions called one at a time
on the event loop, the first one when `start` has run up to its first await. An exception in a handler fails
the actor, never just the message: a supervisor restarts it. What an actor does by a timer or a subscription
of its own goes through `port.guarded`, so that the same holds of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ParamSpec

from shared import codec
from shared.actor.mailbox import Port
from shared.actor.membership import Peer
from shared.clock import Clock, SystemClock, new_epoch
from shared.codec import Envelope
from shared.errors import SetupError, Unavailable, WireError
from shared.messages import Beat, Message
from shared.nats import access, subjects
from shared.nats.interface import Bus, BusFault, Delivery
from shared.replies import to_json
from shared.telemetry import tracer as tracing
from shared.telemetry.metrics import MeterSink, from_env, scrape_point
from shared.telemetry.readings import Reading, Readings, Recent, process_readings
from shared.telemetry.tracer import Tracer

log = logging.getLogger("headrace.actor")
process_log = logging.getLogger("headrace.process")

VERSION = "0.1.0"  # as discovery tells it

GC_THRESHOLDS = (50_000, 20, 10)  # objects made beyond those freed, then rounds of each generation
FORCED = 130  # exit status behind a second signal
HURRY_S = 1.5  # from it to the end, whatever still runs
FLUSH_S = 2.0  # for the last spans and the last metrics, once nothing else is left to do

P = ParamSpec("P")
Connect = Callable[[str], Coroutine[Any, Any, Bus]]  # connection name -> bus


@dataclass(slots=True)
class Facts:
    """What a heartbeat carries beyond the actor's name and state. `counts` are not sent: `headrace status`
    shows how they changed within the last seconds."""

    model: str = ""
    load: tuple[tuple[str, int], ...] = ()
    arena: str = ""
    arena_generation: int = 0
    tiers: tuple[str, ...] = ()
    rates: tuple[int, ...] = ()
    scheduler: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


class Actor:
    """Base of every service. Override what you need."""

    kind = ""
    traced = False  # whether its process makes spans

    async def start(self, port: Port) -> None:
        """Load, subscribe public subjects. When it returns the actor is ready."""

    def receive(self, source: str, message: Message, trace: str) -> None:
        """Handle one message of the mailbox; in order and once per source `kind.id`."""

    def on_peer(self, peer: Peer) -> None:
        """An actor appeared, changed its state, its arena or its scheduler, or is a new incarnation."""

    def on_restart(self, source: str) -> None:
        """`source` is a new incarnation: what the one before held is void. Called before anything of
        the new one arrives, message or beat."""

    def on_peer_gone(self, peer: Peer) -> None:
        """An actor missed its beats or stopped."""

    def on_stream_lost(self, source: str) -> None:
        """Messages from `source` are lost for good: resynchronise with it."""

    def on_broker(self, online: bool) -> None:
        """The connection to the broker was cut, or is back. The streams between actors mend themselves;
        what was published outside them just before may be lost."""

    def upkeep(self) -> None:
        """Called once a beat interval: repeat what was not answered."""

    def facts(self) -> Facts:
        """For the next beat."""
        return Facts()

    @property
    def readings(self) -> Readings:
        """What it has counted, for metrics. Called once `start` has run up to its first await."""
        return ()

    def status(self) -> dict[str, object]:
        """For `headrace status`: JSON-able, includes what must be zero when idle."""
        return {}

    async def drain(self) -> None:
        """Take nothing new, finish or give back what runs. Bounded by the runtime's time limit."""

    async def stop(self) -> None:
        """Free everything. Called once, after drain."""


@dataclass(slots=True)
class Runtime:
    """Runs one actor on one bus."""

    actor: Actor
    bus: Bus
    fleet: str
    actor_id: str
    host_id: str = "local"
    clock: Clock = field(default_factory=SystemClock)
    beat_interval_us: int = 1_000_000
    state: str = "starting"
    failure: BaseException | None = None
    tracer: Tracer | None = None
    metrics: MeterSink | None = None
    on_beat: Callable[[str], None] | None = None  # told the state at each beat, or that it is "deaf"
    port: Port = field(init=False)
    _failed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _beats: asyncio.Task[None] | None = field(init=False, default=None)
    _early: list[Callable[[], None]] | None = field(init=False, default_factory=list)
    _upkeep_us: int = field(init=False, default=0)
    _deaf: bool = field(init=False, default=False)
    _recent: Recent = field(init=False, default_factory=Recent)

    def __post_init__(self) -> None:
        source = f"{self.actor.kind}.{self.actor_id}"
        self.port = Port(self.bus, self.clock, self.fleet, source, new_epoch(self.clock))
        self.port.tracer = self.tracer
        self.port.guarded = self._guarded

    async def start(self) -> None:
        """Subscribe, start the actor, say ready."""
        self.bus.on_fault(self._on_fault)
        actor = self.actor
        await self.port.open(
            self._guarded(actor.receive), self._guarded(actor.on_stream_lost), self._guarded(actor.on_restart)
        )
        await self.bus.subscribe(subjects.beat_all(self.fleet), self._on_beat)
        for ask in (subjects.beat_ask(self.fleet), subjects.BEAT_ASK_ALL_FLEETS):
            await self.bus.subscribe(ask, lambda _: self.beat())
        await self.bus.subscribe(subjects.STATUS, self._on_status)
        await answer(self.bus, self.port, lambda: self.state, self._status)
        self._upkeep_us = self.clock.now_us()
        self._beats = asyncio.get_running_loop().create_task(self._beat_forever())
        self.bus.publish(subjects.beat_ask(self.fleet), b"")
        asyncio.get_running_loop().call_soon(self._deliver_early)  # runs at the first await of start
        await self.actor.start(self.port)
        self._deliver_early()  # for a start without an await
        self.state = "ready"
        self.beat()

    async def finish(self, drain_timeout_s: float, hurried: asyncio.Event | None = None) -> None:
        """Drain within the limit or until `hurried`, stop, leave the bus. A second call does nothing."""
        if self.state in ("stopped", "draining", "failed"):
            return
        self.state = "draining"
        self.beat()
        try:
            if self.failure is None:
                hurry = hurried or asyncio.Event()
                if not await _drained(self.actor, drain_timeout_s, hurry):
                    why = "at once" if hurry.is_set() else f"within {drain_timeout_s:g} s"
                    log.warning("%s did not drain %s", self.port.source, why)
        except Exception as error:  # noqa: BLE001 - reported, and what follows must run
            self.fail(error)
        try:
            await self.actor.stop()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)
        self.state = "stopped" if self.failure is None else "failed"
        self.beat()
        if self._beats is not None:
            self._beats.cancel()
        await self.bus.drain()

    async def failed(self) -> BaseException:
        """Wait for the actor to fail."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    def beat(self) -> None:
        """Say that this actor lives."""
        if self.on_beat is not None:
            self.on_beat("deaf" if self._deaf and self.state == "ready" else self.state)
        facts = self._facts()
        self._recent.sample(self.clock.now_us(), facts.counts)
        beat = Beat(
            kind=self.actor.kind,
            actor=self.actor_id,
            host_id=self.host_id,
            state=self.state,
            model=facts.model,
            load=facts.load,
            interval_us=self.beat_interval_us,
            arena=facts.arena,
            arena_generation=facts.arena_generation,
            tiers=facts.tiers,
            rates=facts.rates,
            scheduler=facts.scheduler,
        )
        envelope = Envelope(self.port.source, self.port.epoch, 0, beat)
        self.bus.publish(subjects.beat(self.fleet, beat.kind, beat.actor), codec.encode(envelope))

    def readings(self) -> Readings:
        """For metrics: of the process, the runtime and the actor."""
        own = (
            Reading("headrace.ready", int(self.state == "ready"), "1"),
            Reading("headrace.wire_errors", self.port.wire_errors, "{message}", grows=True),
        )
        ready = self._early is None and self.failure is None
        return (*own, *process_readings(), *(self.actor.readings if ready else ()))

    def fail(self, error: BaseException) -> None:
        """Give up: the process ends with this error."""
        if self.failure is None:
            if isinstance(error, SetupError):
                log.critical("%s cannot start: %s", self.port.source, error)
            else:
                log.critical("%s failed", self.port.source, exc_info=error)
            self.failure = error
            self._failed.set()

    def upkeep(self) -> None:
        """What happens once an interval besides the beat itself."""
        now_us, last_us = self.clock.now_us(), self._upkeep_us
        self._upkeep_us = now_us
        stopped = now_us - last_us > 2 * self.beat_interval_us  # what it missed waits in its mailbox
        self._deaf = self.port.peers.deaf(self.port.source, now_us)
        if stopped or self._deaf:
            self.port.peers.pardon(now_us, but=self.port.source)
            return
        self.port.upkeep()
        for peer in self.port.peers.expire(self.clock.now_us()):
            self.port.forget(peer.source)
            self.actor.on_peer_gone(peer)
        self.actor.upkeep()

    # ---- internals ------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self.beat_interval_us / 1e6)
            try:
                self.upkeep()
                self.beat()
                if self.metrics is not None:
                    self.metrics.put(self.readings())
            except Exception as error:  # noqa: BLE001 - any error in upkeep fails the actor
                self.fail(error)
                return

    def _on_beat(self, delivery: Delivery) -> None:
        try:
            envelope = codec.decode(delivery.data)
        except WireError as error:
            log.error("dropped a beat on %s: %s", delivery.subject, error)
            return
        beat, source = envelope.message, envelope.source
        if not isinstance(beat, Beat) or source != f"{beat.kind}.{beat.actor}":
            return
        if not self.port.hear(source, envelope.epoch):
            return
        if self.port.peers.get(source) is None:
            self.port.remind(source)
        if self.port.peers.hear(envelope.epoch, beat, self.clock.now_us()):
            peer = self.port.peers.get(source)
            assert peer is not None
            self._guarded(self.actor.on_peer)(peer)

    def _on_status(self, delivery: Delivery) -> None:
        if access.answerable(self.bus, delivery):
            about = {
                **identity(self.port),
                "state": self.state,
                "age_s": (self.clock.wall_us() - self.port.epoch) // 1_000_000,
                "wire_errors": self.port.wire_errors,
                "last_10_s": self._recent.change(self.clock.now_us(), self._facts().counts),
            }
            self.bus.publish(delivery.reply, to_json({**about, **self._status()}))

    def _facts(self) -> Facts:
        return Facts() if self._early is not None or self.failure is not None else self.actor.facts()

    def _status(self) -> dict[str, object]:
        return {} if self._early is not None or self.failure is not None else self.actor.status()

    def _on_fault(self, fault: BusFault) -> None:
        log.warning("%s: %s: %s", self.port.source, fault.kind, fault.detail)
        if fault.kind == "reconnected":
            self.port.reconnected()
        if fault.kind in ("disconnected", "reconnected"):
            self._guarded(self.actor.on_broker)(fault.kind == "reconnected")
        if fault.kind == "refused":
            wrong = "the credentials in nats_url are not (or no longer) those of this service"
            self.fail(SetupError(f"the nats-server refuses: {fault.detail}; {wrong}, see `headrace auth`"))
        if fault.kind == "closed":
            self.fail(Unavailable(f"the broker ended the connection for good: {fault.detail}"))

    def _guarded(self, handler: Callable[P, None]) -> Callable[P, None]:
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            if self._early is not None:
                self._early.append(lambda: run(*args, **kwargs))
            elif self.failure is None:
                try:
                    handler(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - an actor fails as a whole
                    self.fail(error)

        return run

    def _deliver_early(self) -> None:
        early, self._early = self._early or [], None
        for deliver in early:
            deliver()


async def _drained(actor: Actor, limit_s: float, hurried: asyncio.Event) -> bool:
    draining, hurry = asyncio.create_task(actor.drain()), asyncio.create_task(hurried.wait())
    done, _ = await asyncio.wait({draining, hurry}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if draining in done:
        draining.result()
        return True
    draining.cancel()
    await asyncio.wait({draining})
    return False


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """How to run an actor as a process."""

    fleet: str
    host_id: str
    actor_id: str = ""  # empty: drawn at random
    beat_interval_us: int = 1_000_000
    drain_timeout_s: float = 30.0
    on_beat: Callable[[str], None] | None = None  # see Runtime


def run(actor: Actor, connect: Connect, options: ProcessOptions) -> int:
    """Run until SIGTERM or SIGINT drains it; a second signal cuts that short, and a third one, or HURRY_S,
    ends it at once. `connect` takes the actor's name and returns its bus. Returns the exit status: 0 drained,
    1 failed, 130 forced."""
    with _runner() as runner:
        return runner.run(_live(actor, connect, options))


def _runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        process_log.warning("uvloop is missing: asyncio serves, at about half the speed; pip install uvloop")
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _live(actor: Actor, connect: Connect, options: ProcessOptions) -> int:
    actor_id = options.actor_id or secrets.token_hex(4)
    tracer = tracing.from_env(actor.kind, actor_id) if actor.traced else None
    metrics = from_env(actor.kind, actor_id)
    if tracer is not None:
        tracer.test()
    try:
        bus = await connect(f"headrace-{actor.kind}-{actor_id}")
        runtime = Runtime(
            actor,
            bus,
            options.fleet,
            actor_id,
            host_id=options.host_id,
            beat_interval_us=options.beat_interval_us,
            tracer=tracer,
            metrics=metrics,
            on_beat=options.on_beat,
        )
        return await _live_on(runtime, options)
    finally:
        if metrics is not None:
            metrics.stop(FLUSH_S)
        if tracer is not None:
            tracer.stop(FLUSH_S)


async def _live_on(runtime: Runtime, options: ProcessOptions) -> int:
    page = await scrape_point(runtime.readings)
    signalled, hurried = _catch_signals()
    started = asyncio.create_task(runtime.start())
    stopping = asyncio.create_task(signalled.wait())
    failing = asyncio.create_task(runtime.failed())
    await asyncio.wait({started, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if started.done() and (error := started.exception()) is not None:
        runtime.fail(error)
    elif started.done() and not failing.done():
        settle_garbage_collector()
        process_log.info("%s is ready", runtime.port.source)
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    for task in (started, stopping, failing):
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    await runtime.finish(options.drain_timeout_s, hurried)
    if runtime.metrics is not None:
        runtime.metrics.put(runtime.readings())
    if page is not None:
        await page.stop()
    if hurried.is_set():
        return FORCED
    return 1 if runtime.failure is not None else 0


def settle_garbage_collector() -> None:
    """What start-up built lives as long as the process: never scan it again. What comes later goes as its
    last reference does; the search for circles is rare, since a full one stops a scheduler with 2,000
    requests for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _catch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second signal."""
    signalled, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if hurried.is_set():
            _end()
        if signalled.is_set():
            hurried.set()
            limit = threading.Timer(HURRY_S, _end)
            limit.daemon = True
            limit.start()
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return signalled, hurried


def _end() -> None:
    logging.shutdown()
    os._exit(FORCED)  # at once: an orderly exit would wait for threads


def identity(port: Port) -> dict[str, object]:
    """Who answers."""
    return {"kind": port.kind, "id": port.actor, "epoch": port.epoch, "fleet": port.fleet}


async def answer(
    bus: Bus, port: Port, state: Callable[[], str], status: Callable[[], dict[str, object]]
) -> None:
    """Answer PING, INFO and STATS for everybody, for this kind, and for this actor.

    Discovery by the NATS services protocol ($SRV.PING, INFO, STATS), as `nats micro ls` asks for it. Spec:
    nats-architecture-and-design ADR-32. Answered over Bus, so it works on any transport.
    """
    name = f"headrace-{port.kind}"
    head: dict[str, object] = {"name": name, "id": port.actor, "version": VERSION, "metadata": {}}

    def ping() -> dict[str, object]:
        return {"type": "io.nats.micro.v1.ping_response", **head}

    def info() -> dict[str, object]:
        return {"type": "io.nats.micro.v1.info_response", **head, "description": name, "endpoints": []}

    def stats() -> dict[str, object]:
        started = datetime.fromtimestamp(port.epoch / 1e6, UTC).isoformat()
        body = {"type": "io.nats.micro.v1.stats_response", **head, "endpoints": [], "started": started}
        return {**body, "state": state(), "data": status()}

    for verb, make in (("PING", ping), ("INFO", info), ("STATS", stats)):
        for subject in (
            f"$SRV.{verb}",
            f"$SRV.{verb}.{name}",
            f"$SRV.{verb}.{name}.{subjects.token(port.actor)}",
        ):
            await bus.subscribe(subject, _replier(bus, make))


def _replier(bus: Bus, make: Callable[[], dict[str, object]]) -> Callable[[Delivery], None]:
    def reply(delivery: Delivery) -> None:
        if access.answerable(bus, delivery):
            bus.publish(delivery.reply, to_json(make()))

    return reply
