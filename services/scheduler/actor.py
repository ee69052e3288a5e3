"""The scheduler's shell: gives events the time, sends the core's commands, ticks while there is work.

The core decides everything; this file has the mailbox, the clock and the timers. `build` makes the actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pkgutil import resolve_name
from typing import Any

from services.scheduler import core, load_shedding, overlap
from services.scheduler.core import Scheduler
from services.scheduler.executors import sleep
from services.scheduler.executors.roles import Division, Drain
from services.scheduler.kv_tiers import store
from services.scheduler.lifecycle import CLIENT
from services.scheduler.reports import sessions, status
from services.scheduler.state import policies, requests
from services.scheduler.state.counters import StepSpan, step_spans, step_trace
from services.scheduler.state.state import Limits, State
from services.scheduler.state.waiting_queue import Quota, read_quotas
from shared import bodies
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer, detection_us
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.clock import timer_s
from shared.config import Settings, WatchedFile
from shared.errors import SetupError, error_body
from shared.messages import Cancel, ExecReset, Message, SessionAnswer, SessionVerb, Tokenized
from shared.nats import access, subjects
from shared.nats.interface import Delivery
from shared.replies import to_json
from shared.telemetry.counters import Metrics, lately
from shared.telemetry.export import Tracer
from shared.vocab.files import served_names

log = logging.getLogger("headrace.scheduler")

RECORDERS = {  # of the setting `event_log`
    "event_log": "services.scheduler.reports.event_log:attach",
}
TICK_US = 10_000
MOVE_SHARE = 10  # sequences of a draining executor run there for 1 / 10 of drain_timeout_s, then they move
SLOW_TICK_US = 50_000  # while nothing waits: a tick takes 0.3 ms of a core that an engine on CPUs could use


class SchedulerActor(Actor):
    """Turns messages and heartbeats into events, and commands into messages."""

    kind = "scheduler"
    traced = True

    def __init__(
        self,
        limits: Limits,
        model: str,
        event_log: str = "",
        quotas: WatchedFile[dict[str, Quota]] | None = None,
    ) -> None:
        self._core = Scheduler(limits)
        self._first_policy = limits.policy
        self._model = model
        self._event_log = event_log
        self._quotas = quotas
        self._quotas_set: dict[str, Quota] = {}  # as the core has them
        self._recorder: Any = None  # of the table
        self._division = Division()
        self._answer: Message | None = None  # of the core, to a client
        self._ticking: asyncio.Task[None] | None = None
        self._due_us = 0  # of the timer for the next step that is planned late
        self._due: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._core.state.next_seq = mailbox.epoch % 2**30 + 1  # numbers are not used again after a restart
        for recorder in RECORDERS.values() if self._event_log else ():
            self._recorder = await resolve_name(recorder)(self._core, mailbox, self._event_log, self._model)
        self._set_quotas()
        await mailbox.bus.subscribe(subjects.CANCEL_ALL, mailbox.guarded(self._on_cancel))
        await mailbox.bus.subscribe(subjects.policy(mailbox.actor), mailbox.guarded(self._on_policy))
        await mailbox.bus.subscribe(subjects.sleep(mailbox.actor), mailbox.guarded(self._on_sleep))
        await sessions.attach(mailbox, self._model, self._core.state, self._ask)
        await mailbox.bus.subscribe(
            subjects.TRACE_ALL, lambda asked: answer_trace(mailbox, self._core.state, asked)
        )

    def receive(self, source: str, message: Message, trace: str) -> None:
        transit_us = 0
        if isinstance(message, Tokenized) and message.sent_wall_us and not message.generated:
            transit_us = max(self._mailbox.clock.wall_us() - message.sent_wall_us, 0)
        self._handle(requests.Arrived(source, message, trace, transit_us))

    def on_peer(self, peer: Peer) -> None:
        heartbeat = peer.heartbeat
        if heartbeat.kind == "kv_offload":
            self._handle(_offload_event(peer))
        elif heartbeat.model != self._model:
            return  # a detokenizer of another model has another vocabulary
        elif heartbeat.scheduler not in ("", self._mailbox.actor):
            self._handle(requests.PeerLost(heartbeat.kind, heartbeat.actor, died=False))
        elif heartbeat.state == "ready":
            self._handle(
                requests.PeerReady(heartbeat.kind, heartbeat.actor, peer.epoch, heartbeat.arena_generation)
            )
        elif heartbeat.state == "draining":
            self._handle(requests.PeerDraining(heartbeat.kind, heartbeat.actor))

    def on_peer_gone(self, peer: Peer) -> None:
        self._handle(_lost(peer.heartbeat.kind, peer.heartbeat.actor))

    def on_restart(self, source: str) -> None:
        kind, _, actor = source.partition(".")
        self._handle(_lost(kind, actor))

    def on_broker(self, online: bool) -> None:
        if online:
            self._handle(requests.BrokerBack())

    def on_stream_lost(self, source: str) -> None:
        self._handle(requests.StreamLost(source))

    def upkeep(self) -> None:
        if self._ticking is not None and self._ticking.done():
            self._ticking.result()  # a tick that failed fails the actor, as a message would have
        if store.needs_ticks(self._core.state):
            self._handle(requests.Ticked())
        if self._quotas is not None:
            self._quotas.refresh()
            self._set_quotas()
        self._divide()
        if self._recorder is not None:
            self._recorder.upkeep(self._mailbox.clock.now_us())

    def heartbeat_payload(self) -> HeartbeatPayload:
        state = self._core.state
        digest = load_shedding.expected_kind(state, self._model)
        load, counts = status.load(state), lately(status.counted(state))
        return HeartbeatPayload(model=self._model, load=load, counts=counts, model_digest=digest)

    @property
    def metrics(self) -> Metrics:
        state, model = self._core.state, self._model
        usage = status.usage_points(state, model)
        return [*status.metric_points(state), *usage, *status.scale_points(state, model)]

    def status(self) -> dict[str, object]:
        state = self._core.state
        return {"model": self._model, "scale_wanted": status.executors_wanted(state), **status.status(state)}

    async def drain(self) -> None:
        self._handle(requests.DrainRequested())
        await self._idle.wait()

    async def stop(self) -> None:
        if (
            self._core.state.draining and self._core.state.requests
        ):  # after a failure other schedulers continue
            self._handle(requests.DrainTimedOut())
        if self._ticking is not None:
            self._ticking.cancel()
        if self._due is not None:
            self._due.cancel()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None  # messages until the process ends are not part of the log

    def _handle(self, event: requests.Event) -> None:
        handle = self._core.handle if self._recorder is None else self._recorder.handle
        for command in handle(event, self._mailbox.clock.now_us()):
            if command.to == CLIENT:
                self._answer = command.message
            else:
                self._mailbox.send(command.to, command.message, command.trace)
        if unsent := self._core.state.step_log.unsent:
            send_spans(unsent, self._mailbox.tracer)
        self._set_timer(overlap.plan_due_us(self._core.state))
        if self._core.is_idle:
            self._idle.set()
            return
        self._idle.clear()
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _set_timer(self, due_us: int) -> None:
        if due_us == self._due_us:
            return
        if self._due is not None:
            self._due.cancel()
        self._due_us = due_us
        if due_us:
            wait_s = timer_s(due_us - self._mailbox.clock.now_us())
            on_due = self._mailbox.guarded(self._on_due)
            self._due = asyncio.get_running_loop().call_later(wait_s, on_due)

    def _on_due(self) -> None:
        self._due_us = 0
        self._handle(requests.Ticked())

    def _divide(self) -> None:
        """Move an executor to another scheduler, if this one has too many."""
        box, executors = self._mailbox, self._core.state.executors
        running = {name: len(executor.running) for name, executor in executors.items()}
        move = self._division.decide(box.actor, self._model, box.peers, running, box.clock.now_us())
        if isinstance(move, Drain):
            self._handle(requests.PeerDraining("executor", move.executor))
        elif move is not None:
            log.info("executor %s moves to scheduler %s", move.executor, move.scheduler)
            epoch, why = executors[move.executor].epoch, "the executors are divided among the schedulers"
            self._handle(requests.PeerLost("executor", move.executor, died=False))
            reset = ExecReset(exec_epoch=epoch, why=why, scheduler=move.scheduler)
            box.send(f"executor.{move.executor}", reset)

    def _set_quotas(self) -> None:
        if self._quotas is not None and self._quotas.value != self._quotas_set:
            self._quotas_set = self._quotas.value
            rows = ((tenant, *quota) for tenant, quota in self._quotas_set.items())
            self._handle(requests.QuotasChanged(tuple(rows)))

    async def _tick(self) -> None:
        while not self._core.is_idle:
            await asyncio.sleep((TICK_US if self._core.has_waiting else SLOW_TICK_US) / 1e6)
            self._handle(requests.Ticked())
        self._ticking = None

    def _on_cancel(self, delivery: Delivery) -> None:
        if (names := subjects.names_in(delivery.subject)) is not None:
            self._handle(requests.Arrived(CLIENT, Cancel(tenant=names[0], request=names[1])))

    def _ask(self, verb: SessionVerb) -> SessionAnswer:
        """The core's answer to a verb of a client."""
        self._answer = None
        self._handle(requests.Arrived(CLIENT, verb))
        answer = self._answer
        return answer if isinstance(answer, SessionAnswer) else SessionAnswer(state=sessions.UNKNOWN)

    def _on_policy(self, delivery: Delivery) -> None:
        """Put the policy in the body in force, and answer with the policies before and after, or why not."""
        if not access.can_answer(self._mailbox.bus, delivery):
            return
        before = self._core.state.limits.policy
        try:
            text = delivery.data.decode("utf-8", "replace")
            after = core.asked_policy(text, before, self._first_policy)
        except SetupError as error:
            answer = error_body(error)
        else:
            self._handle(requests.PolicySet(str(after)))
            log.info("the policy is %s now, it was %s", after, before)
            answer = {**bodies.Change(before=str(before), after=str(after))}
        self._mailbox.bus.publish(delivery.reply, to_json(answer))

    def _on_sleep(self, delivery: Delivery) -> None:
        """Begin to put executors to sleep or wake them, and answer with the states of all, or why not."""
        if not access.can_answer(self._mailbox.bus, delivery):
            return
        answer: dict[str, object]
        try:
            event = sleep.parse(delivery.data.decode("utf-8", "replace"))
        except SetupError as error:
            answer = error_body(error)
        else:
            self._handle(event)
            answer = {**bodies.SleepStates(executors=sleep.states(self._core.state))}
        self._mailbox.bus.publish(delivery.reply, to_json(answer))


