"""Numbered streams between two actors: order, duplicates, gaps and their repair. Pure.

A sender numbers its messages to one mailbox from 1, also across restarts of the receiver. The receiver
delivers in order, drops duplicates, keeps early messages and requests missing ones up to MAX_RESEND_REQUESTS
times. If the sender no longer has them, the stream continues after the gap and the actor is notified. A lost
tail is detected by `StreamAt`, which the sender sends on a silent stream.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

HISTORY = 512  # messages kept for Resend: two seconds of a 4 ms step
RESEND_RETRY_US = 200_000
MAX_RESEND_REQUESTS = 8  # with one message in ten lost, one gap in a million stays open
ANNOUNCEMENTS = 2  # of a silent stream's last number, since an announcement may be lost as well
MAX_JUMP = 2**40  # a number so far ahead is garbage
MAX_EARLY = 4 * HISTORY  # messages kept after a gap; with more, the gap is given up


@dataclass(frozen=True, slots=True)
class ResendBatch:
    """The answer to a Resend: the messages from number `next_seq` on."""

    next_seq: int
    messages: list[bytes]
    lost: bool  # messages before `next_seq` for the receiver's current incarnation are gone


class Outbound:
    """The sending end of one stream. The first number is `after` + 1."""

    def __init__(self, after: int = 0) -> None:
        self.last_seq = after
        self._first = after + 1  # first number for the receiver's current incarnation
        self._sent_us = 0
        self._announcements_left = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=HISTORY)

    @property
    def next_seq(self) -> int:
        """The number of the next message."""
        return self.last_seq + 1

    def keep(self, data: bytes, now_us: int) -> None:
        """Keep the bytes of message `next_seq`, which the caller sends now."""
        self.last_seq += 1
        self._kept.append((self.last_seq, data))
        self._sent_us, self._announcements_left = now_us, ANNOUNCEMENTS

    def since(self, first_seq: int) -> ResendBatch:
        """The kept messages from number `first_seq` on."""
        found = [data for seq, data in self._kept if seq >= first_seq]
        next_seq = max(self.last_seq + 1 - len(found), first_seq)
        return ResendBatch(next_seq, found, lost=next_seq > max(first_seq, self._first))

    def clear(self) -> None:
        """Drop the kept messages; the numbers continue."""
        self._kept.clear()

    def restart(self) -> None:
        """The receiver is a new incarnation: earlier messages were not for it."""
        self._kept.clear()
        self._first = self.last_seq + 1

    def reannounce(self) -> None:
        """Announce the last number again: the receiver may have been cut off."""
        self._announcements_left = ANNOUNCEMENTS if self.last_seq else 0

    def unused_since(self, before_us: int) -> bool:
        """True if nothing was sent since `before_us`."""
        return self._sent_us <= before_us

    def silent_since(self, before_us: int) -> bool:
        """True ANNOUNCEMENTS times on a stream without a message since `before_us`."""
        if not self._announcements_left or self._sent_us > before_us:
            return False
        self._announcements_left -= 1
        return True


@dataclass(frozen=True, slots=True)
class StreamUpdate(Generic[T]):
    """The result of an arrival."""

    deliver: list[T]
    resend_from: int = 0  # first number to request again; 0 = none
    lost: bool = False  # messages are gone for good


class Inbound(Generic[T]):
    """The receiving end of one stream: one incarnation of one sender."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._next = 1
        self._fresh = True  # nothing delivered yet: earlier messages of the stream are no loss
        self._early: dict[int, T] = {}
        self._end = 0  # last number, as announced
        self._requests = 0
        self._requested_us = 0

    @property
    def resume_at(self) -> int:
        """The number of the next message, 0 while this end may still join the stream anywhere."""
        return 0 if self._fresh else self._next

    def arrive(self, seq: int, item: T, now_us: int) -> StreamUpdate[T]:
        """Receive message number `seq`."""
        if seq < self._next or seq in self._early or self._implausible(seq):
            return StreamUpdate([])
        self._early[seq] = item
        if seq != self._next and len(self._early) > MAX_EARLY:
            return self.skip_to(min(self._early), lost=True)
        delivered = self._ready()
        return StreamUpdate(delivered, resend_from=self._resend_request(now_us) if self._early else 0)

    def expect_until(self, last_seq: int, now_us: int) -> int:
        """The first number to request again, given the announced `last_seq`; 0 if none is missing."""
        if not self._implausible(last_seq):
            self._end = max(self._end, last_seq)
        return self._resend_request(now_us) if self._end >= self._next else 0

    def overdue(self, now_us: int) -> StreamUpdate[T]:
        """Repeat the request for an open gap; after MAX_RESEND_REQUESTS give the gap up."""
        if not self._early and self._end < self._next:
            return StreamUpdate([])
        if self._requests and now_us - self._requested_us < RESEND_RETRY_US:
            return StreamUpdate([])
        if self._requests >= MAX_RESEND_REQUESTS:
            return self.skip_to(min(self._early, default=self._end + 1), lost=True)
        return StreamUpdate([], resend_from=self._resend_request(now_us))

    def skip_to(self, next_seq: int, *, lost: bool) -> StreamUpdate[T]:
        """Give up everything before `next_seq`. This is a loss if the caller passes `lost` or this end has
        read the stream before; a new receiver only joins at the sender's position."""
        if next_seq <= self._next or self._implausible(next_seq):
            return StreamUpdate([])
        lost = lost or not self._fresh
        self._next, self._requests = next_seq, 0
        self._early = {seq: item for seq, item in self._early.items() if seq >= next_seq}
        return StreamUpdate(self._ready(), lost=lost)

    def _implausible(self, seq: int) -> bool:
        """True for a number that would block the stream for good; a new receiver may join anywhere."""
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
