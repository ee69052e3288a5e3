"""`DetokenizerActor` feeds its mailbox to the core and sends the core's frames to the clients.

Frames are built once per turn of the event loop: a detokenizer that lags merges the waiting steps. While more
than `backlog_limit_bytes` wait to leave this process, only last frames of requests are built.

`Completions` waits until a request's last frame has left the process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

from services.detokenizer import failover
from services.detokenizer.clients import ClientEvents, answer
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.response import Command, Fault, Finished, Publish, ResponseText, SendTo
from shared.actor.mailbox import Mailbox
from shared.actor.membership import AGE, TOKENS, VOCABULARY, Peer, check_vocabulary, vocabulary_number
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.config import Settings
from shared.errors import PayloadTooLarge, rejection
from shared.messages import Ended, Message, Rejected, Tokenized
from shared.nats import subjects
from shared.replies import end_headers, error_reply
from shared.telemetry import traces
from shared.telemetry.counters import DetokenizerCounter, Metrics, in_load, lately, points
from shared.telemetry.traces import Choice, Reply, RequestFacts, request_spans
from shared.vocab.files import resolve, served_names
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger("headrace.detokenizer")

POLL_S = 0.02  # between checks of a full backlog
TURNS = 2  # of the event loop after a last frame: one for the writer of the bus, one for its flusher
SMALL_BYTES = 65_536  # of backlog: leaves in one write, and a busy bus always has some
MAX_POLLS = 100  # then the broker accepts nothing, which other parts detect
WATCHED = ("scheduler", "detokenizer")  # kinds that hold the state of a request
CLAIMS_EVERY_S = 0.1  # the others receive answered requests within this time
PARTS = {  # further requests, a look after each turn by `watch`, metrics
    "durable": "services.detokenizer.durable.shell:DurableShell",
}


class DetokenizerActor(Actor):
    """One shard: text, stop strings and reply streams of the sequences opened here."""

    kind = "detokenizer"
    traced = True

    def __init__(
        self, vocabulary: Vocabulary, model: str, backlog_limit_bytes: int, aliases: Sequence[str] = ()
    ) -> None:
        """`aliases`: further names of the model in detokenize requests."""
        self._vocabulary, self._number = vocabulary, vocabulary_number(vocabulary.digest)
        self._model = model
        self._names = (model, *aliases)
        self._backlog_limit_bytes = backlog_limit_bytes
        self._core = DetokenizerCore(vocabulary)
        self._flush_due = False
        self._finding = False
        self._claims_timer = False
        self._idle_schedulers: set[str] = set()  # without an executor, while others have one
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._endings = Completions(mailbox, lambda: self._run([]))
        self._client_events = ClientEvents(mailbox, self._core, self._run)
        given = mailbox, self._core, self._run, self._after_loss, self._backlog_limit_bytes
        self._parts: list[Any] = [resolve_name(part)(*given) for part in PARTS.values()]
        await self._client_events.listen()  # from here on it may be asked for its status
        for part in self._parts:
            await part.listen(self._model, self._names)
        for name in self._names:
            reply = partial(answer, mailbox.bus, name, self._vocabulary)
            await mailbox.bus.subscribe(subjects.detokenize_any_tenant(name), reply, queue="detokenize")

    def receive(self, source: str, message: Message, trace: str) -> None:
        clock = self._mailbox.clock
        self._run(self._core.handle(source, message, trace, clock.wall_us(), clock.now_us()))
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._mailbox.guarded(self._flush))

    def on_peer(self, peer: Peer) -> None:
        check_vocabulary(peer, self._model, self._number, self._mailbox.epoch, self._mailbox.age_s)
        heartbeat = peer.heartbeat
        ours = (heartbeat.kind, heartbeat.model, heartbeat.state) == (self.kind, self._model, "ready")
        if ours and peer.source != self._mailbox.source and (known := self._core.backups.known).done:
            self._mailbox.send(peer.source, known)

    def on_restart(self, source: str) -> None:
        kind = source.partition(".")[0]
        if kind in WATCHED:
            self._after_loss(self._core.on_lost(source, f"the {kind} was restarted", self._is_up, void=True))

    def on_peer_gone(self, peer: Peer) -> None:
        if (kind := peer.heartbeat.kind) in WATCHED:
            self._after_loss(self._core.on_lost(peer.source, f"the {kind} has gone", self._is_up))

    def on_stream_lost(self, source: str) -> None:
        self._run(self._core.on_stream_lost(source))

    def on_broker(self, online: bool) -> None:
        self._client_events.on_broker(online)

    def upkeep(self) -> None:
        self._client_events.upkeep()
        peers, before = self._mailbox.peers, self._idle_schedulers
        self._idle_schedulers = {*peers.ready("scheduler", self._model)} - {*peers.serving(self._model)}
        for actor in sorted(before & self._idle_schedulers):
            self._after_loss(
                self._core.failover.on_lost(f"scheduler.{actor}", "the scheduler has no executor")
            )
        self._after_loss(self._core.upkeep(self._mailbox.clock.now_us(), self._is_up))

    def heartbeat_payload(self) -> HeartbeatPayload:
        counted = self._core.counted()
        tokens = vocabulary_number(self._vocabulary.tokens_digest)
        figures = (
            *in_load(counted),
            (VOCABULARY, self._number),
            (TOKENS, tokens),
            (AGE, self._mailbox.age_s),
        )
        return HeartbeatPayload(model=self._model, load=figures, counts=lately(counted))

    @property
    def metrics(self) -> Metrics:
        counted = {**self._core.counted(), DetokenizerCounter.BACKLOG: self._mailbox.bus.backlog_bytes}
        return (
            *points(counted),
            *(point for part in self._parts for point in part.metrics),
        )

    def status(self) -> dict[str, object]:
        return {"model": self._model, **self._core.status()}

    async def drain(self) -> None:
        """Finish the open requests; after the time limit their schedulers open the rest elsewhere."""
        await self._idle.wait()
        if self._core.backups.has_unsent:
            self._send_claims()

    # ---- internals ------------------------------------------------------------------------------

    def _is_up(self, source: str) -> bool:
        return self._mailbox.peers.get(source) is not None

    def _after_loss(self, commands: list[Command]) -> None:
        self._run(commands)
        if not self._finding:
            self._find_schedulers()

    def _find_schedulers(self) -> None:
        """Send the requests without a scheduler to another one, every FAILOVER_POLL_S while there are any."""
        self._finding = False
        peers, now_us = self._mailbox.peers, self._mailbox.clock.now_us()
        if not peers.is_cut_off(self._mailbox.source, now_us):
            self._run(self._core.failover.advance(peers.serving(self._model), now_us))
        if self._core.failover.is_active:
            self._finding = True
            asyncio.get_running_loop().call_later(
                failover.FAILOVER_POLL_S, self._mailbox.guarded(self._find_schedulers)
            )

    def _send_claims(self) -> None:
        """Report the done keys to the other detokenizers, which drop their backups."""
        self._claims_timer = False
        claims = self._core.backups.report()
        peers = self._mailbox.peers
        for actor in (*peers.ready(self.kind, self._model), *peers.draining(self.kind, self._model)):
            if actor != self._mailbox.actor:
                self._mailbox.send(f"{self.kind}.{actor}", claims)

    def _flush(self) -> None:
        if self._mailbox.bus.backlog_bytes > self._backlog_limit_bytes:
            asyncio.get_running_loop().call_later(POLL_S, self._mailbox.guarded(self._flush))
            return
        self._flush_due = False
        self._run(self._core.flush(self._mailbox.clock.wall_us(), self._mailbox.clock.now_us()))

    def _run(self, commands: list[Command]) -> None:
        finished: Finished | None = None
        for command in commands:
            if type(command) is Publish:
                publish(self._mailbox, command)
            elif type(command) is SendTo:
                if finished is not None and isinstance(command.message, Ended):
                    self._endings.add(finished, command)
                    finished = None
                elif (refusal := send(self._mailbox, command)) is not None:
                    self._run(self._core.failover.on_answer(command.scheduler, refusal))
            elif type(command) is Fault:
                log.error("%s", command.detail)
            elif type(command) is Finished:
                if finished is not None:
                    self._endings.add(finished, None)
                finished = command
        if finished is not None:
            self._endings.add(finished, None)
        for part in self._parts:
            part.watch()
        if not self._claims_timer and self._core.backups.has_unsent:
            self._claims_timer = True
            asyncio.get_running_loop().call_later(CLAIMS_EVERY_S, self._send_claims)
        if self._core.is_idle and not self._endings.waiting:
            self._idle.set()
        else:
            self._idle.clear()


def publish(mailbox: Mailbox, frame: Publish) -> None:
    """Send a frame; its reply subject gets the server's 503 if the client has gone."""
    reply = subjects.gone(mailbox.actor, str(frame.number))
    try:
        mailbox.bus.publish(frame.inbox, frame.data, reply=reply, headers=frame.headers)
    except PayloadTooLarge as error:
        log.error("an answer is too large: %s", error)
        mailbox.bus.publish(frame.inbox, error_reply(error, "", ""), headers=end_headers(error))