def _offload_event(peer: Peer) -> requests.Event:
    """The event for a heartbeat of a kv_offload. Without an arena, or while it drains, it is lost."""
    heartbeat = peer.heartbeat
    if heartbeat.state != "ready" or not heartbeat.arena or not heartbeat.tiers:
        return requests.OffloadLost(heartbeat.actor)
    return requests.OffloadReady(
        heartbeat.actor, peer.epoch, heartbeat.host_id, heartbeat.arena_generation, heartbeat.tiers
    )


def _lost(kind: str, actor: str) -> requests.Event:
    return requests.OffloadLost(actor) if kind == "kv_offload" else requests.PeerLost(kind, actor)


def send_spans(unsent: deque[StepSpan], tracer: Tracer | None) -> None:
    """Export the sampled steps as spans, and empty `unsent`."""
    while unsent:
        step = unsent.popleft()
        if tracer is not None:
            tracer.export(step_trace(step), "", step_spans(step))


def answer_trace(mailbox: Mailbox, state: State, asked: Delivery) -> None:
    """Reply to `headrace.v1.trace.<request>`, whose body is that of `subjects.trace_body`."""
    try:
        request = subjects.name_at(asked.subject, 3)
    except ValueError:
        request = ""  # the answer is "unknown"
    if access.can_answer(mailbox.bus, asked):
        offset_us = mailbox.clock.wall_us() - mailbox.clock.now_us()
        tenant, steps = subjects.asked_trace(asked.data)
        body = status.trace(state, request, offset_us, tenant=tenant, steps=steps)
        mailbox.bus.publish(asked.reply, to_json(body))


def build(settings: Settings) -> SchedulerActor:
    """The scheduler actor for these settings. Raises SetupError."""
    limits = Limits(
        window=settings.window,
        overlap=settings.overlap_mode,
        comm=settings.overlap_comm,
        speculate=settings.most_drafts,
        step_tokens=settings.step_tokens,
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        policy=policies.parse(settings.policy),
        classes=requests.parse(settings.slo),
        model_digest=settings.model_digest,
        accept_mixed=settings.accept_mixed,
        shares_memory=settings.awake_gib > 0,
        cold_start_wait_us=int(settings.cold_start_wait_s * 1e6),
        ended_within_us=detection_us(settings.heartbeat_interval_ms * 1000),
        move_after_us=int(settings.drain_timeout_s * 1e6) // MOVE_SHARE,
    )
    model = served_names(settings)[0]
    path = settings.tenant_quotas
    quotas = WatchedFile("tenant_quotas", path, read_quotas, log) if path else None
    return SchedulerActor(limits, model, settings.event_log, quotas)
