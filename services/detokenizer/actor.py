"""`DetokenizerActor` feeds its mailbox to the core and sends the core's frames to the clients.

Frames are built once per turn of the event loop: a detokenizer that lags merges the waiting steps. While more
than `backlog_limit_bytes` wait to leave this process, only last frames of requests are built.

`ClientEvents` passes events of clients to the core, `Completions` waits until a request's last frame has left
the process, and `answer` serves detokenize requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

from services.detokenizer import failover
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.reconnect import CONNECT_POLL_S
from services.detokenizer.response import Command, Fault, Finished, Publish, ResponseText, SendTo
from shared import bodies
from shared.actor.mailbox import Mailbox
from shared.actor.membership import AGE, TOKENS, VOCABULARY, Peer, check_vocabulary, vocabulary_number
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.config import Settings
from shared.errors import BadRequest, HeadraceError, PayloadTooLarge, WireError
from shared.messages import Ended, Message, Rejected, Tokenized, rejection
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery
from shared.replies import end_headers, error_reply, to_json
from shared.telemetry import traces
from shared.telemetry.counters import DetokenizerCounter, Metrics, in_load, lately, points
from shared.telemetry.traces import Choice, Reply, RequestRecord, request_spans
from shared.vocab.files import resolve, served_names
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger("headrace.detokenizer")

POLL_S = 0.02  # between checks of a full backlog
TURNS = 2  # of the event loop after a last frame: one for the writer of the bus, one for its flusher
SMALL_BYTES = 65_536  # of backlog: leaves in one write, and a busy bus always has some
MAX_POLLS = 100  # then the broker accepts nothing, which other parts detect
WATCHED = ("scheduler", "detokenizer")  # kinds that hold the state of a request
CLAIMS_EVERY_S = 0.1  # the others receive answered requests within this time
MAX_QUESTION_BYTES = 1_048_576  # answered on the event loop within about 50 ms
PARTS = {  # further requests, a look after each turn by `watch`, metrics
    "durable": "services.detokenizer.durable.shell:DurableShell",
}
ABSENT_TURNS = 3  # as many as the missed heartbeats of a dead service: the client may be reconnecting
SIBLING = "headrace-probe"
# The inboxes of client libraries.
_WILDCARD = re.compile(rf"_INBOX\.([^.]+\.({access.SERVICE_PREFIX}[^.]+\.)?)?[^.]+")
PROBE_HEADERS = {"Headrace-Probe": "1"}


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


class ClientEvents:
    """Passes events of this shard's clients to the core: a client has gone, cancels, or may be back."""

    def __init__(self, mailbox: Mailbox, core: DetokenizerCore, run: Callable[[list[Command]], None]) -> None:
        self._mailbox = mailbox
        self._core = core
        self._run = run
        self._liveness = ClientLiveness()
        self._reconnecting = False

    async def listen(self) -> None:
        """Subscribe to the events."""
        bus, guarded = self._mailbox.bus, self._mailbox.guarded
        await bus.subscribe(subjects.gone_all(self._mailbox.actor), guarded(self._on_gone))
        await bus.subscribe(subjects.CANCEL_ALL, guarded(self._on_cancel))

    def upkeep(self) -> None:
        """Once a heartbeat: probe the clients of plain requests, unless they may be reconnecting."""
        self._core.reconnect.age()
        if self._core.reconnect.is_active:
            return
        for probe in self._liveness.next_probes(self._core.plain):
            reply = subjects.gone(self._mailbox.actor, probe.name)
            self._mailbox.bus.publish(probe.subject, b"", reply=reply, headers=PROBE_HEADERS)

    def on_broker(self, online: bool) -> None:
        """The connection was cut, or is back."""
        if online:
            self._core.reconnect.on_broker_back(self._core.streams)
        else:
            self._core.on_broker_lost()
        self._run([])  # updates the idle event
        if online and not self._reconnecting:
            self._reconnecting = True
            asyncio.get_running_loop().call_later(CONNECT_POLL_S, self._mailbox.guarded(self._reconnect))

    def _reconnect(self) -> None:
        self._run(self._core.advance_reconnect())
        self._reconnecting = self._core.reconnect.is_active
        if self._reconnecting:
            asyncio.get_running_loop().call_later(CONNECT_POLL_S, self._mailbox.guarded(self._reconnect))

    def _on_gone(self, delivery: Delivery) -> None:
        name = delivery.subject.rpartition(".")[2]
        if not delivery.has_no_responders:
            return
        if name.isdecimal():
            self._run(self._core.on_client_gone(int(name)))
        elif (number := self._liveness.no_responder(name)) is not None and not self._core.reconnect.is_active:
            self._run(self._core.on_client_gone(number))

    def _on_cancel(self, delivery: Delivery) -> None:
        if (names := subjects.names_in(delivery.subject)) is not None:
            self._core.failover.on_cancelled(*names)
            self._core.backups.on_cancelled(*names)


