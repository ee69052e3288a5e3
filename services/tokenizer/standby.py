"""`Standby` keeps copies of the requests of other tokenizers, to take them over if these die or hang. Pure;
`StandbyShell` connects it to the tokenizer.

The broker delivers a request to one tokenizer of the queue group, its owner, and a copy to every tokenizer.
Every TURN_US an owner sends Claims: the requests it has taken, and the done ones (accepted or refused).

    copy ──claimed──▶ owned ──done──▶ forgotten
      │                 │ the owner has gone, or is silent for SILENT_US
      └─ for SILENT_US ─┴──▶ taken over, and claimed

An unclaimed request may wait unread at a busy owner: while any other tokenizer sends claims, it is left alone
for UNOWNED_US. Two tokenizers may own one request, since a stopped process continues. The scheduler accepts
it once: both use the same id, its own `request_id` or the one drawn and claimed by the first owner. A
tokenizer that detects its own stop treats arrivals as copies for SILENT_US, to read the claims of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple

from services.tokenizer.intake import MAX_COPIES, MAX_COPY_BYTES, STANDS_BY, PendingRequest
from shared.actor.mailbox import Mailbox
from shared.messages import Claims, longs

log = logging.getLogger("headrace.tokenizer")

TURN_US = 250_000
SILENT_US = 1_000_000  # silence of an owner before a takeover: far above a turn of a busy machine
UNOWNED_US = 5_000_000  # wait for a claim: the owner may have the request unread in a burst
STOPPED_US = 1_000_000  # between two turns: this process was stopped, and others may have taken over
DONE_US = 30_000_000  # done keys are kept: longer than a hung process lives


class Claim(NamedTuple):
    """Another tokenizer's claim of a request."""

    owner: str
    request_id: str
    claimed_us: int


class Standby:
    """The requests that one tokenizer owns, and copies of those of the others."""

    def __init__(self) -> None:
        self._own: dict[int, int] = {}  # requests by key: a client may send the same one twice
        self._copies: dict[int, PendingRequest] = {}  # the oldest first
        self._claims: dict[int, Claim] = {}  # of requests that have not arrived here yet
        self._done: dict[int, int] = {}  # key -> time; the oldest first
        self._reported_us: dict[str, int] = {}  # last claims, by owner
        self._bytes = 0
        self._taken: dict[int, str] = {}  # not claimed yet
        self._ended: list[int] = []
        self._turn_us = 0
        self._doubt_until_us = 0

    def __len__(self) -> int:
        """Number of copies; 0 when idle."""
        return len(self._copies)

    def copy(self, pending: PendingRequest, now_us: int) -> None:
        """Keep a copy of a request, unless it is owned here or done."""
        key = pending.key
        if (known := self._copies.get(key)) is not None and not pending.unsure:
            known.unsure = ""  # it was forwarded
        if key in self._own or key in self._copies or key in self._done:
            return
        pending.since_us = now_us
        if (claim := self._claims.pop(key, None)) is not None:
            pending.owner, pending.request_id, pending.owners = claim.owner, claim.request_id, 1
        self._copies[key] = pending
        self._bytes += len(pending.delivery.data)
        while len(self._copies) > MAX_COPIES or self._bytes > MAX_COPY_BYTES:
            self._drop(next(iter(self._copies)))

    def give_way(self, pending: PendingRequest, now_us: int) -> bool:
        """Called before work on an owned request. True: this process was stopped, and another tokenizer may
        own the request by now; it becomes a copy."""
        self._notice_stop(now_us)
        doubted = now_us < self._doubt_until_us
        if doubted:
            self._own.pop(pending.key, None)
            self._taken.pop(pending.key, None)
            self.copy(pending, now_us)
        return doubted

    def is_done_elsewhere(self, pending: PendingRequest) -> bool:
        """Called for each request of the queue group; it may have waited here. A claim made SILENT_US after
        its arrival is a takeover, and the request gets the id of that claim. True: it is done."""
        claim = self._claims.get(pending.key)
        if claim is None or claim.claimed_us - pending.received_us < SILENT_US:
            return False  # no takeover: no claim, or the client has sent the same request twice
        pending.request_id = claim.request_id
        return pending.key in self._done

    def is_unannounced(self, key: int, request_id: str) -> bool:
        """True if the id drawn here for an owned request is not claimed to the others yet."""
        return self._taken.get(key) == request_id

    def own(self, pending: PendingRequest) -> None:
        """Own a request: its copy is dropped, the next report claims it."""
        self._drop(pending.key)
        self._own[pending.key] = self._own.get(pending.key, 0) + 1
        self._taken[pending.key] = pending.request_id

    def on_done(self, key: int, now_us: int) -> None:
        """An owned request is accepted by a scheduler, or refused."""
        count = self._own.pop(key, 0)
        if count > 1:
            self._own[key] = count - 1
        elif count:
            self._note_done(key, now_us)
            self._ended.append(key)

    def on_claims(self, source: str, claims: Claims, now_us: int) -> None:
        """Apply the claims of another tokenizer."""
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

    def on_gone(self, source: str) -> None:
        """Another tokenizer has gone: its requests have no owner now."""
        announced_us = self._reported_us.pop(source, 0)
        for pending in self._copies.values():
            if pending.owner == source:
                pending.owner, pending.since_us = "", max(pending.since_us, announced_us)
        for key in [key for key, claim in self._claims.items() if claim.owner == source]:
            del self._claims[key]

    def pardon(self, now_us: int) -> None:
        """This process could not receive: restart the count of all silences."""
        for pending in self._copies.values():
            pending.since_us = now_us

    def report(self, *, busy: bool = False) -> Claims | None:
        """The claims since the last report, for the caller to send. An owner, and a tokenizer that is `busy`
        with unread requests, reports even if nothing is new: this shows that it lives."""
        if not (self._own or self._ended or busy):
            return None
        taken, ended, self._taken, self._ended = self._taken, self._ended, {}, []
        return Claims(taken=longs(taken), ids=tuple(taken.values()), done=longs(ended))

    def overdue(self, me: str, ids: Sequence[str], now_us: int) -> list[PendingRequest]:
        """Remove and return the copies for `me` to take over now. Call every TURN_US. The tokenizers `ids` of
        this model have staggered turns, so that only one takes over."""
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
            announced_us = max(
                pending.since_us, self._reported_us.get(pending.owner, 0) if pending.owner else unowned_us
            )
            rank = (place + key) % max(len(ids), 1)
            if now_us - announced_us >= SILENT_US + rank * TURN_US:
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


