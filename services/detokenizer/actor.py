"""The detokenizer's shell: the mailbox to the core, its frames to the clients.

Frames are built once per turn of the event loop, so a detokenizer that lags behind its mailbox
merges the steps it finds waiting; while more than `backlog_limit_bytes` wait to leave this process
none are built at all, except the last one of a request.
"""

from __future__ import annotations

import asyncio
import logging

from services.detokenizer.asking import answer
from services.detokenizer.commands import Command, Fault, Finished, Publish, Tell
from services.detokenizer.core import DetokenizerCore
from services.detokenizer.endings import Endings
from services.detokenizer.presence import PROBE_HEADERS, Presence
from services.detokenizer.replay import TURN_S
from shared import subjects
from shared.actor import Actor, Facts
from shared.bus import Delivery
from shared.config import Settings
from shared.errors import PayloadTooLarge
from shared.messages import Ended, Message
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
        self._presence = Presence()
        self._flush_due = False
        self._replaying = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, port: Port) -> None:
        self._port = port
        self._endings = Endings(port, lambda: self._run([]))
        await port.bus.subscribe(subjects.gone_all(port.actor), self._on_gone)
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
        self._run(self._core.scheduler_lost(source, "the scheduler was restarted"))

    def on_peer_gone(self, peer: Peer) -> None:
        if peer.beat.kind == "scheduler":
            self._run(self._core.scheduler_lost(peer.source, "the scheduler has gone"))

    def on_stream_lost(self, source: str) -> None:
        self._run(self._core.stream_lost(source))

    def on_broker(self, online: bool) -> None:
        if online:
            self._core.replay.broker_back(self._core.streams)
        else:
            self._core.replay.broker_lost()
        self._run([])  # idle or not
        if online and not self._replaying:
            self._replaying = True
            asyncio.get_running_loop().call_later(TURN_S, self._replay)

    def upkeep(self) -> None:
        self._core.replay.age()
        if self._core.replay.active:
            return  # readers are on their way back
        for probe in self._presence.turn(self._core.plain):
            reply = subjects.gone(self._port.actor, probe.name)
            self._port.bus.publish(probe.subject, b"", reply=reply, headers=PROBE_HEADERS)

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

    def _replay(self) -> None:
        self._run(self._core.replay_turn())
        self._replaying = self._core.replay.active
        if self._replaying:
            asyncio.get_running_loop().call_later(TURN_S, self._replay)

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
                else:
                    self._port.send(command.scheduler, command.message)
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

    def _on_gone(self, delivery: Delivery) -> None:
        name = delivery.subject.rpartition(".")[2]
        if not delivery.no_responders:
            return
        if name.isdecimal():
            self._run(self._core.client_gone(int(name)))
        elif (number := self._presence.unheard(name)) is not None and not self._core.replay.active:
            self._run(self._core.client_gone(number))


def publish(port: Port, frame: Publish) -> None:
    """Send a frame; the server tells `gone` when nobody listens."""
    reply = subjects.gone(port.actor, str(frame.number))
    try:
        port.bus.publish(frame.inbox, frame.data, reply=reply, headers=frame.headers)
    except PayloadTooLarge as error:
        log.error("an answer is too large: %s", error)
        port.bus.publish(frame.inbox, error_reply(error, "", ""), headers=end_headers(error))


def build(settings: Settings) -> DetokenizerActor:
    """The detokenizer that the configuration asks for. Raises SetupError."""
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    vocabulary.decode([])  # builds the table now rather than at the first request
    name = settings.model_name or served_name(settings.model)
    return DetokenizerActor(vocabulary, name, settings.backlog_limit_bytes)