@dataclass(slots=True)
class _Client:
    mute: bool = False  # it has no wildcard inbox
    absent: int = 0  # turns in a row
    absent_now: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """An empty message to send; the server's 503 returns under `name`."""

    subject: str
    name: str


class ClientLiveness:
    """Detects that the client of an open plain request has gone.

    A client takes the first message in the inbox of a plain request for its answer, so no probe may go there.
    But client libraries subscribe to one wildcard inbox for all their requests, and drop messages with an
    unknown token: `_INBOX.<id>.*`, with credentials `_INBOX.<user>.<id>.*`, the gateway
    `_INBOX.<tenant>.headrace-gateway.<id>.*`. So a probe goes to a sibling of the inbox:

        turn 1   probe "f": 503 = this client has no wildcard inbox, and gets no more probes
        turn 2…  probe "p": 503 = absent now; ABSENT_TURNS times in a row = gone

    For a client without a wildcard inbox only its request's time limit counts.
    """

    def __init__(self) -> None:
        self._clients: dict[int, _Client] = {}  # by request number

    def next_probes(self, plain: Iterable[ResponseText]) -> list[Probe]:
        """The probes to send, given the open `plain` requests. Call once a heartbeat."""
        before, self._clients = self._clients, {}
        probes = []
        for request in plain:
            inbox, number = request.opened.inbox, request.number
            head = inbox.rpartition(".")[0]
            if not _WILDCARD.fullmatch(head):
                continue
            known = number in before
            reader = self._clients[number] = before.get(number) or _Client()
            if reader.mute:
                continue
            reader.absent = reader.absent + 1 if reader.absent_now else 0
            reader.absent_now = False
            probes.append(Probe(f"{head}.{SIBLING}", f"{'p' if known else 'f'}{number}"))
        return probes

    def no_responder(self, name: str) -> int | None:
        """Handle the server's 503 to probe `name`. Returns the request number if its client has gone."""
        kind, number = name[:1], name[1:]
        reader = self._clients.get(int(number)) if number.isdecimal() else None
        if reader is None or reader.mute or kind not in ("f", "p"):
            return None
        if kind == "f":
            reader.mute = True
            return None
        reader.absent_now = True
        return int(number) if reader.absent + 1 >= ABSENT_TURNS else None


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
            record = request_record(request, reply, self._mailbox.source)
            tracer.export(request.trace, parent_span, request_spans(record))


def stamped(ended: Ended, reply: Reply) -> Ended:
    """An Ended with the stamps of its reply."""
    return dataclasses.replace(
        ended, first_wall_us=reply.first_us, built_wall_us=reply.built_us, sent_wall_us=reply.sent_us
    )


def request_record(request: ResponseText, reply: Reply, detokenizer: str) -> RequestRecord:
    """The record for the spans of an ended request."""
    opened = request.opened
    return RequestRecord(
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


def answer(bus: Bus, model: str, vocabulary: Vocabulary, asked: Delivery) -> None:
    """Reply to `headrace.v1.detokenize.…` with the text of the ids in `asked`, or a typed error."""
    if not access.can_answer(bus, asked):
        return
    try:
        bus.publish(asked.reply, to_json(bodies.Text(model=model, text=decode_body(asked.data, vocabulary))))
    except HeadraceError as error:  # the text may be over the server's limit, too
        bus.publish(asked.reply, error_reply(error, "", ""), headers=end_headers(error))


def decode_body(data: bytes, vocabulary: Vocabulary) -> str:
    """The text of a detokenize request, `{"tokens": [ids]}`. Raises BadRequest, PayloadTooLarge."""
    if len(data) > MAX_QUESTION_BYTES:
        raise PayloadTooLarge(
            f"a question of {len(data)} bytes is over {MAX_QUESTION_BYTES}: ask in smaller parts",
            param="tokens",
        )
    try:
        tokens = bodies.decode(bodies.TokensAsked, data)["tokens"]
    except WireError:
        raise BadRequest('send {"tokens": [1, 2, 3]}', param="tokens") from None
    if any(token >= vocabulary.size for token in tokens):
        raise BadRequest(
            f"`tokens`: a list of ids from 0 to {vocabulary.size - 1} is expected", param="tokens"
        )
    return vocabulary.decode(tokens)


def build(settings: Settings) -> DetokenizerActor:
    """The detokenizer for the configuration. Raises SetupError."""
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    vocabulary.decode([])  # builds the table now rather than at the first request
    name, *aliases = served_names(settings)
    return DetokenizerActor(vocabulary, name, settings.backlog_limit_bytes, aliases)