class StandbyShell:
    """The copies of one tokenizer, the claims to and from the others, and the takeovers."""

    def __init__(
        self,
        mailbox: Mailbox,
        model: str,
        own: Callable[[PendingRequest], None],
        is_ours: Callable[[PendingRequest, Sequence[str]], bool],
        unread: Sized,
    ) -> None:
        """`own` takes a request over. `is_ours`: whether one without a claim was for the tokenizers with
        these ids. `unread`: requests that have arrived here."""
        self._mailbox, self._model, self._unread = mailbox, model, unread
        self._own, self._is_ours = own, is_ours
        self._core = Standby()
        self._now_us = mailbox.clock.now_us
        self.taken_over = 0
        self._standing: asyncio.Task[None] | None = None
        self.own, self.is_done_elsewhere = self._core.own, self._core.is_done_elsewhere
        self.on_gone = self._core.on_gone

    def start(self) -> None:
        """Look from now on what to take over."""
        self._standing = asyncio.get_running_loop().create_task(self._stand_by())

    def upkeep(self) -> None:
        """A failed turn fails the actor, as a failed handler does."""
        if self._standing is not None and self._standing.done():
            self._standing.result()

    async def drain(self) -> None:
        """Return when the others are done with what is kept here."""
        while len(self._core) and self._others():  # noqa: ASYNC110 - until the others are done
            await asyncio.sleep(TURN_US / 1e6)
        self._send_claims()

    def stop(self) -> None:
        """Take nothing over any more."""
        if self._standing is not None:
            self._standing.cancel()

    def __len__(self) -> int:
        return len(self._core)

    def copy(self, pending: PendingRequest) -> None:
        """Keep a copy of a request of others."""
        self._core.copy(pending, pending.received_us)

    def on_claims(self, source: str, claims: Claims) -> None:
        """The claims of another tokenizer."""
        self._core.on_claims(source, claims, self._now_us())

    def on_done(self, key: int) -> None:
        """A request of this tokenizer is accepted by a scheduler, or refused."""
        self._core.on_done(key, self._now_us())

    def give_way(self, pending: PendingRequest) -> bool:
        """Whether another tokenizer may have taken over this request, before it is prepared."""
        return bool(self._others()) and self._core.give_way(pending, self._now_us())

    def announce(self, key: int, request_id: str) -> None:
        """Claim a request whose id was drawn here, unless that was done: after a takeover the others would
        draw another one."""
        if self._core.is_unannounced(key, request_id):
            self._send_claims()

    def _others(self, *, draining: bool = False) -> list[str]:
        """The ids of the other ready (or `draining`) tokenizers of this model that send Claims."""
        peers, kind = self._mailbox.peers, "tokenizer"
        ids = peers.ready(kind, self._model) + (peers.draining(kind, self._model) if draining else [])
        found = (peers.get(f"{kind}.{actor}") for actor in ids)
        others = (peer for peer in found if peer is not None and peer.source != self._mailbox.source)
        return [peer.heartbeat.actor for peer in others if (STANDS_BY, 1) in peer.heartbeat.load]

    async def _stand_by(self) -> None:
        while True:
            self._share_claims()
            await asyncio.sleep(TURN_US / 1e6)

    def _share_claims(self) -> None:
        """Send claims to the others, and take over their lost requests."""
        self._send_claims()
        now_us, others = self._now_us(), self._others()
        if self._mailbox.peers.is_cut_off(self._mailbox.source, now_us):
            self._core.pardon(now_us)
        ids = sorted([self._mailbox.actor, *others])
        late = self._core.overdue(self._mailbox.actor, ids, now_us)
        for pending in late:
            if pending.owners or self._is_ours(pending, ids):
                log.warning("took over a request of %s", pending.owner or "another tokenizer")
                self.taken_over += 1
                pending.owners = max(pending.owners, 1)
                self._own(pending)
        if late:
            self._send_claims()

    def _send_claims(self) -> None:
        if (claims := self._core.report(busy=bool(len(self._unread)))) is not None:
            for actor in self._others(draining=True):  # a draining one takes over unclaimed requests, too
                self._mailbox.send(f"tokenizer.{actor}", claims)
