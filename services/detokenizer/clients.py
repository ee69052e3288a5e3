"""What a detokenizer does for clients beside their answers. The actor starts it.

`ClientEvents` passes events to the core: a client has gone, cancels, or may be back. `answer` serves
detokenize requests.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.detokenizer.core import DetokenizerCore
from services.detokenizer.reconnect import CONNECT_POLL_S
from services.detokenizer.response import Command, ResponseText
from shared import bodies
from shared.actor.mailbox import Mailbox
from shared.errors import BadRequest, HeadraceError, PayloadTooLarge, WireError
from shared.nats import access, subjects
from shared.nats.interface import Bus, Delivery
from shared.replies import end_headers, error_reply, to_json
from shared.vocab.vocabulary import Vocabulary

MAX_QUESTION_BYTES = 1_048_576  # answered on the event loop within about 50 ms
ABSENT_TURNS = 3  # as many as the missed heartbeats of a dead service: the client may be reconnecting
SIBLING = "headrace-probe"
# The inboxes of client libraries.
_WILDCARD = re.compile(rf"_INBOX\.([^.]+\.({access.SERVICE_PREFIX}[^.]+\.)?)?[^.]+")
PROBE_HEADERS = {"Headrace-Probe": "1"}


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
