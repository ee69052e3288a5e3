"""`Runtime` runs an actor: start, ready, drain, stop; heartbeats, status.

A service subclasses `Actor`. process.py makes it a process; `Runtime` alone runs it on any bus, as the tests
do with a memory bus. Handlers are plain functions, called one at a
time on the event loop. Messages that arrive before the first await of `start` are delivered after it. An
exception in a handler fails the whole actor, and a supervisor restarts the process. An actor wraps the
callbacks of its own timers and subscriptions in `mailbox.guarded`, so that the same holds for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import ParamSpec

from shared import codec
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer
from shared.clock import Clock, SystemClock, end_task, new_epoch
from shared.codec import Envelope
from shared.errors import SetupError, Unavailable, WireError
from shared.messages import Heartbeat, Message
from shared.nats import access, subjects
from shared.nats.interface import Bus, BusFault, Delivery
from shared.replies import to_json
from shared.telemetry import counters
from shared.telemetry.counters import RECENT, Metrics, ProcessCounter, Recent
from shared.telemetry.export import MeterSink, Tracer
from shared.telemetry.metrics import process_metrics

log = logging.getLogger("headrace.actor")

VERSION = "0.1.0"  # in the answers to discovery


P = ParamSpec("P")
OnHeartbeat = Callable[[str, str, int], None]  # state or "cut_off", kind.id, incarnation


@dataclass(slots=True)
class HeartbeatPayload:
    """The service's part of a heartbeat. `counts` are not sent: `headrace status` shows their change within
    the last seconds."""

    model: str = ""
    load: tuple[tuple[str, int], ...] = ()
    arena: str = ""
    arena_generation: int = 0
    tiers: tuple[str, ...] = ()
    rates: tuple[int, ...] = ()
    scheduler: str = ""
    aliases: tuple[str, ...] = ()
    model_digest: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


class Actor:
    """Base of every service. Override the methods that the service needs."""

    kind = ""
    traced = False  # whether its process makes spans

    async def start(self, mailbox: Mailbox) -> None:
        """Load, subscribe public subjects. The actor is ready when it returns."""

    def on_ready(self) -> None:
        """Called after `start`, once the process handles messages without a pause: ask for work."""

    def receive(self, source: str, message: Message, trace: str) -> None:
        """Handle one message of the mailbox; in order and once per source `kind.id`."""

    def on_peer(self, peer: Peer) -> None:
        """An actor appeared, changed its state, its arena or its scheduler, or is a new incarnation."""

    def on_restart(self, source: str) -> None:
        """`source` is a new incarnation: the state of the previous one is void. Called before the first
        message or heartbeat of the new one."""

    def on_peer_gone(self, peer: Peer) -> None:
        """An actor missed its heartbeats or stopped."""

    def on_stream_lost(self, source: str) -> None:
        """Messages from `source` are lost for good: resynchronise with it."""

    def on_broker(self, online: bool) -> None:
        """The connection to the broker was cut, or is back. The streams between actors repair themselves;
        other recently published messages may be lost."""

    def upkeep(self) -> None:
        """Called once a heartbeat interval: repeat unanswered messages."""

    def heartbeat_payload(self) -> HeartbeatPayload:
        """For the next heartbeat."""
        return HeartbeatPayload()

    @property
    def metrics(self) -> Metrics:
        """The actor's metrics. Called after `start` has run up to its first await."""
        return ()

    def status(self) -> dict[str, object]:
        """For `headrace status`: JSON-able, includes all counts that must be zero when idle."""
        return {}

    async def drain(self) -> None:
        """Accept no new work, finish or give back the running work. Bounded by the runtime's time limit."""

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
    heartbeat_interval_us: int = 1_000_000
    state: str = "starting"
    failure: BaseException | None = None
    tracer: Tracer | None = None
    metric_sink: MeterSink | None = None
    settle: Callable[[], None] | None = None  # called between `start` and ready: it may block
    on_heartbeat: OnHeartbeat | None = None  # called at each heartbeat
    mailbox: Mailbox = field(init=False)
    _failed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _heartbeats: asyncio.Task[None] | None = field(init=False, default=None)
    _held_back: list[Callable[[], None]] | None = field(init=False, default_factory=list)
    _upkeep_us: int = field(init=False, default=0)
    _cut_off: bool = field(init=False, default=False)
    _recent: Recent = field(init=False, default_factory=Recent)

    def __post_init__(self) -> None:
        source = f"{self.actor.kind}.{self.actor_id}"
        self.mailbox = Mailbox(self.bus, self.clock, self.fleet, source, new_epoch(self.clock))
        self.mailbox.tracer = self.tracer
        self.mailbox.guarded = self._guarded

    async def start(self) -> None:
        """Subscribe, start the actor, announce that it is ready."""
        self.bus.on_fault(self._on_fault)
        actor = self.actor
        await self.mailbox.open(
            self._guarded(actor.receive), self._guarded(actor.on_stream_lost), self._guarded(actor.on_restart)
        )
        await self.bus.subscribe(subjects.heartbeat_all(self.fleet), self._on_heartbeat)
        for ask in (subjects.heartbeat_request(self.fleet), subjects.HEARTBEAT_REQUEST_ALL_FLEETS):
            await self.bus.subscribe(ask, lambda _: self.send_heartbeat())
        await self.bus.subscribe(subjects.STATUS, self._on_status)
        await self.bus.subscribe(subjects.metrics(self.fleet), self._on_metrics)
        await answer_status(self.bus, self.mailbox, lambda: self.state, self._status)
        self._upkeep_us = self.clock.now_us()
        self._heartbeats = asyncio.get_running_loop().create_task(self._heartbeat_forever())
        self.bus.publish(subjects.heartbeat_request(self.fleet), b"")
        asyncio.get_running_loop().call_soon(self._deliver_held_back)  # runs at the first await of start
        await self.actor.start(self.mailbox)
        self._deliver_held_back()  # for a start without an await
        if self.settle is not None:
            self.settle()
        self.state = "ready"
        self.actor.on_ready()
        self.send_heartbeat()

    async def finish(self, drain_timeout_s: float, hurried: asyncio.Event | None = None) -> None:
        """Drain within the limit or until `hurried`, stop, leave the bus. A second call does nothing."""
        if self.state in ("stopped", "draining", "failed"):
            return
        self.state = "draining"
        self.send_heartbeat()
        try:
            if self.failure is None:
                hurry = hurried or asyncio.Event()
                if not await _drain_within(self.actor, drain_timeout_s, hurry):
                    why = "at once" if hurry.is_set() else f"within {drain_timeout_s:g} s"
                    log.warning("%s did not drain %s", self.mailbox.source, why)
        except Exception as error:  # noqa: BLE001 - reported, and the next steps must run
            self.fail(error)
        try:
            await self.actor.stop()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)
        self.state = "stopped" if self.failure is None else "failed"
        self.send_heartbeat()
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        await self.bus.drain()

    async def failed(self) -> BaseException:
        """Wait for the actor to fail."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    def send_heartbeat(self) -> None:
        """Publish a heartbeat now."""
        if self.on_heartbeat is not None:
            state = "cut_off" if self._cut_off and self.state == "ready" else self.state
            self.on_heartbeat(state, self.mailbox.source, self.mailbox.epoch)
        payload = self._payload()
        self._recent.sample(self.clock.now_us(), payload.counts)
        fields = {each.name: getattr(payload, each.name) for each in dataclasses.fields(payload)}
        del fields["counts"]
        heartbeat = Heartbeat(
            kind=self.actor.kind,
            actor=self.actor_id,
            host_id=self.host_id,
            state=self.state,
            interval_us=self.heartbeat_interval_us,
            **fields,
        )
        envelope = Envelope(self.mailbox.source, self.mailbox.epoch, 0, heartbeat)
        self.bus.publish(
            subjects.heartbeat(self.fleet, heartbeat.kind, heartbeat.actor), codec.encode(envelope)
        )

    def collect_metrics(self) -> Metrics:
        """The metrics of the runtime, the process and the actor."""
        own = (
            ProcessCounter.READY.point(int(self.state == "ready")),
            ProcessCounter.WIRE_ERRORS.point(self.mailbox.wire_errors),
        )
        return (*own, *process_metrics(), *(self.actor.metrics if self._has_started else ()))

    def fail(self, error: BaseException) -> None:
        """Fail the actor: the process ends with this error."""
        if self.failure is None:
            if isinstance(error, SetupError):
                log.critical("%s cannot start: %s", self.mailbox.source, error)
            else:
                log.critical("%s failed", self.mailbox.source, exc_info=error)
            self.failure = error
            self._failed.set()

    def upkeep(self) -> None:
        """Maintain the streams, expire silent peers, call the actor's upkeep. Once a heartbeat interval."""
        now_us, last_us = self.clock.now_us(), self._upkeep_us
        self._upkeep_us = now_us
        stopped = now_us - last_us > 2 * self.heartbeat_interval_us  # missed messages wait in the mailbox
        self._cut_off = self.mailbox.peers.is_cut_off(self.mailbox.source, now_us)
        if stopped or self._cut_off:
            self.mailbox.peers.restart_timeouts(now_us, but=self.mailbox.source)
            return
        self.mailbox.upkeep()
        for peer in self.mailbox.peers.expire(self.clock.now_us()):
            self._lose(peer)
        self.actor.upkeep()

    # ---- internals ------------------------------------------------------------------------------

    def _lose(self, peer: Peer) -> None:
        self.mailbox.forget(peer.source)
        self.actor.on_peer_gone(peer)

    async def _heartbeat_forever(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_interval_us / 1e6)
            try:
                self.upkeep()
                self.send_heartbeat()
                if self.metric_sink is not None:
                    self.metric_sink.put(self.collect_metrics())
            except Exception as error:  # noqa: BLE001 - any error in upkeep fails the actor
                self.fail(error)
                return

    def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            envelope = codec.decode(delivery.data)
        except WireError as error:
            log.error("dropped a heartbeat on %s: %s", delivery.subject, error)
            return
        heartbeat, source = envelope.message, envelope.source
        if not isinstance(heartbeat, Heartbeat) or source != f"{heartbeat.kind}.{heartbeat.actor}":
            return
        if not self.mailbox.note_alive(source, envelope.epoch):
            return
        if heartbeat.state == "failed":  # `headrace up` sends it for a service that was killed
            if (gone := self.mailbox.peers.end(envelope.epoch, heartbeat, self.clock.now_us())) is not None:
                self._guarded(self._lose)(gone)
            return
        if self.mailbox.peers.get(source) is None:
            self.mailbox.reannounce(source)
        if self.mailbox.peers.update(envelope.epoch, heartbeat, self.clock.now_us()):
            peer = self.mailbox.peers.get(source)
            assert peer is not None
            self._guarded(self.actor.on_peer)(peer)

    def _on_status(self, delivery: Delivery) -> None:
        if access.can_answer(self.bus, delivery):
            about = {
                "kind": self.mailbox.kind,
                "id": self.mailbox.actor,
                "epoch": self.mailbox.epoch,
                "fleet": self.mailbox.fleet,
                "host": self.host_id,
                "state": self.state,
                ProcessCounter.AGE.status: self.mailbox.age_s,
                ProcessCounter.WIRE_ERRORS.status: self.mailbox.wire_errors,
                RECENT: self._recent.change(self.clock.now_us(), self._payload().counts),
            }
            self.bus.publish(delivery.reply, to_json({**about, **self._status()}))

    def _on_metrics(self, delivery: Delivery) -> None:
        if access.can_answer(self.bus, delivery):
            self.bus.publish(delivery.reply, counters.pack(self.mailbox.source, self.collect_metrics()))

    @property
    def _has_started(self) -> bool:
        """True once `start` of the actor has run up to its first await, until the actor fails."""
        return self._held_back is None and self.failure is None

    def _payload(self) -> HeartbeatPayload:
        return self.actor.heartbeat_payload() if self._has_started else HeartbeatPayload()

    def _status(self) -> dict[str, object]:
        return self.actor.status() if self._has_started else {}

    def _on_fault(self, fault: BusFault) -> None:
        log.warning("%s: %s: %s", self.mailbox.source, fault.kind, fault.detail)
        if fault.kind == "reconnected":
            self.mailbox.on_reconnected()
        if fault.kind in ("disconnected", "reconnected"):
            self._guarded(self.actor.on_broker)(fault.kind == "reconnected")
        if fault.kind == "refused":
            wrong = "the credentials in nats_url are not (or no longer) those of this service"
            self.fail(SetupError(f"the nats-server refuses: {fault.detail}; {wrong}, see `headrace auth`"))
        if fault.kind == "closed":
            self.fail(Unavailable(f"the broker ended the connection for good: {fault.detail}"))

    def _guarded(self, handler: Callable[P, None]) -> Callable[P, None]:
        # no closure that names itself: each would be a cycle, which the rare collections leave in memory
        return partial(self._run, handler)

    def _run(self, handler: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._held_back is not None:
            self._held_back.append(partial(self._run, handler, *args, **kwargs))
        elif self.failure is None:
            try:
                handler(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - an actor fails as a whole
                self.fail(error)

    def _deliver_held_back(self) -> None:
        early, self._held_back = self._held_back or [], None
        for deliver in early:
            deliver()


async def _drain_within(actor: Actor, limit_s: float, hurried: asyncio.Event) -> bool:
    draining, hurry = asyncio.create_task(actor.drain()), asyncio.create_task(hurried.wait())
    done, _ = await asyncio.wait({draining, hurry}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if draining in done:
        draining.result()
        return True
    await end_task(draining)
    return False


async def answer_status(
    bus: Bus, mailbox: Mailbox, state: Callable[[], str], status: Callable[[], dict[str, object]]
) -> None:
    """Answer discovery requests for all services, for this kind, and for this actor.

    The NATS services protocol ($SRV.PING, INFO, STATS), as used by `nats micro ls`. Spec:
    nats-architecture-and-design ADR-32.
    """
    name = f"headrace-{mailbox.kind}"
    head: dict[str, object] = {"name": name, "id": mailbox.actor, "version": VERSION, "metadata": {}}

    def ping() -> dict[str, object]:
        return {"type": "io.nats.micro.v1.ping_response", **head}

    def info() -> dict[str, object]:
        return {"type": "io.nats.micro.v1.info_response", **head, "description": name, "endpoints": []}

    def stats() -> dict[str, object]:
        started = datetime.fromtimestamp(mailbox.epoch / 1e6, UTC).isoformat()
        body = {"type": "io.nats.micro.v1.stats_response", **head, "endpoints": [], "started": started}
        return {**body, "state": state(), "data": status()}

    for verb, make in (("PING", ping), ("INFO", info), ("STATS", stats)):
        for subject in (
            f"$SRV.{verb}",
            f"$SRV.{verb}.{name}",
            f"$SRV.{verb}.{name}.{subjects.token(mailbox.actor)}",
        ):
            await bus.subscribe(subject, _status_replier(bus, make))


def _status_replier(bus: Bus, make: Callable[[], dict[str, object]]) -> Callable[[Delivery], None]:
    def reply(delivery: Delivery) -> None:
        if access.can_answer(bus, delivery):
            bus.publish(delivery.reply, to_json(make()))

    return reply
