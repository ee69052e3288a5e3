"""No request is lost with a tokenizer: each other one of its model keeps a copy until it is done. Pure.

The broker gives a request to one tokenizer of the queue group, its owner, and a copy to every one. An owner
tells the others every TURN_US what it has taken since and what is done: in a scheduler's hands, or refused.

    copy ──taken by──▶ owned ──done──▶ forgotten
      │                  │ its owner has gone, or has said nothing
      └── for SILENT_US ─┴──▶ taken over, and told to the others

A request without an owner may wait unread at one that is busy: while another one says anything it is left
alone for UNOWNED_US. Where that was too short the late owner finds that it was taken over.

Two may so have one request, since a tokenizer that was only stopped goes on with what it owns. The scheduler
takes it once: both name it alike, by its own `request_id` or the one that its owner has drawn and told.
Who finds out that it was stopped keeps what comes then as copies, until it has heard what others have taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.messages import Claims, longs
from shared.nats.interface import Delivery

TURN_US = 250_000
SILENT_US = 1_000_000  # of an owner, until another takes over: far above a turn of a busy machine
UNOWNED_US = 5_000_000  # of all of which one may have it, unread in a burst
STOPPED_US = 1_000_000  # without a turn: this process was stopped, and others may have taken over
DONE_US = 30_000_000  # for so long it is known what is done: longer than a process that hangs is left alone
MAX_COPIES, MAX_COPY_BYTES = 8_192, 64 * 1024 * 1024  # then the oldest go: likely they are done
HASHED_BYTES = 16_384  # of a body
ATTEMPTS = 100  # more than one tokenizer makes: a request that is taken over begins behind them


@dataclass(slots=True)
class PendingRequest:
    """A request as it came, and what is known of it."""

    delivery: Delivery
    key: int
    received_us: int
    received_wall_us: int
    request_id: str = ""  # drawn by its owner, for one that names none
    owner: str = ""  # `tokenizer.id`; empty: nobody has said so yet
    owners: int = 0  # that it has had
    since_us: int = 0  # nobody is late with a word about it before SILENT_US from here

    @property
    def attempt(self) -> int:
        """The first one of who takes it now."""
        return 1 + ATTEMPTS * self.owners


class Claim(NamedTuple):
    """Another tokenizer's word that it has a request."""

    owner: str
    request_id: str
    claimed_us: int


