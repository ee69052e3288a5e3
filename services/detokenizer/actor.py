"""The detokenizer's shell: the mailbox to the core, its frames to the clients.

Frames are built once per turn of the event loop, so a detokenizer that lags behind its mailbox
merges the steps it finds waiting; while more than `backlog_limit_bytes` wait to leave this process
none are built at all, except the last one of a request.
"""

from __future__ import annotations

import asyncio
import json
import logging

from services.detokenizer.commands import Command, Fault, Publish, Tell
from services.detokenizer.core import DetokenizerCore
from shared import subjects
from shared.actor import Actor, Facts
from shared.bus import Delivery
from shared.config import Settings
from shared.errors import BadRequest, HeadraceError, PayloadTooLarge
from shared.messages import Message
from shared.model_files import resolve, served_name
from shared.peers import Peer
from shared.port import Port
from shared.replies import end_headers, error_reply, to_json
from shared.vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger("headrace.detokenizer")

LOOK_AGAIN_S = 0.02  # how soon a full backlog is looked at again


class DetokenizerActor(Actor):
    """One shard: text, stop strings and reply streams of the sequences opened here."""

    kind = "detokenizer"

    def __init__(self, vocabulary: Vocabulary, model: str, backlog_limit_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._model = model
        self._backlog_limit_bytes = backlog_limit_bytes
        self._core = DetokenizerCore(vocabulary)
        self._flush_due = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, port: Port) -> None:
        self._port = port
        await port.bus.subscribe(subjects.gone_all(port.actor), self._on_gone)
        pattern = subjects.detokenize_any_tenant(self._model)
        await port.bus.subscribe(pattern, self._on_detokenize, queue="detokenize")

    def receive(self, source: str, message: Message, trace: str) -> None:
        self._run(self._core.handle(source, message, trace))
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def on_restart(self, source: str) -> None:
        self._run(self._core.scheduler_lost(source, "the scheduler was restarted"))

    def on_peer_gone(self, peer: Peer) -> None:
        if peer.beat.kind == "scheduler":
            self._run(self._core.scheduler_lost(peer.source, "the scheduler has gone"))

    def on_stream_lost(self, source: str) -> None:
        self._run(self._core.scheduler_lost(source, "a part of the answer was lost between two services"))

    def facts(self) -> Facts:
        return Facts(model=self._model, load=tuple(self._core.load().items()))

    def status(self) -> dict[str, object]:
        return {"model": self._model, **self._core.load()}

    async def drain(self) -> None:
        """Requests end here; what remains at the time limit is opened elsewhere by its scheduler."""
        await self._idle.wait()

    # ---- internals ------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._port.bus.backlog_bytes > self._backlog_limit_bytes:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._flush)
            return
        self._flush_due = False
        self._run(self._core.flush())

    def _run(self, commands: list[Command]) -> None:
        for command in commands:
            if type(command) is Publish:
                self._publish(command)
            elif type(command) is Tell:
                self._port.send(command.scheduler, command.message)
            elif type(command) is Fault:
                log.error("%s", command.detail)
        if self._core.idle:
            self._idle.set()
        else:
            self._idle.clear()

    def _publish(self, frame: Publish) -> None:
        bus = self._port.bus
        reply = subjects.gone(self._port.actor, str(frame.number)) if frame.number else ""
        try:
            bus.publish(frame.inbox, frame.data, reply=reply, headers=frame.headers)
        except PayloadTooLarge as error:
            log.error("an answer is too large: %s", error)
            bus.publish(frame.inbox, error_reply(error, "", ""), headers=end_headers(error))

    def _on_gone(self, delivery: Delivery) -> None:
        number = delivery.subject.rpartition(".")[2]
        if delivery.no_responders and number.isdecimal():
            self._run(self._core.client_gone(int(number)))

    def _on_detokenize(self, delivery: Delivery) -> None:
        headers: dict[str, str] = {}
        try:
            body = to_json({"model": self._model, "text": decode_body(delivery.data, self._vocabulary)})
        except HeadraceError as error:
            body, headers = error_reply(error, "", ""), end_headers(error)
        if delivery.reply:
            self._port.bus.publish(delivery.reply, body, headers=headers)


def decode_body(data: bytes, vocabulary: Vocabulary) -> str:
    """The text that a `detokenize` request asks for: `{"tokens": [ids]}`. Raises BadRequest."""
    try:
        tokens = json.loads(data)["tokens"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadRequest('send {"tokens": [1, 2, 3]}', param="tokens") from None
    valid = isinstance(tokens, list) and all(type(t) is int and 0 <= t < vocabulary.size for t in tokens)
    if not valid:
        raise BadRequest(
            f"`tokens`: a list of ids from 0 to {vocabulary.size - 1} is expected", param="tokens"
        )
    return vocabulary.decode(tokens)


def build(settings: Settings) -> DetokenizerActor:
    """The detokenizer that the configuration asks for. Raises SetupError."""
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    vocabulary.decode([])  # builds the table now rather than at the first request
    name = settings.model_name or served_name(settings.model)
    return DetokenizerActor(vocabulary, name, settings.backlog_limit_bytes)
