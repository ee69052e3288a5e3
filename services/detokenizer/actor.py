"""The detokenizer's shell: the mailbox to the core, its frames to the clients.

Frames are built once per turn of the event loop, so a detokenizer that lags behind its mailbox
merges the steps it finds waiting; while more than `backlog_limit_bytes` wait to leave this process
none are built at all, except the last one of a request.
"""

from __future__ import annotations

import asyncio
import logging

from services.detokenizer import orphans
from services.detokenizer.asking import answer
from services.detokenizer.commands import Command, Fault, Finished, Publish, Tell
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.endings import Endings
from services.detokenizer.readers import Readers
from shared import subjects
from shared.actor import Actor, Facts
from shared.config import Settings
from shared.errors import PayloadTooLarge
from shared.messages import Ended, Message, Rejected, Tokenized, rejection
from shared.model_files import resolve, served_name
from shared.peers import Peer
from shared.port import Port
from shared.readings import Reading, Readings
from shared.replies import end_headers, error_reply
from shared.vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger("headrace.detokenizer")

LOOK_AGAIN_S = 0.02  # how soon a full backlog is looked at again


class DetokenizerActor(Actor):
    """One shard: text, stop strings and reply streams of the sequences opened here."""

    kind = "detokenizer"
    traced = True

    def __init__(self, vocabulary: Vocabulary, model: str, backlog_limit_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._model = model
        self._backlog_limit_bytes = backlog_limit_bytes
        self._core = DetokenizerCore(vocabulary)
        self._flush_due = False
        self._seeking = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, port: Port) -> None:
        self._port = port
        self._endings = Endings(port, lambda: self._run([]))
        self._readers = Readers(port, self._core, self._run)
        await self._readers.listen()
        pattern = subjects.detokenize_any_tenant(self._model)
        await port.bus.subscribe(
            pattern, lambda asked: answer(port.bus, self._model, self._vocabulary, asked), queue="detokenize"
        )

    def receive(self, source: str, message: Message, trace: str) -> None:
        self._run(self._core.handle(source, message, trace, self._port.clock.wall_us()))
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def on_restart(self, source: str) -> None:
        self._orphaned(self._core.orphans.lost(source, "the scheduler was restarted", void=True))

    def on_peer_gone(self, peer: Peer) -> None:
        if peer.beat.kind == "scheduler":
            self._orphaned(self._core.orphans.lost(peer.source, "the scheduler has gone"))

    def on_stream_lost(self, source: str) -> None:
        self._run(self._core.stream_lost(source))

    def on_broker(self, online: bool) -> None:
        self._readers.on_broker(online)

    def upkeep(self) -> None:
        self._readers.upkeep()

    def facts(self) -> Facts:
        return Facts(model=self._model, load=tuple(self._core.load().items()))

    @property
    def readings(self) -> Readings:
        counted = (
            Reading(f"headrace.detokenizer.{name}", value, "1", grows=name in ("frames", "tokens"))
            for name, value in self._core.load().items()
        )
        return (*counted, Reading("headrace.detokenizer.backlog", self._port.bus.backlog_bytes, "By"))

    def status(self) -> dict[str, object]:
        return {"model": self._model, **self._core.load()}

    async def drain(self) -> None:
        """Requests end here; what remains at the time limit is opened elsewhere by its scheduler."""
        await self._idle.wait()

    # ---- internals ------------------------------------------------------------------------------

    def _orphaned(self, commands: list[Command]) -> None:
        self._run(commands)
        if not self._seeking:
            self._seek()

    def _seek(self) -> None:
        """Find a scheduler for the requests that have none."""
        self._seeking = False
        ready = self._port.peers.ready("scheduler", self._model)
        self._run(self._core.orphans.turn(ready, self._port.clock.wall_us()))
        if self._core.orphans.active:
            self._seeking = True
            asyncio.get_running_loop().call_later(orphans.TURN_S, self._seek)

    def _flush(self) -> None:
        if self._port.bus.backlog_bytes > self._backlog_limit_bytes:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._flush)
            return
        self._flush_due = False
        self._run(self._core.flush(self._port.clock.wall_us()))

    def _run(self, commands: list[Command]) -> None:
        finished: Finished | None = None
        for command in commands:
            if type(command) is Publish:
                publish(self._port, command)
            elif type(command) is Tell:
                if finished is not None and isinstance(command.message, Ended):
                    self._endings.add(finished, command)
                    finished = None
                elif (refusal := tell(self._port, command)) is not None:
                    self._run(self._core.orphans.answered(command.scheduler, refusal))
            elif type(command) is Fault:
                log.error("%s", command.detail)
            elif type(command) is Finished:
                if finished is not None:
                    self._endings.add(finished, None)
                finished = command
        if finished is not None:
            self._endings.add(finished, None)
        if self._core.idle and not self._endings.waiting:
            self._idle.set()
        else:
            self._idle.clear()


def publish(port: Port, frame: Publish) -> None:
    """Send a frame; the server tells `gone` when nobody listens."""
    reply = subjects.gone(port.actor, str(frame.number))
    try:
        port.bus.publish(frame.inbox, frame.data, reply=reply, headers=frame.headers)
    except PayloadTooLarge as error:
        log.error("an answer is too large: %s", error)
        port.bus.publish(frame.inbox, error_reply(error, "", ""), headers=end_headers(error))


def tell(port: Port, command: Tell) -> Rejected | None:
    """Send to a scheduler; a refusal where no message can carry a request with what it has generated, since
    its options are at the limit."""
    try:
        port.send(command.scheduler, command.message, command.trace)
    except PayloadTooLarge as error:
        asked = command.message
        if not isinstance(asked, Tokenized):
            raise
        return rejection(asked, error.code, error.message)
    return None


def build(settings: Settings) -> DetokenizerActor:
    """The detokenizer that the configuration asks for. Raises SetupError."""
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    vocabulary.decode([])  # builds the table now rather than at the first request
    name = settings.model_name or served_name(settings.model)
    return DetokenizerActor(vocabulary, name, settings.backlog_limit_bytes)
