"""After the broker was away: everything a reader may have missed is sent again.

What was on its way when a nats-server died is lost, the last frame of an answer perhaps among it, and
the readers come back one after the other. Until a reader is known to listen it is *unsure*: its text
waits, a new attempt is begun every turn, and once the server no longer says that nobody listens the
whole text follows. An end must be seen to arrive, too: no later frame would show that it did not. A
reader that stays away for TURNS has gone; while the broker is away again, nothing counts.

    unsure ──accepted──▶ probed ──no 503──▶ whole text, last frame ──no 503──▶ sure
       ▲                   │ 503                      │ 503
       └───────────────────┴──────────────────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.detokenizer.open_requests import Publish
from services.detokenizer.response import ResponseText
from shared.replies import end_headers

TURN_S = 0.25  # far above the round trip of a 503
TURNS = 24  # nats-py comes back after 2 s by default, some clients later
MAX_ENDED = 4096  # answers kept for a reader that may have missed the end


@dataclass(slots=True)
class _Client:
    request: ResponseText
    probed: bool = False  # something was sent to see whether anybody listens
    absent: bool = False  # nobody did
    ended: bool = False  # what was sent was the last message: nothing has to follow


class Reconnect:
    """The readers of one shard whose presence is in doubt, and the answers that ended just now."""

    def __init__(self) -> None:
        self._unsure: dict[int, _Client] = {}
        self._ended: deque[ResponseText] = deque(maxlen=MAX_ENDED)
        self._ended_before: deque[ResponseText] = deque(maxlen=MAX_ENDED)
        self._away = False
        self._turns_left = 0

    def __len__(self) -> int:
        return len(self._unsure)

    @property
    def waiting(self) -> bool:
        """True while there is something to send that waits for the broker or for a reader."""
        return bool(self._unsure) or (self._away and bool(self._ended or self._ended_before))

    @property
    def active(self) -> bool:
        """True while readers may still be on their way back."""
        return self._turns_left > 0

    def holds(self, number: int) -> bool:
        """True when nothing may be sent to request `number` now: it will get the whole text."""
        return self._away or number in self._unsure

    def ended(self, request: ResponseText) -> None:
        """A request has got its last message; it is kept for one or two calls of `age`."""
        self._ended.append(request)
        if self.active and not self.holds(request.number):
            self._unsure[request.number] = _Client(request, probed=True, ended=True)

    def age(self) -> None:
        """Called once a heartbeat: what ended before the last heartbeat has long arrived."""
        if not self._away:
            self._ended_before, self._ended = self._ended, deque(maxlen=MAX_ENDED)

    def broker_lost(self) -> None:
        """The connection is cut."""
        self._away = True

    def broker_back(self, streams: Iterable[ResponseText]) -> None:
        """The connection is back; `streams` are the open requests that stream."""
        self._away = False
        self._turns_left = TURNS
        doubted = [reader.request for reader in self._unsure.values()]  # since it was away before
        for request in (*doubted, *self._ended_before, *self._ended, *streams):
            self._unsure[request.number] = _Client(request)

    def forget(self, number: int) -> None:
        """Request `number` is read elsewhere now."""
        self._unsure.pop(number, None)

    def absent(self, number: int, request: ResponseText | None) -> bool:
        """The server says that nobody listens for request `number` (`request`, if it is open). True
        when it may only be late."""
        if not self.active and not self._away:  # away: the news of its return is on the way
            return False
        reader = self._unsure.get(number)
        if reader is None and request is not None and request.opened.stream:
            reader = self._unsure[number] = _Client(request)
        if reader is not None:
            reader.absent = True
        return reader is not None

    def turn(self) -> tuple[list[Publish], list[int]]:
        """Every TURN_S while `active`: what to send, and the numbers of readers that have gone."""
        if self._away:
            return [], []
        self._turns_left = max(self._turns_left - 1, 0)
        frames: list[Publish] = []
        gone: list[int] = []
        for number, reader in list(self._unsure.items()):
            if reader.probed and not reader.absent:
                if reader.ended or not reader.request.ended or not self.active:
                    del self._unsure[number]
                if not reader.ended:
                    frames += _whole(reader.request)
                    reader.ended = True
            elif not self.active:
                del self._unsure[number]
                gone.append(number)
            else:
                reader.probed, reader.absent = True, False
                reader.ended = not reader.request.opened.stream
                frames.append(_probe(reader.request))
        return frames, gone


def _probe(request: ResponseText) -> Publish:
    """The first frame of a new attempt; a plain request gets its one reply."""
    if request.opened.stream:
        return Publish(request.opened.inbox, request.start_over(), request.number)
    return _last(request)


def _whole(request: ResponseText) -> list[Publish]:
    text = request.all_text()
    frames = [Publish(request.opened.inbox, text, request.number)] if text else []
    return [*frames, _last(request)] if request.ended else frames


def _last(request: ResponseText) -> Publish:
    headers = end_headers(request.error, request.trace)
    return Publish(request.opened.inbox, request.last_again(), request.number, headers)
