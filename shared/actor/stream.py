"""Numbered streams between two actors: order, duplicates, gaps and their repair. Pure.

Each actor numbers what it sends to one mailbox from 1, also across restarts of the receiver. The receiver
applies in order, drops duplicates, keeps what came too early and asks up to MAX_RESEND_REQUESTS times for
what is missing; if the sender no longer has it, the stream goes on behind the hole and the actor above is
told. A lost tail shows by `StreamAt`, which the sender says after a stream has fallen silent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

HISTORY = 512  # messages kept for Resend: two seconds of a 4 ms step
RESEND_RETRY_US = 200_000
MAX_RESEND_REQUESTS = 8  # of a network that loses one message in ten, one hole in a million stays open
ANNOUNCEMENTS = 2  # of a silent stream's end, since an announcement may be lost as well
MAX_JUMP = 2**40  # no stream runs so far ahead of its reader: the number is garbage
MAX_EARLY = 4 * HISTORY  # kept behind a hole; beyond, the hole is given up


@dataclass(frozen=True, slots=True)
class ResendBatch:
    """The answer to a Resend: the messages from number `next_seq` on."""

    next_seq: int
    messages: list[bytes]
    lost: bool  # messages before `next_seq` were meant for the receiver and are gone


class Outbound:
    """The sending end of one stream. Numbers begin behind `after`."""

    def __init__(self, after: int = 0) -> None:
        self.last_seq = after
        self._first = after + 1  # the first number meant for the receiver's present incarnation
        self._sent_us = 0
        self._announcements_left = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=HISTORY)

    @property
    def next_seq(self) -> int:
        """The number of the message about to be sent."""
        return self.last_seq + 1

    def keep(self, data: bytes, now_us: int) -> None:
        """Remember the bytes that carry number `next_seq`; they are sent now."""
        self.last_seq += 1
        self._kept.append((self.last_seq, data))
        self._sent_us, self._announcements_left = now_us, ANNOUNCEMENTS

    def since(self, first_seq: int) -> ResendBatch:
        """What is still kept from number `first_seq` on."""
        found = [data for seq, data in self._kept if seq >= first_seq]
        next_seq = max(self.last_seq + 1 - len(found), first_seq)
        return ResendBatch(next_seq, found, lost=next_seq > max(first_seq, self._first))

    def clear(self) -> None:
        """Forget what was kept; the numbers go on."""
        self._kept.clear()

    def restart(self) -> None:
        """The receiver is a new incarnation: nothing sent so far was meant for it."""
        self._kept.clear()
        self._first = self.last_seq + 1

    def reannounce(self) -> None:
        """Announce the stream's end again: the receiver may have been cut off."""
        self._announcements_left = ANNOUNCEMENTS if self.last_seq else 0

    def unused_since(self, before_us: int) -> bool:
        """True when nothing was sent since `before_us`."""
        return self._sent_us <= before_us

    def silent_since(self, before_us: int) -> bool:
        """True ANNOUNCEMENTS times after the last message, if there was none since `before_us`."""
        if not self._announcements_left or self._sent_us > before_us:
            return False
        self._announcements_left -= 1
        return True


@dataclass(frozen=True, slots=True)
class StreamUpdate(Generic[T]):
    """What an arrival leads to."""

    deliver: list[T]
    resend_from: int = 0  # 0 = nothing to ask
    lost: bool = False  # messages are gone for good


class Inbound(Generic[T]):
    """The receiving end of one stream: one incarnation of one sender."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._next = 1
        self._fresh = True  # nothing delivered yet: what came before us is not a loss
        self._early: dict[int, T] = {}
        self._end = 0  # the stream's last number, as announced
        self._requests = 0
        self._requested_us = 0

    @property
    def resume_at(self) -> int:
        """The number that must come next, 0 while the stream may still be joined anywhere."""
        return 0 if self._fresh else self._next

    def arrive(self, seq: int, item: T, now_us: int) -> StreamUpdate[T]:
        """Take message number `seq`."""
        if seq < self._next or seq in self._early or self._implausible(seq):
            return StreamUpdate([])
        self._early[seq] = item
        if seq != self._next and len(self._early) > MAX_EARLY:
            return self.skip_to(min(self._early), lost=True)
        delivered = self._ready()
        return StreamUpdate(delivered, resend_from=self._resend_request(now_us) if self._early else 0)

    def expect_until(self, last_seq: int, now_us: int) -> int:
        """The number to ask from when the sender's stream has reached `last_seq`, 0 if none."""
        if not self._implausible(last_seq):
            self._end = max(self._end, last_seq)
        return self._resend_request(now_us) if self._end >= self._next else 0

    def overdue(self, now_us: int) -> StreamUpdate[T]:
        """Ask again for a hole that stays open; after MAX_RESEND_REQUESTS give it up."""
        if not self._early and self._end < self._next:
            return StreamUpdate([])
        if self._requests and now_us - self._requested_us < RESEND_RETRY_US:
            return StreamUpdate([])
        if self._requests >= MAX_RESEND_REQUESTS:
            return self.skip_to(min(self._early, default=self._end + 1), lost=True)
        return StreamUpdate([], resend_from=self._resend_request(now_us))

    def skip_to(self, next_seq: int, *, lost: bool) -> StreamUpdate[T]:
        """Give up everything before `next_seq`. It is a loss if it is said to be one, or if this end
        has read the stream before; a newcomer merely joins where the sender stands."""
        if next_seq <= self._next or self._implausible(next_seq):
            return StreamUpdate([])
        lost = lost or not self._fresh
        self._next, self._requests = next_seq, 0
        self._early = {seq: item for seq, item in self._early.items() if seq >= next_seq}
        return StreamUpdate(self._ready(), lost=lost)

    def _implausible(self, seq: int) -> bool:
        """A number that would end the stream for good; a newcomer may join anywhere."""
        return seq - self._next > MAX_JUMP and not self._fresh

    def _ready(self) -> list[T]:
        delivered = []
        while self._next in self._early:
            delivered.append(self._early.pop(self._next))
            self._next += 1
            self._requests, self._fresh = 0, False
        return delivered

    def _resend_request(self, now_us: int) -> int:
        if self._requests >= MAX_RESEND_REQUESTS or (
            self._requests and now_us - self._requested_us < RESEND_RETRY_US
        ):
            return 0
        self._requests, self._requested_us = self._requests + 1, now_us
        return self._next
