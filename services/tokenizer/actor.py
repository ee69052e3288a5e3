"""`TokenizerActor` feeds public requests to the core and runs its commands: to schedulers and clients.

The tokenizers of one model are a queue group: more processes, more throughput. Each one also receives copies
of the requests of the others, and takes them over if these die or hang (standby.py). A second queue group
receives the requests for every model and refuses those for unknown models (queries.py).

    broker ──▶ Arrivals ──▶ owned, claimed to the others ──▶ TenantQueue ──▶ core
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from services.tokenizer import intake, prepare
from services.tokenizer.core import (
    Command,
    Event,
    Fail,
    Loads,
    RequestDone,
    Schedulers,
    Send,
    Tick,
    TokenizerCore,
)
from services.tokenizer.loading import load_model
from services.tokenizer.queries import Checks, Queries, refuse
from shared.actor import membership
from shared.actor.mailbox import Mailbox
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.aliases import ADAPTED, HEADER, STAMP, AdapterFiles, Aliases
from shared.answer_formats.formats import OFF
from shared.api import run_of
from shared.config import Settings, WatchedFile
from shared.errors import Overloaded, PayloadTooLarge, rejection
from shared.messages import Accepted, Cancel, Claims, Message, Rejected, Tokenized
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery, Subscription
from shared.processes import Rarely
from shared.telemetry import traces
from shared.telemetry.counters import Counted, Metrics, TokenizerCounter, in_status, lately, points

log = logging.getLogger("headrace.tokenizer")

PARTS = {  # requests to aliases; adapters; copies of the requests of others, for a takeover
    "aliases": "services.tokenizer.aliases:AliasNames",
    "adapters": "services.tokenizer.adapters:AdapterNames",
    "standby": "services.tokenizer.standby:StandbyShell",
}
TICK_S = 0.1
LONG_BYTES = 16_384  # 10 to 50 ms of work: longer requests are prepared on a thread
# Each request arrives up to three times: at its owner, as a copy, and for the group of any model. The last
# two use a second connection, which yields sooner: a request after 5,000 others waits for a quarter of all.
SECOND_S, SECOND_TURN_MESSAGES = 10.0, 8


class TokenizerActor(Actor):
    """One tokenizer process of one model."""

    kind = "tokenizer"
    traced = True

    def __init__(
        self,
        model: prepare.ServedModel,
        classes: TenantClasses | None = None,
        give_up_us: int = membership.MIN_DETECTION_US,
        replicas: int = 1,
        *,
        edge: bool = False,
        awaited: Sequence[str] = (),
    ) -> None:
        """`give_up_us`: longer than the detection of a dead scheduler takes. `replicas`: servers of a cluster
        that have each alias. `edge`: see `Queries`; `awaited`: its `listen`."""
        model = dataclasses.replace(model, adapter_of=self._adapter_of)
        self._model, self._replicas, self._awaited = model, replicas, awaited
        self._name = model.name
        self._vocabulary = membership.vocabulary_number(model.vocabulary.digest)
        self._classes = classes or TenantClasses()
        self._core = TokenizerCore(model, give_up_us)
        self._edge = edge
        self._standby: list[Any] = []
        self._aliases: list[Any] = []
        self._adapters: list[Any] = []
        self._started = self._listens = False
        self._subscriptions: list[Subscription] = []
        self._ticking: asyncio.Task[None] | None = None
        self._second: Bus  # for messages that may be read later

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._table = Aliases(mailbox.clock.now_us)
        self._unheard = Rarely(log, mailbox.clock)
        self._background = intake.BackgroundEncoder(
            self._model, self._done, mailbox.clock, self._core.cancels
        )
        self._started = True
        self._handle(schedulers(mailbox.peers, self._name))
        subscribe = mailbox.bus.subscribe
        self._arrivals = intake.Arrivals(self._see, mailbox.clock.now_us)
        self._tenant_queue = intake.TenantQueue(self._prepare_next, self._is_over_share)
        self._second = await mailbox.bus.another("copies", SECOND_S, SECOND_TURN_MESSAGES)
        self._second.on_fault(
            lambda fault: log.warning("the connection for copies: %s: %s", fault.kind, fault.detail)
        )
        copies, names = self._arrivals.on_copy, self._model.names
        self._aliases = part("aliases", mailbox, self._table, self._second, copies, names)
        for aliases in self._aliases:
            await aliases.start(self._replicas)
        self._queries = Queries(
            mailbox, self._model, self._context, self._second, self._table, self._aliases, edge=self._edge
        )
        for aliases in self._aliases if not self._edge else ():
            known = self._queries.roots, self._queries.is_served
            self._adapters = part("adapters", mailbox, self._table, aliases.publish, *known)
        self._standby = part("standby", mailbox, self._name, self._own, self._is_ours, self._arrivals)
        self._checks = Checks(mailbox, self._model, self._classes.classes_of)
        await self._queries.check_names()
        requests = [subjects.generate_any_tenant(name) for name in self._model.names]
        self._subscriptions = [
            await subscribe(subjects.CANCEL_ALL, self._on_cancel),
            *await self._checks.listen(),
            *[await self._second.subscribe(asked, copies) for asked in requests if self._standby],
            *[await subscribe(asked, self._arrivals.on_request, queue="tokenizer") for asked in requests],
            *[
                listening
                for aliases in self._aliases
                for listening in await aliases.listen(
                    self._queries.roots, self._queries.is_served, edge=self._edge
                )
            ],
            *[listening for adapters in self._adapters for listening in await adapters.listen()],
            # Last: a tokenizer that answers these must receive requests.
            *await self._queries.listen(self._awaited),
        ]
        await self._second.flush()
        self._listens = True
        for standby in self._standby:
            standby.start()

    def receive(self, source: str, message: Message, trace: str) -> None:
        if isinstance(message, Accepted | Rejected):
            self._handle(message)
        elif isinstance(message, Claims):
            for standby in self._standby:
                standby.on_claims(source, message)
        else:
            log.error("%s of %s is not for a tokenizer", type(message).__name__, source)

    def on_restart(self, source: str) -> None:
        for standby in self._standby:
            standby.on_gone(source)

    def on_stream_lost(self, source: str) -> None:
        self.on_restart(source)

    def on_peer_gone(self, peer: membership.Peer) -> None:
        self.on_restart(peer.source)
        self._on_peer(peer)

    def on_peer(self, peer: membership.Peer) -> None:
        box = self._mailbox
        membership.check_vocabulary(peer, self._name, self._vocabulary, box.epoch, box.age_s)
        self._on_peer(peer)

    def upkeep(self) -> None:
        self._classes.refresh()
        if self._listens:
            self._table.catch_up(self._queries.newest(STAMP))
            for part in (*self._aliases, *self._standby):
                part.upkeep()
        self._handle(loads(self._mailbox.peers, self._name))
        if self._ticking is not None and self._ticking.done():
            self._ticking.result()  # a failed tick fails the actor, as a failed handler does

    def heartbeat_payload(self) -> HeartbeatPayload:
        load = (
            ("context", self._context()),
            ("model_context", self._model.max_context),
            (intake.STANDS_BY, len(self._standby)),
            (STAMP, self._table.stamp),
            (membership.VOCABULARY, self._vocabulary),
            (membership.TOKENS, membership.vocabulary_number(self._model.vocabulary.tokens_digest)),
            (membership.AGE, self._mailbox.age_s),
        )
        counts = lately(self._counted)
        return HeartbeatPayload(model=self._name, aliases=self._model.aliases, load=load, counts=counts)

    @property
    def metrics(self) -> Metrics:
        return points(self._counted)

    @property
    def _counted(self) -> Counted:
        core = self._core
        return {
            TokenizerCounter.PENDING: self._pending,
            TokenizerCounter.COPIES: sum(map(len, self._standby)),
            TokenizerCounter.TAKEN_OVER: sum(standby.taken_over for standby in self._standby),
            TokenizerCounter.REQUESTS: core.requests,
            TokenizerCounter.FAILED: core.failed,
            TokenizerCounter.UNAVAILABLE: core.unavailable,
            TokenizerCounter.PROMPT_TOKENS: core.prompt_tokens,
        }

    def status(self) -> dict[str, object]:
        return {
            "model": self._name,
            "context": self._context(),
            "sampling": str(self._model.defaults),
            "answer_format": self._model.answer_format.name if self._model.answer_format else OFF,
            "calls": self._model.template.skills(with_tools=True).calls_are,
            "models_here": sorted(self._queries.served()) if self._listens else [],
            "removed": {name: age_s for part in self._aliases for name, age_s in part.removed.items()},
            **in_status(self._counted),
        }

    async def drain(self) -> None:
        for subscription in self._subscriptions:
            await subscription.drain()
        await self._arrivals.drain()
        await self._tenant_queue.drain()
        await self._background.drain()
        for each in (self._queries, *self._aliases, *self._adapters, self._checks):
            await each.drain()
        if self._ticking is not None:  # ends when nothing is pending
            await self._ticking
        for standby in self._standby:
            await standby.drain()

    async def stop(self) -> None:
        for standby in self._standby:
            standby.stop()
        if self._listens:
            await self._second.drain()

    # ---- internals ------------------------------------------------------------------------------

    @property
    def _pending(self) -> int:
        return self._core.pending + self._background.waiting + len(self._tenant_queue) + len(self._arrivals)

    def _context(self) -> int:
        """Tokens of the longest prompt with its answer: the model's context, or less if the KV cache of the
        executors is smaller."""
        model = self._model
        return min(
            self._mailbox.peers.max_load("executor", "context", model.name) or model.max_context,
            model.max_context,
        )

    def _adapter_of(self, name: str, tenant: str) -> AdapterFiles | None:
        """The files of an adapter of this model; None: none has this name. Raises UnknownModel."""
        found = self._table.adapter(name, tenant)
        return found[1] if found is not None and found[0] == self._name else None

    def _on_peer(self, peer: membership.Peer) -> None:
        ours = peer.heartbeat.model in ("", self._name)  # "" in a failed actor's heartbeat
        if ours and peer.heartbeat.kind in ("scheduler", "executor") and self._started:
            self._handle(schedulers(self._mailbox.peers, self._name, peer))

    def _handle(self, event: Event) -> None:
        self._run(self._core.handle(event, self._mailbox.clock.now_us()))
        if self._core.pending and self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while self._core.pending:
            await asyncio.sleep(TICK_S)
            now_us = self._mailbox.clock.now_us()
            deaf = self._mailbox.peers.is_cut_off(self._mailbox.source, now_us)
            self._run(self._core.handle(Tick(deaf), now_us))
        self._ticking = None

    def _run(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                message = command.message
                if isinstance(message, Tokenized):
                    message = dataclasses.replace(message, sent_wall_us=self._mailbox.clock.wall_us())
                self._send(command.scheduler, message, command.trace)
                continue
            if not isinstance(command, RequestDone):
                refuse(self._mailbox, self._name, command)
            for standby in self._standby:
                standby.on_done(command.key)

    def _send(self, scheduler: str, message: Tokenized | Cancel, trace: str) -> None:
        try:
            self._mailbox.send(f"scheduler.{scheduler}", message, trace)
        except PayloadTooLarge as error:  # its options do not fit: refuse it, as a scheduler would
            if isinstance(message, Tokenized):
                self._handle(rejection(message, error.code, error.message))

    def _see(self, arrival: intake.Arrival) -> None:
        """Own a request from the queue group, or keep it as a copy."""
        delivery, received_us, copied = arrival
        if not access.can_answer(self._mailbox.bus, delivery):
            if not copied:
                self._unheard.warning(
                    "no answer may go to %.200r, where a request on %.200s wants it",
                    delivery.reply,
                    delivery.subject,
                )
        elif subjects.names_in(delivery.subject) is not None:  # else the group of every model refuses it
            clock = self._mailbox.clock
            received_wall_us = clock.wall_us() - (clock.now_us() - received_us)
            pending = intake.PendingRequest(delivery, intake.key_of(delivery), received_us, received_wall_us)
            if copied:
                pending.unsure = delivery.headers.get(intake.UNSURE, "")
                for standby in self._standby:
                    standby.copy(pending)
            elif not any(standby.is_done_elsewhere(pending) for standby in self._standby):
                self._own(pending)

    def _own(self, pending: intake.PendingRequest) -> None:
        """Put a request of this tokenizer into the tenant queue."""
        delivery = pending.delivery
        pending.request_id = pending.request_id or secrets.token_urlsafe(16)
        for standby in self._standby:
            standby.own(pending)
        try:
            self._tenant_queue.put(pending)
        except Overloaded as error:
            trace = traces.from_headers(delivery.headers)
            self._run([Fail(delivery.reply, pending.request_id, error, trace, key=pending.key)])

    def _is_over_share(self, tenant: str) -> bool:
        return self._core.is_over_share(subjects.untoken(tenant), self._mailbox.clock.now_us())

    def _prepare_next(self, pending: intake.PendingRequest) -> None:
        """Prepare the next request, in the background if it is long."""
        delivery, clock = pending.delivery, self._mailbox.clock
        if any(standby.give_way(pending) for standby in self._standby):
            return
        tracer, given = self._mailbox.tracer, traces.from_headers(delivery.headers)
        trace, parent_span = (given, "") if tracer is None else tracer.begin(given)
        tenant = subjects.name_at(delivery.subject, intake.TENANT)
        submission = prepare.Submission(
            tenant=tenant,
            inbox=delivery.reply,
            body=delivery.data,
            fresh_id=pending.request_id,
            fresh_seed=secrets.randbits(64),
            received_wall_us=pending.received_wall_us,
            trace=trace,
            handled_wall_us=clock.wall_us(),
            parent_span=parent_span,
            received_us=pending.received_us,
            handled_us=clock.now_us(),
            key=pending.key,
            attempt=pending.attempt,
            classes=self._classes.classes_of(tenant),
            grammars=can_follow_grammars(self._mailbox.peers, self._name),
            alias=delivery.headers.get(HEADER, ""),
            adapted=ADAPTED in delivery.headers,
            run=run_of(delivery.headers),
        )
        if len(delivery.data) <= LONG_BYTES:
            self._done(prepare.prepared(submission, self._model, self._core.cancels))
            return
        try:
            self._background.put(submission)
        except Overloaded as error:
            self._handle(submission.prepared(submission.fresh_id, error))

    def _done(self, ready: prepare.Prepared) -> None:
        """Pass a prepared request to the core, once the others have an id drawn here."""
        for standby in self._standby:
            standby.announce(ready.key, ready.request)
        self._handle(ready)

    def _is_ours(self, pending: intake.PendingRequest, ids: Sequence[str]) -> bool:
        """False if another fleet than that of the tokenizers `ids`, or a former model of an alias, may have
        this request."""
        return self._queries.are_all_ours(ids) and (
            not pending.unsure or self._table.is_settled(pending.unsure, pending.received_us)
        )

    def _on_cancel(self, delivery: Delivery) -> None:
        if (names := subjects.names_in(delivery.subject)) is not None:
            self._handle(Cancel(tenant=names[0], request=names[1]))


def part(name: str, *given: object) -> list[Any]:
    """The part of this name, made of what is `given`; none if PARTS lacks its line."""
    return [resolve_name(PARTS[name])(*given)] if name in PARTS else []


def schedulers(peers: membership.Peers, model: str, news: membership.Peer | None = None) -> Schedulers:
    """The event with the current schedulers; `news` is a scheduler or executor that changed or has gone."""
    died = False
    if news is not None:
        gone, state = peers.get(news.source) is None, news.heartbeat.state
        died = state == "failed" or (gone and state != "stopped")
    serving = peers.serving(model)
    idle = [actor for actor in peers.ready("scheduler", model) if actor not in serving]
    return Schedulers(tuple(serving), died, tuple(idle))


def loads(peers: membership.Peers, model: str) -> Loads:
    """The event of a heartbeat."""
    return Loads(peers.executors_of(model), tuple(peers.crowded(model)), peers.is_loading(model))


def can_follow_grammars(peers: membership.Peers, model: str) -> bool:
    """False if no ready executor of a model can follow a grammar. True while none is ready, and if one does
    not report it."""
    executors = [peers.get(f"executor.{actor}") for actor in peers.ready("executor", model)]
    reported = [dict(peer.heartbeat.load).get("grammars", 1) for peer in executors if peer is not None]
    return not reported or any(reported)


def read_classes(text: str) -> dict[str, tuple[str, ...]]:
    """The service classes of each tenant, from a file of `headrace auth` with lines `acme interactive,batch`:
    a tenant as in subjects (`token`), and its classes. Raises ValueError with the line number."""
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        classes = tuple(fields[1].split(",")) if len(fields) == 2 else ()
        if not classes or not set(classes) <= set(access.CLASSES):
            raise ValueError(f"line {number}: `tenant class,...` is expected, of {', '.join(access.CLASSES)}")
        found[subjects.untoken(fields[0])] = classes
    return found


class TenantClasses:
    """The service classes that each tenant may use, from a file that may change. A tenant that is not listed
    may use DEFAULT_CLASSES. With an empty path all tenants may use all classes."""

    def __init__(self, path: str = "") -> None:
        """Raises SetupError if the file is invalid."""
        self._file = WatchedFile("tenant_classes", path, read_classes, log) if path else None

    def classes_of(self, tenant: str) -> tuple[str, ...]:
        """The classes that a tenant may use."""
        return access.CLASSES if self._file is None else self._file.value.get(tenant, access.DEFAULT_CLASSES)

    def refresh(self) -> None:
        """Read the file again if it has changed; an invalid file is logged and ignored."""
        if self._file is not None:
            self._file.refresh()


def build(settings: Settings) -> TokenizerActor:
    """The tokenizer for the configuration. Raises SetupError."""
    give_up_us = membership.detection_us(settings.heartbeat_interval_ms * 1000)
    classes, edge = TenantClasses(settings.tenant_classes), bool(settings.leaf)
    return TokenizerActor(
        load_model(settings), classes, give_up_us, settings.durable_replicas,
        edge=edge, awaited=settings.fleet_models,
    )  # fmt: skip
