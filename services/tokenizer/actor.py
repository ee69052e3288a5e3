"""The tokenizer's shell: public subjects to the core, its commands to schedulers and clients.

Tokenizers of one model are a queue group: more processes, more throughput. A second group hears the
requests for every model and answers those that nobody serves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets

from services.tokenizer.asking import Asking, names_in
from services.tokenizer.chat import ChatTemplate
from services.tokenizer.core import Command, Event, Fail, Schedulers, Send, Tick, TokenizerCore
from services.tokenizer.prepare import ServedModel, Submission
from shared import subjects, telemetry
from shared.actor import Actor, Facts
from shared.bus import Delivery, Subscription
from shared.config import Settings
from shared.errors import EngineError
from shared.messages import Accepted, Cancel, Message, Rejected, Tokenized
from shared.model_files import resolve, served_name
from shared.peers import Peer
from shared.port import Port
from shared.replies import end_headers, error_reply
from shared.vocabulary import load_vocabulary

log = logging.getLogger("headrace.tokenizer")

TICK_S = 0.1


class TokenizerActor(Actor):
    """One tokenizer process of one model."""

    kind = "tokenizer"

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._name = model.name
        self._core = TokenizerCore(model)
        self._started = False
        self._subscriptions: list[Subscription] = []
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, port: Port) -> None:
        self._port = port
        self._started = True
        self._handle(Schedulers(tuple(port.peers.ready("scheduler", self._name))))
        subscribe = port.bus.subscribe
        self._asking = Asking(port, self._model)
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
        if peer.beat.kind == "scheduler" and self._started:
            self._handle(Schedulers(tuple(self._port.peers.ready("scheduler", self._name))))

    def on_peer_gone(self, peer: Peer) -> None:
        self.on_peer(peer)

    def facts(self) -> Facts:
        return Facts(model=self._name)

    def status(self) -> dict[str, object]:
        core = self._core
        return {
            "model": self._name,
            "models_here": self._asking.served(),
            "pending": core.pending,
            "requests": core.requests,
            "failed": core.failed,
            "prompt_tokens": core.prompt_tokens,
        }

    async def drain(self) -> None:
        for subscription in self._subscriptions:
            await subscription.cancel()
        if self._ticking is not None:  # it ends when nothing is pending
            await self._ticking

    # ---- internals ------------------------------------------------------------------------------

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
                self._port.send(f"scheduler.{command.scheduler}", message, command.trace)
            else:
                self._fail(command)

    def _fail(self, fail: Fail) -> None:
        headers = end_headers(fail.error, fail.trace)
        self._port.bus.publish(fail.inbox, error_reply(fail.error, fail.request, fail.trace), headers=headers)

    def _on_request(self, delivery: Delivery) -> None:
        if not delivery.reply:
            log.warning(
                "a request on %s has no reply subject: nobody could hear the answer", delivery.subject
            )
            return
        names = names_in(delivery.subject)
        if names is None:
            return
        submission = Submission(
            tenant=names[0],
            inbox=delivery.reply,
            body=delivery.data,
            fresh_id=secrets.token_urlsafe(16),
            fresh_seed=secrets.randbits(64),
            received_wall_us=self._port.clock.wall_us(),
            trace=telemetry.from_headers(delivery.headers),
        )
        try:
            self._handle(submission)
        except Exception as error:  # a bug met by one request is that client's 500, never silence
            log.exception("request %s failed", submission.fresh_id)
            failure = EngineError(f"the tokenizer failed on this request: {type(error).__name__}")
            self._fail(Fail(delivery.reply, submission.fresh_id, failure, submission.trace))

    def _on_cancel(self, delivery: Delivery) -> None:
        if (names := names_in(delivery.subject)) is not None:
            self._handle(Cancel(tenant=names[0], request=names[1]))


def load_model(settings: Settings) -> ServedModel:
    """Vocabulary and template of the configured model, ready for the first request.

    Raises SetupError when the model is missing or of an unknown family."""
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    vocabulary.encode("warm up")
    return ServedModel(
        name=settings.model_name or served_name(settings.model),
        vocabulary=vocabulary,
        template=ChatTemplate(vocabulary),
        max_context=settings.max_context or vocabulary.context_tokens,
        default_timeout_us=int(settings.request_timeout_s * 1e6),
    )


def build(settings: Settings) -> TokenizerActor:
    """The tokenizer that the configuration asks for. Raises SetupError."""
    return TokenizerActor(load_model(settings))
