"""The tokenizer actor gives public subjects to the core, and the core's commands to schedulers and clients.

Tokenizers of one model are a queue group: more processes, more throughput. A second group hears the requests
for every model and answers those that nobody serves. Requests wait in a `Mailbox` for their turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections import deque
from collections.abc import Callable

from services.tokenizer.background import LONG_BYTES, Beside
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.core import Command, Event, Fail, Schedulers, Send, Tick, TokenizerCore
from services.tokenizer.prepare import ServedModel, Submission, prepared
from services.tokenizer.queries import Asking, refuse
from shared.actor.mailbox import Port
from shared.actor.membership import Peer
from shared.actor.runtime import Actor, Facts
from shared.clock import Clock
from shared.config import Settings
from shared.errors import Overloaded, PayloadTooLarge
from shared.messages import Accepted, Cancel, Message, Rejected, Tokenized, rejection
from shared.nats import subjects
from shared.nats.interface import Delivery, Subscription
from shared.processes import processor_targets
from shared.telemetry import traces
from shared.telemetry.readings import Reading, Readings
from shared.vocab.files import resolve, served_name
from shared.vocab.vocabulary import load_vocabulary

log = logging.getLogger("headrace.tokenizer")

TICK_S = 0.1
RETRY_AFTER_MS = 1_000
MAX_WAITING = 8_192  # requests: as many as the bus keeps unread

Take = Callable[[Delivery, int, int], None]  # with the stamps of its arrival: monotonic, wall


class TokenizerActor(Actor):
    """One tokenizer process of one model."""

    kind = "tokenizer"
    traced = True

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._name = model.name
        self._core = TokenizerCore(model)
        self._started = False
        self._subscriptions: list[Subscription] = []
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, port: Port) -> None:
        self._port = port
        self._beside = Beside(self._model, self._handle, port.clock, self._core.cancels)
        self._started = True
        self._handle(Schedulers(tuple(port.peers.ready("scheduler", self._name))))
        subscribe = port.bus.subscribe
        self._mailbox = Mailbox(port.clock, self._take)
        self._asking = Asking(port, self._model, self._context)
        self._subscriptions = [
            await subscribe(subjects.CANCEL_ALL, self._on_cancel),
            await subscribe(subjects.generate_any_tenant(self._name), self._on_request, queue="tokenizer"),
            *await self._asking.listen(),
        ]

    def receive(self, source: str, message: Message, trace: str) -> None:
        if isinstance(message, Accepted | Rejected):
            self._handle(message)
        else:
            log.error("%s of %s is not for a tokenizer", type(message).__name__, source)

    def on_peer(self, peer: Peer) -> None:
        if peer.beat.kind != "scheduler" or not self._started:
            return
        peers, state = self._port.peers, peer.beat.state
        died = state == "failed" or (peers.get(peer.source) is None and state != "stopped")
        self._handle(Schedulers(tuple(peers.ready("scheduler", self._name)), died))

    on_peer_gone = on_peer  # either way: who is ready now?

    def upkeep(self) -> None:
        if self._ticking is not None and self._ticking.done():
            self._ticking.result()  # a tick that failed fails the actor, as a message would have

    def facts(self) -> Facts:
        known = self._model.max_context
        return Facts(model=self._name, load=(("context", self._context()), ("model_context", known)))

    @property
    def readings(self) -> Readings:
        core = self._core
        return (
            Reading("headrace.tokenizer.pending", self._pending, "{request}"),
            Reading("headrace.tokenizer.requests", core.requests, "{request}", grows=True),
            Reading("headrace.tokenizer.failed", core.failed, "{request}", grows=True),
            Reading("headrace.tokenizer.prompt_tokens", core.prompt_tokens, "{token}", grows=True),
        )

    def status(self) -> dict[str, object]:
        core = self._core
        return {
            "model": self._name,
            "context": self._context(),
            "models_here": sorted(self._asking.served()),
            "pending": self._pending,
            "requests": core.requests,
            "failed": core.failed,
            "prompt_tokens": core.prompt_tokens,
        }

    async def drain(self) -> None:
        for subscription in self._subscriptions:
            await subscription.drain()
        await self._mailbox.drain()
        await self._beside.drain()
        if self._ticking is not None:  # it ends when nothing is pending
            await self._ticking

    # ---- internals ------------------------------------------------------------------------------

    @property
    def _pending(self) -> int:
        return self._core.pending + self._beside.waiting + len(self._mailbox)

    def _context(self) -> int:
        """Tokens of the longest prompt with its answer: what the KV cache of the executors holds may be less
        than the model can do."""
        model = self._model
        return min(
            self._port.peers.most("executor", "context", model.name) or model.max_context, model.max_context
        )

    def _handle(self, event: Event) -> None:
        self._run(self._core.handle(event, self._port.clock.now_us()))
        if self._core.pending and self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while self._core.pending:
            await asyncio.sleep(TICK_S)
            self._run(self._core.handle(Tick(), self._port.clock.now_us()))
        self._ticking = None

    def _run(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                message = command.message
                if isinstance(message, Tokenized):
                    message = dataclasses.replace(message, sent_wall_us=self._port.clock.wall_us())
                self._send(command.scheduler, message, command.trace)
            else:
                refuse(self._port, self._name, command)

    def _send(self, scheduler: str, message: Tokenized | Cancel, trace: str) -> None:
        try:
            self._port.send(f"scheduler.{scheduler}", message, trace)
        except PayloadTooLarge as error:  # no message can carry its options: refused, as a scheduler would
            if isinstance(message, Tokenized):
                self._handle(rejection(message, error.code, error.message))

    def _on_request(self, delivery: Delivery) -> None:
        if not subjects.is_inbox(delivery.reply):
            log.warning("nobody could hear the answer to a request on %.200s", delivery.subject)
            return
        if subjects.names_in(delivery.subject) is None:
            return  # the group that hears every model says why
        try:
            self._mailbox.put(delivery)
        except Overloaded as error:
            trace = traces.from_headers(delivery.headers)
            refuse(self._port, self._name, Fail(delivery.reply, secrets.token_urlsafe(16), error, trace))

    def _take(self, delivery: Delivery, received_us: int, received_wall_us: int) -> None:
        tracer, given = self._port.tracer, traces.from_headers(delivery.headers)
        trace, parent_span = (given, "") if tracer is None else tracer.begin(given)
        submission = Submission(
            tenant=subjects.name_at(delivery.subject, 3),
            inbox=delivery.reply,
            body=delivery.data,
            fresh_id=secrets.token_urlsafe(16),
            fresh_seed=secrets.randbits(64),
            received_wall_us=received_wall_us,
            trace=trace,
            handled_wall_us=self._port.clock.wall_us(),
            parent_span=parent_span,
            received_us=received_us,
            handled_us=self._port.clock.now_us(),
        )
        if len(delivery.data) <= LONG_BYTES:
            self._handle(prepared(submission, self._model, self._core.cancels))
            return
        try:
            self._beside.put(submission)
        except Overloaded as error:
            self._handle(submission.prepared(submission.fresh_id, error))

    def _on_cancel(self, delivery: Delivery) -> None:
        if (names := subjects.names_in(delivery.subject)) is not None:
            self._handle(Cancel(tenant=names[0], request=names[1]))


class Mailbox:
    """The requests that one tokenizer has received and not looked at.

    One is taken in each turn of the event loop: between two of them beats, cancels and answers get through,
    and each request is stamped as it comes, not as it is taken up.
    """

    def __init__(self, clock: Clock, take: Take) -> None:
        self._clock = clock
        self._take = take
        self._waiting: deque[tuple[Delivery, int, int]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, delivery: Delivery) -> None:
        """Queue a request. Raises Overloaded when MAX_WAITING do wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} requests wait for this tokenizer: try again later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        stamps = self._clock.now_us(), self._clock.wall_us()
        if not self._empty.is_set():
            self._waiting.append((delivery, *stamps))
            return
        self._empty.clear()
        asyncio.get_running_loop().call_soon(self._next)
        self._take(delivery, *stamps)

    async def drain(self) -> None:
        """Return when all have had their turn."""
        await self._empty.wait()

    def __len__(self) -> int:
        return len(self._waiting)

    def _next(self) -> None:
        if not self._waiting:
            self._empty.set()
            return
        asyncio.get_running_loop().call_soon(self._next)
        self._take(*self._waiting.popleft())


def load_model(settings: Settings) -> ServedModel:
    """Vocabulary and template of the configured model, ready for the first request.

    Raises SetupError when the model is missing or of an unknown family."""
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    for special in (False, True):  # both forms now: see Vocabulary.encode
        vocabulary.encode("warm up", special=special)
    return ServedModel(
        name=settings.model_name or served_name(settings.model),
        vocabulary=vocabulary,
        template=ChatTemplate(vocabulary),
        max_context=settings.max_context or vocabulary.context_tokens,
        default_timeout_us=int(settings.request_timeout_s * 1e6),
        processors=tuple(processor_targets(settings.logits_processors)),
    )


def build(settings: Settings) -> TokenizerActor:
    """The tokenizer that the configuration asks for. Raises SetupError."""
    return TokenizerActor(load_model(settings))
