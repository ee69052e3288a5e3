"""Does anybody still wait for an answer that is not streamed? Nothing goes to its inbox before the end, and
a client takes the first message there for the answer, so the inbox itself cannot be asked.

Client libraries keep one wildcard inbox for all their requests, `_INBOX.<id>.*` (with credentials
`_INBOX.<user>.<id>.*`, our gateway `_INBOX.<tenant>.headrace-gateway.<id>.*`), and drop what comes for a
token they do not know. So a message to a sibling of the inbox asks the server and not the client:

    turn 1   probe "f": 503 = this client listens to the one subject alone, and is never asked again
    turn 2…  probe "p": 503 = not there now; ABSENT_TURNS times in a row = gone

A client that is never heard this way is governed by its request's time limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from services.detokenizer.response import ResponseText
from shared.nats.access import SERVICE_PREFIX

ABSENT_TURNS = 3  # as many as the missed heartbeats of a dead service: a client may be on its way back
SIBLING = "headrace-probe"
_WILDCARD = re.compile(rf"_INBOX\.([^.]+\.({SERVICE_PREFIX}[^.]+\.)?)?[^.]+")  # inboxes of client libraries
PROBE_HEADERS = {"Headrace-Probe": "1"}


@dataclass(slots=True)
class _Client:
    mute: bool = False  # it does not listen to siblings
    absent: int = 0  # turns in a row
    absent_now: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """An empty message to send; the server's 503 to it comes back under `name`."""

    subject: str
    name: str


class ClientLiveness:
    """The readers of the open plain requests of one shard, by the number of their request."""

    def __init__(self) -> None:
        self._clients: dict[int, _Client] = {}

    def turn(self, plain: Iterable[ResponseText]) -> list[Probe]:
        """Once a heartbeat: whom to ask, of the open requests that do not stream."""
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
        """The server says that nobody listened to probe `name`: the number of a request whose client has
        gone, None for any other."""
        kind, number = name[:1], name[1:]
        reader = self._clients.get(int(number)) if number.isdecimal() else None
        if reader is None or reader.mute or kind not in ("f", "p"):
            return None
        if kind == "f":
            reader.mute = True
            return None
        reader.absent_now = True
        return int(number) if reader.absent + 1 >= ABSENT_TURNS else None