def key_of(delivery: Delivery) -> int:
    """Names a request: its inbox, its size and what its body begins with."""
    head = f"{delivery.subject} {delivery.reply} {len(delivery.data)} ".encode()
    digest = hashlib.blake2b(head + delivery.data[:HASHED_BYTES], digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Standby:
    """What one tokenizer owns, and the copies of what others own."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}  # how many of a key: a client may send the same twice
        self._copies: dict[int, PendingRequest] = {}  # the oldest first
        self._claims: dict[int, Claim] = {}  # of what has not come here yet
        self._done: dict[int, int] = {}  # key -> when; the oldest first
        self._reported_us: dict[str, int] = {}  # by owner, its last word
        self._bytes = 0
        self._taken: dict[int, str] = {}  # not told yet
        self._ended: list[int] = []
        self._turn_us = 0
        self._doubt_until_us = 0

    def __len__(self) -> int:
        """Copies that are kept; 0 when idle."""
        return len(self._copies)

    def copy(self, pending: PendingRequest, now_us: int) -> None:
        """A request of whomever, to be kept in case."""
        key = pending.key
        if key in self._own or key in self._copies or key in self._done:
            return
        pending.since_us = now_us
        if (claim := self._claims.pop(key, None)) is not None:
            pending.owner, pending.request_id, pending.owners = claim.owner, claim.request_id, 1
        self._copies[key] = pending
        self._bytes += len(pending.delivery.data)
        while len(self._copies) > MAX_COPIES or self._bytes > MAX_COPY_BYTES:
            self._drop(next(iter(self._copies)))

    def doubted(self, pending: PendingRequest, now_us: int) -> bool:
        """We are about to work on a request that the broker has given us. True: we were stopped, and somebody
        else may have it by now; from now on it is a copy."""
        self._notice_stop(now_us)
        doubted = now_us < self._doubt_until_us
        if doubted:
            self._own.pop(pending.key, None)
            self._taken.pop(pending.key, None)
            self.copy(pending, now_us)
        return doubted

    def taken_over(self, pending: PendingRequest) -> bool:
        """The broker has given us a request, which has waited here perhaps. Where another one has claimed it
        so late that it has taken it over, it has the id that it has there. True: it is done there, too."""
        claim = self._claims.get(pending.key)
        if claim is None or claim.claimed_us - pending.received_us < SILENT_US:
            return False  # nobody, or its client has sent the same twice
        pending.request_id = claim.request_id
        return pending.key in self._done

    def is_unannounced(self, key: int, request_id: str) -> bool:
        """Whether nobody else knows the id that was drawn here for a request of ours."""
        return self._taken.get(key) == request_id

    def own(self, pending: PendingRequest) -> None:
        """From now on it is ours."""
        self._drop(pending.key)
        self._own[pending.key] = self._own.get(pending.key, 0) + 1
        self._taken[pending.key] = pending.request_id

    def done(self, key: int, now_us: int) -> None:
        """A scheduler has it, or its client has been told why not."""
        count = self._own.pop(key, 0)
        if count > 1:
            self._own[key] = count - 1
        elif count:
            self._note_done(key, now_us)
            self._ended.append(key)

    def on_claims(self, source: str, claims: Claims, now_us: int) -> None:
        """What another tokenizer has taken, and what is done."""
        self._reported_us[source] = now_us
        for key, request_id in zip(claims.taken, claims.ids, strict=True):
            if (pending := self._copies.get(key)) is None:
                if key not in self._own and key not in self._done:
                    self._claims[key] = Claim(source, request_id, now_us)
            elif pending.owner != source:
                pending.owner, pending.request_id = source, request_id
                pending.owners += 1
        for key in claims.done:
            self._drop(key)
            self._note_done(key, now_us)

    def gone(self, source: str) -> None:
        """Nothing more is to be expected of another tokenizer: its requests are anybody's."""
        said_us = self._reported_us.pop(source, 0)
        for pending in self._copies.values():
            if pending.owner == source:
                pending.owner, pending.since_us = "", max(pending.since_us, said_us)
        for key in [key for key, claim in self._claims.items() if claim.owner == source]:
            del self._claims[key]

    def pardon(self, now_us: int) -> None:
        """We could not hear: nobody's silence until now counts."""
        for pending in self._copies.values():
            pending.since_us = now_us

    def report(self, *, busy: bool = False) -> Claims | None:
        """What the others do not know yet; it is told now. An owner, and who is `busy` with what it has not
        read, says at least that it lives."""
        if not (self._own or self._ended or busy):
            return None
        taken, ended, self._taken, self._ended = self._taken, self._ended, {}, []
        return Claims(taken=longs(taken), ids=tuple(taken.values()), done=longs(ended))

    def overdue(self, me: str, ids: Sequence[str], now_us: int) -> list[PendingRequest]:
        """Every TURN_US: the copies that are to be taken over now by `me`, one of the tokenizers `ids`, which
        come one after the other. They are no copies any more."""
        self._notice_stop(now_us)
        self._turn_us = now_us
        while self._done and next(iter(self._done.values())) < now_us - DONE_US:
            key = next(iter(self._done))
            del self._done[key]
            self._claims.pop(key, None)
        newest_us = max(self._reported_us.values(), default=0)
        place = ids.index(me) if me in ids else len(ids)
        late = []
        for key, pending in self._copies.items():
            unowned_us = min(newest_us, pending.since_us + UNOWNED_US - SILENT_US)
            said_us = max(
                pending.since_us, self._reported_us.get(pending.owner, 0) if pending.owner else unowned_us
            )
            rank = (place + key) % max(len(ids), 1)
            if now_us - said_us >= SILENT_US + rank * TURN_US:
                late.append(pending)
        for pending in late:
            self._drop(pending.key)
        return late

    # ---- internals ------------------------------------------------------------------------------

    def _notice_stop(self, now_us: int) -> None:
        if self._turn_us and now_us - self._turn_us > STOPPED_US:
            self._turn_us, self._doubt_until_us = now_us, now_us + SILENT_US
            self.pardon(now_us)

    def _drop(self, key: int) -> None:
        if (pending := self._copies.pop(key, None)) is not None:
            self._bytes -= len(pending.delivery.data)

    def _note_done(self, key: int, now_us: int) -> None:
        self._done.pop(key, None)
        self._done[key] = now_us
