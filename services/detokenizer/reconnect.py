"""`Reconnect` sends again what clients may have missed while the broker was away. Pure.

Frames on the way are lost when a nats-server dies, maybe the last one of an answer, and clients reconnect one
after the other. Each client is *unsure* at first: its text waits, and every turn the first frame of a new
attempt is sent. When the server returns no 503 for it (no subscriber), the whole text follows. The last frame
needs the same proof, since no later frame would reveal its loss. A client that is absent for TURNS has gone;
no turn counts while the broker is away again.

    unsure ──accepted──▶ probed ──no 503──▶ whole text, last frame ──no 503──▶ sure
       ▲                   │ 503                      │ 503
       └───────────────────┴──────────────────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.detokenizer.response import Publish, ResponseText
from shared.replies import end_headers

CONNECT_POLL_S = 0.25  # far above the round trip of a 503
TURNS = 24  # nats-py reconnects after 2 s by default, some clients later
MAX_ENDED = 4096  # ended answers kept for clients that may have missed the last frame


@dataclass(slots=True)
class _Client:
    request: ResponseText
    probed: bool = False  # a probe was sent
    absent: bool = False  # the server returned a 503 for it
    ended: bool = False  # the probe was the last message: nothing has to follow


class Reconnect:
    """The unsure clients of one shard, and the answers that ended recently."""

    def __init__(self) -> None:
        self._unsure: dict[int, _Client] = {}
        self._ended: deque[ResponseText] = deque(maxlen=MAX_ENDED)
        self._ended_before: deque[ResponseText] = deque(maxlen=MAX_ENDED)
        self._away = False
        self._turns_left = 0

    def __len__(self) -> int:
        return len(self._unsure)

    @property
    def has_waiting(self) -> bool:
        """True while messages wait for the broker or for a client."""
        return bool(self._unsure) or (self._away and bool(self._ended or self._ended_before))

    @property
    def is_active(self) -> bool:
        """True while clients may still be reconnecting."""
        return self._turns_left > 0

    @property
    def is_away(self) -> bool:
        """True while the connection is cut."""
        return self._away

    def is_held(self, number: int) -> bool:
        """True if nothing may be sent for request `number` now: its client will get the whole text."""
        return self._away or number in self._unsure

    def on_ended(self, request: ResponseText) -> None:
        """The last message of a request was sent; the request is kept for one or two calls of `age`."""
        self._ended.append(request)
        if self.is_active and not self.is_held(request.number):
            self._unsure[request.number] = _Client(request, probed=True, ended=True)

    def age(self) -> None:
        """Drop the answers that ended before the last heartbeat: they have arrived. Call once a heartbeat."""
        if not self._away:
            self._ended_before, self._ended = self._ended, deque(maxlen=MAX_ENDED)

    def on_broker_lost(self) -> None:
        """The connection is cut."""
        self._away = True

    def on_broker_back(self, streams: Iterable[ResponseText]) -> None:
        """The connection is back; `streams` are the open requests that stream."""
        self._away = False
        self._turns_left = TURNS
        doubted = [client.request for client in self._unsure.values()]  # since an earlier outage
        for request in (*doubted, *self._ended_before, *self._ended, *streams):
            self._unsure[request.number] = _Client(request)

    def forget(self, number: int) -> None:
        """Another shard answers request `number` now, or another client reads it."""
        self._unsure.pop(number, None)

    def on_absent(self, number: int, request: ResponseText | None) -> bool:
        """Handle a 503 for request `number` (`request`, if it is open). True if its client may still
        reconnect."""
        if not self.is_active and not self._away:  # away: the event of its return follows
            return False
        client = self._unsure.get(number)
        if client is None and request is not None and request.opened.stream:
            client = self._unsure[number] = _Client(request)
        if client is not None:
            client.absent = True
        return client is not None

    def advance(self) -> tuple[list[Publish], list[int]]:
        """Frames to send, and request numbers of clients that have gone. Each CONNECT_POLL_S while active."""
        if self._away:
            return [], []
        self._turns_left = max(self._turns_left - 1, 0)
        frames: list[Publish] = []
        gone: list[int] = []
        for number, client in list(self._unsure.items()):
            if client.probed and not client.absent:
                if client.ended or not client.request.ended or not self.is_active:
                    del self._unsure[number]
                if not client.ended:
                    frames += _whole(client.request)
                    client.ended = True
            elif not self.is_active:
                del self._unsure[number]
                gone.append(number)
            else:
                client.probed, client.absent = True, False
                client.ended = not client.request.opened.stream
                frames.append(_probe(client.request))
        return frames, gone


def _probe(request: ResponseText) -> Publish:
    """The first frame of a new attempt; a plain request gets its one reply."""
    if request.opened.stream:
        return Publish(request.inbox, request.start_over(), request.number)
    return _last(request)


def _whole(request: ResponseText) -> list[Publish]:
    text = request.all_text()
    frames = [Publish(request.inbox, text, request.number)] if text else []
    return [*frames, _last(request)] if request.ended else frames


def _last(request: ResponseText) -> Publish:
    headers = end_headers(request.error, request.trace)
    return Publish(request.inbox, request.last_again(), request.number, headers)
