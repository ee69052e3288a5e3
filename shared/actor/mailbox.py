"""A `Mailbox` connects one actor with the others: numbered sending, ordered receiving.

The runtime opens it and gives it to the actor in `start`. It encodes and decodes messages, resends what a
receiver misses, and requests what it misses itself. `receive` gets each message once, in order per source; a
message that cannot be decoded is logged, counted and dropped.

`Outbound` and `Inbound` are the two ends of a numbered stream, and pure. A sender numbers its messages to one
mailbox from 1, also across restarts of the receiver. The receiver delivers in order, drops duplicates, keeps
early messages and requests missing ones up to MAX_RESEND_REQUESTS times. If the sender no longer has them,
the stream continues after the gap and the actor is notified. `StreamAt`, sent on a silent stream, reveals a
lost tail.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, ParamSpec, Protocol, TypeVar

from shared import codec
from shared.actor.membership import Peers
from shared.clock import Clock
from shared.codec import Assembler, Envelope
from shared.errors import WireError
from shared.messages import Heartbeat, Message, Resend, StreamAt, StreamReset
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery
from shared.telemetry.export import Tracer

log = logging.getLogger("headrace.mailbox")

P = ParamSpec("P")
T = TypeVar("T")
Receive = Callable[[str, Message, str], None]  # source, message, trace
OnSource = Callable[[str], None]  # source

HISTORY = 512  # messages kept for Resend: two seconds of a 4 ms step
RESEND_RETRY_US = 200_000
MAX_RESEND_REQUESTS = 8  # with one message in ten lost, one gap in a million stays open
ANNOUNCEMENTS = 2  # of a silent stream's last number, since an announcement may be lost as well
SUBJECTS = 1024  # kept: peers times kinds of messages
MAX_JUMP = 2**40  # a number so far ahead is garbage

_mailbox = lru_cache(SUBJECTS)(subjects.mailbox)  # of each message that is sent
MAX_EARLY = 4 * HISTORY  # messages kept after a gap; with more, the gap is given up
ANNOUNCE_END_US = 100_000  # a stream without a message for this long announces its last number
# A stream to a living peer announces its last number again: the last message and the announcements may all
# be lost, and an actor that waits for an answer sends nothing that would reveal the loss.
REANNOUNCE_HEARTBEATS = 10
# The state of a vanished peer is dropped after this time. A stopped process that continues earlier finds its
# stream numbers; after a later return its last messages are delivered twice.
RETIRED_US = 600_000_000


class Guard(Protocol):
    """Wraps a function as a handler: an exception in it fails the actor."""

    def __call__(self, handler: Callable[P, None]) -> Callable[P, None]: ...


@dataclass(slots=True)
class _Sender:
    inbound: Inbound[Envelope]
    last_seen_us: int
    assembler: Assembler = field(default_factory=Assembler)


def _unguarded(handler: Callable[P, None]) -> Callable[P, None]:
    return handler


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

    def keep_sent(self, data: bytes, now_us: int) -> None:
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

    def is_unused_since(self, before_us: int) -> bool:
        """True if nothing was sent since `before_us`."""
        return self._sent_us <= before_us

    def must_announce(self, before_us: int) -> bool:
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
        if seq < self._next or seq in self._early or self._is_implausible(seq):
            return StreamUpdate([])
        self._early[seq] = item
        if seq != self._next and len(self._early) > MAX_EARLY:
            return self.skip_to(min(self._early), lost=True)
        delivered = self._ready()
        return StreamUpdate(delivered, resend_from=self._resend_request(now_us) if self._early else 0)

    def expect_until(self, last_seq: int, now_us: int) -> int:
        """The first number to request again, given the announced `last_seq`; 0 if none is missing."""
        if not self._is_implausible(last_seq):
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
        if next_seq <= self._next or self._is_implausible(next_seq):
            return StreamUpdate([])
        lost = lost or not self._fresh
        self._next, self._requests = next_seq, 0
        self._early = {seq: item for seq, item in self._early.items() if seq >= next_seq}
        return StreamUpdate(self._ready(), lost=lost)

    def _is_implausible(self, seq: int) -> bool:
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


class Mailbox:
    """One actor's connection to the others. Call all methods on the event loop."""

    def __init__(self, bus: Bus, clock: Clock, fleet: str, source: str, epoch: int) -> None:
        self.bus = bus
        self.clock = clock
        self.fleet = fleet
        self.source = source  # kind.id of this actor
        self.kind, _, self.actor = source.partition(".")
        self.epoch = epoch
        self._born_us = clock.now_us()
        self.peers = Peers()
        self.wire_errors = 0
        self.tracer: Tracer | None = None  # None: this process sends no spans
        self.guarded: Guard = _unguarded  # set by the runtime; for the actor's timers and subscriptions
        self._outbound: dict[str, Outbound] = {}
        self._retired_seq = 0  # highest number of the streams dropped after RETIRED_US
        self._senders: dict[str, _Sender] = {}
        self._receive: Receive = lambda source, message, trace: None
        self._lost: OnSource = lambda source: None
        self._restarted: OnSource = lambda source: None
        self._upkeeps = 0

    @property
    def age_s(self) -> int:
        """Seconds since this actor's start, by the monotonic clock."""
        return (self.clock.now_us() - self._born_us) // 1_000_000

    async def open(self, receive: Receive, stream_lost: OnSource, restarted: OnSource | None = None) -> None:
        """Subscribe the mailbox. `receive` gets every message once and in order per source. `stream_lost`
        is called with the source if its messages are lost for good, `restarted` if the source is a new
        incarnation, before its first message."""
        self._receive, self._lost = receive, stream_lost
        self._restarted = restarted or self._restarted
        await self.bus.subscribe(
            subjects.mailbox_all(self.fleet, self.kind, self.actor), self._on_delivery, queue=""
        )

    def send(self, to: str, message: Message, trace: str = "") -> None:
        """Send `message`, in parts if long, to the actor `kind.id`. Raises PayloadTooLarge, with nothing
        sent, if it cannot be split below the limit."""
        stream = self._stream(to)
        envelope = Envelope(self.source, self.epoch, stream.next_seq, message, trace)
        for data in codec.encode_all(envelope):
            stream.keep_sent(data, self.clock.now_us())
            self._publish(to, type(message).__name__, data)

    def upkeep(self) -> None:
        """Repeat resend requests for open gaps, announce silent streams. Call at least once a heartbeat."""
        now_us = self.clock.now_us()
        for source, state in list(self._senders.items()):
            self._apply(source, state, state.inbound.overdue(now_us))
            if now_us - state.last_seen_us > RETIRED_US and self.peers.get(source) is None:
                del self._senders[source]
        for to, stream in list(self._outbound.items()):
            if stream.is_unused_since(now_us - RETIRED_US) and self.peers.get(to) is None:
                self._retired_seq = max(self._retired_seq, stream.last_seq)
                del self._outbound[to]
            elif stream.must_announce(now_us - ANNOUNCE_END_US):
                self._send_unnumbered(to, StreamAt(last_seq=stream.last_seq))
        self._upkeeps += 1
        if self._upkeeps % REANNOUNCE_HEARTBEATS == 0:
            for peer in filter(self.peers.get, self._outbound):
                self.reannounce(peer)

    def _stream(self, to: str) -> Outbound:
        """The stream to an actor. A new stream starts above all retired numbers: a peer that returns late
        sees the gap."""
        return self._outbound.setdefault(to, Outbound(self._retired_seq))

    def forget(self, to: str) -> None:
        """Drop the messages kept for a peer that has gone. The numbers continue, since a stopped process may
        return and expects them."""
        if (stream := self._outbound.get(to)) is not None:
            stream.clear()

    def reannounce(self, to: str) -> None:
        """The peer is back: announce the last number of its stream again."""
        if (stream := self._outbound.get(to)) is not None:
            stream.reannounce()

    def on_reconnected(self) -> None:
        """The broker connection is back; messages in both directions may be lost, announcements included.
        Announce the last number of every stream again, and request resends from every source."""
        for stream in self._outbound.values():
            stream.reannounce()
        for source, state in self._senders.items():
            self._request_resend(source, state.inbound.resume_at)

    def note_alive(self, source: str, epoch: int) -> bool:
        """Record a sign of life, message or heartbeat; False if it is from a past incarnation. The first one
        of a new incarnation drops the messages kept for the previous incarnation."""
        state = self._senders.get(source)
        if state is not None and epoch < state.inbound.epoch:
            return False
        if state is None or epoch > state.inbound.epoch:
            self._senders[source] = _Sender(Inbound(epoch), self.clock.now_us())
            if state is not None:
                if (stream := self._outbound.get(source)) is not None:
                    stream.restart()
                self._restarted(source)
        self._senders[source].last_seen_us = self.clock.now_us()
        return True

    def epoch_of(self, source: str) -> int:
        """The last seen incarnation of `source`, 0 if none. Inside `receive`: the sender's."""
        state = self._senders.get(source)
        return 0 if state is None else state.inbound.epoch

    # ---- arrivals -------------------------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            envelope = codec.decode(delivery.data)
        except WireError as error:
            self.wire_errors += 1
            log.error("dropped %d bytes on %s: %s", len(delivery.data), delivery.subject, error)
            return
        if not self.note_alive(envelope.source, envelope.epoch):
            return  # an earlier incarnation's message, late
        now_us, state = self.clock.now_us(), self._senders[envelope.source]
        match envelope.message:
            case Resend(first_seq=first_seq):
                self._resend(envelope.source, first_seq)
            case StreamReset(next_seq=next_seq, lost=lost):
                self._apply(envelope.source, state, state.inbound.skip_to(next_seq, lost=lost))
            case StreamAt(last_seq=last_seq):
                self._request_resend(envelope.source, state.inbound.expect_until(last_seq, now_us))
            case _ if envelope.seq == 0:
                self._receive(envelope.source, envelope.message, envelope.trace)
            case _:
                self._apply(envelope.source, state, state.inbound.arrive(envelope.seq, envelope, now_us))

    def _apply(self, source: str, state: _Sender, arrived: StreamUpdate[Envelope]) -> None:
        if arrived.lost:
            log.error("messages from %s are lost", source)
            state.assembler = Assembler()
            self._lost(source)
        for envelope in arrived.deliver:
            try:
                message = state.assembler.add(envelope.message)
            except WireError as error:
                self.wire_errors += 1
                log.error("dropped a message of %s: %s", source, error)
                continue
            if message is not None:
                self._receive(source, message, envelope.trace)
        self._request_resend(source, arrived.resend_from)

    def _request_resend(self, source: str, first_seq: int) -> None:
        if first_seq:
            self._send_unnumbered(source, Resend(first_seq=first_seq))

    def _resend(self, to: str, first_seq: int) -> None:
        stream = self._stream(to)
        batch = stream.since(first_seq)
        if batch.next_seq > first_seq:
            self._send_unnumbered(to, StreamReset(next_seq=batch.next_seq, lost=batch.lost))
        for data in batch.messages:
            self._publish(to, "Resent", data)

    def _send_unnumbered(self, to: str, message: Message | Heartbeat) -> None:
        """Send outside the numbered stream: repair must not need repair."""
        self._publish(to, type(message).__name__, codec.encode(Envelope(self.source, self.epoch, 0, message)))

    def _publish(self, to: str, name: str, data: bytes) -> None:
        kind, _, actor = to.partition(".")
        self.bus.publish(_mailbox(self.fleet, kind, actor, name), data)
