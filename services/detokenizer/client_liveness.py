"""`ClientLiveness` detects that the client of a plain request has gone.

A client takes the first message in the inbox of a plain request for its answer, so no probe may go there.
But client libraries subscribe to one wildcard inbox for all their requests, and drop messages with an unknown
token: `_INBOX.<id>.*`, with credentials `_INBOX.<user>.<id>.*`, the gateway
`_INBOX.<tenant>.headrace-gateway.<id>.*`. So a probe goes to a sibling of the inbox:

    turn 1   probe "f": 503 = this client has no wildcard inbox, and gets no more probes
    turn 2…  probe "p": 503 = absent now; ABSENT_TURNS times in a row = gone

For a client without a wildcard inbox only its request's time limit counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from services.detokenizer.response import ResponseText
from shared.nats.access import SERVICE_PREFIX

ABSENT_TURNS = 3  # as many as the missed heartbeats of a dead service: the client may be reconnecting
SIBLING = "headrace-probe"
_WILDCARD = re.compile(rf"_INBOX\.([^.]+\.({SERVICE_PREFIX}[^.]+\.)?)?[^.]+")  # inboxes of client libraries
PROBE_HEADERS = {"Headrace-Probe": "1"}


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
    """The clients of the open plain requests of one shard, by request number."""

    def __init__(self) -> None:
        self._clients: dict[int, _Client] = {}

    def turn(self, plain: Iterable[ResponseText]) -> list[Probe]:
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