def send(mailbox: Mailbox, command: SendTo) -> Rejected | None:
    """Send to a scheduler. Returns a refusal for a request that does not fit into a message with its
    generated tokens, because its options are at the limit."""
    try:
        mailbox.send(command.scheduler, command.message, command.trace)
    except PayloadTooLarge as error:
        tokenized = command.message
        if not isinstance(tokenized, Tokenized):
            raise
        return rejection(tokenized, error.code, error.message)
    return None


class Completions:
    """Requests with a last frame that has not left this process yet.

    Afterwards the scheduler gets Ended with the stamps of the reply, and the spans of a traced request are
    exported.
    """

    def __init__(self, mailbox: Mailbox, on_empty: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._on_empty = on_empty
        self._polls = mailbox.guarded(self._poll)
        self.waiting = 0

    def add(self, finished: Finished, ended: SendTo | None) -> None:
        """A request has ended; `ended` is its last Ended, None if no scheduler waits for one."""
        self.waiting += 1
        built_us = self._mailbox.clock.wall_us()
        asyncio.get_running_loop().call_soon(self._polls, finished.request, ended, built_us, 0)

    def _poll(self, request: ResponseText, ended: SendTo | None, built_us: int, polls: int) -> None:
        loop = asyncio.get_running_loop()
        if polls < TURNS:
            loop.call_soon(self._polls, request, ended, built_us, polls + 1)
            return
        if self._mailbox.bus.backlog_bytes > SMALL_BYTES and polls < MAX_POLLS:
            loop.call_later(POLL_S, self._polls, request, ended, built_us, polls + 1)
            return
        reply = Reply(
            opened_us=request.opened_us,
            first_us=request.first_us,
            built_us=built_us,
            sent_us=self._mailbox.clock.wall_us(),
        )
        if ended is not None and isinstance(ended.message, Ended):
            self._mailbox.send(ended.scheduler, stamped(ended.message, reply))
        self.waiting -= 1
        if not self.waiting:
            self._on_empty()
        tracer, parent_span = self._mailbox.tracer, request.opened.parent_span
        if tracer is not None and parent_span and traces.is_sampled(request.trace):
            facts = request_facts(request, reply, self._mailbox.source)
            tracer.export(request.trace, parent_span, request_spans(facts))


def stamped(ended: Ended, reply: Reply) -> Ended:
    """An Ended with the stamps of its reply."""
    return dataclasses.replace(
        ended, first_wall_us=reply.first_us, built_wall_us=reply.built_us, sent_wall_us=reply.sent_us
    )


def request_facts(request: ResponseText, reply: Reply, detokenizer: str) -> RequestFacts:
    """The data for the spans of an ended request."""
    opened = request.opened
    return RequestFacts(
        request=opened.request,
        tenant=opened.tenant,
        model=opened.model,
        format=opened.format,
        inbox=opened.inbox,
        received_wall_us=opened.received_wall_us,
        detokenizer=detokenizer,
        choices=tuple(
            Choice(index=i, tokens=closed.tokens, reason=closed.reason, close=closed.message)
            for i, closed in sorted(request.closed.items())
        ),
        reply=reply,
        error=request.error,
    )


def build(settings: Settings) -> DetokenizerActor:
    """The detokenizer for the configuration. Raises SetupError."""
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    vocabulary.decode([])  # builds the table now rather than at the first request
    name, *aliases = served_names(settings)
    return DetokenizerActor(vocabulary, name, settings.backlog_limit_bytes, aliases)
