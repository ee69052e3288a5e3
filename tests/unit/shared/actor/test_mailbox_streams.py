"""Numbered streams: on any network, each message is delivered once and in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.actor.mailbox import (
    ANNOUNCEMENTS,
    HISTORY,
    MAX_EARLY,
    MAX_RESEND_REQUESTS,
    RESEND_RETRY_US,
    Inbound,
    Outbound,
    StreamUpdate,
)


def filled(last_seq: int) -> Outbound:
    stream = Outbound()
    for seq in range(1, last_seq + 1):
        assert stream.next_seq == seq
        stream.keep_sent(b"%d" % seq, now_us=seq)
    return stream


@dataclass
class Wire:
    """One stream between two ends over a network with the `fates` of messages."""

    fates: list[str]
    outbound: Outbound = field(default_factory=Outbound)
    inbound: Inbound[bytes] = field(default_factory=lambda: Inbound(epoch=1))
    network: list[tuple[int, bytes]] = field(default_factory=list)
    delivered: list[bytes] = field(default_factory=list)
    lost: int = 0
    now_us: int = 0

    def send(self, data: bytes) -> None:
        seq = self.outbound.next_seq
        self.outbound.keep_sent(data, self.now_us)
        self._put(seq, data)

    def _put(self, seq: int, data: bytes) -> None:
        match self.fates.pop(0) if self.fates else "keep":
            case "keep":
                self.network.append((seq, data))
            case "twice":
                self.network += [(seq, data)] * 2
            case "first":
                self.network.insert(0, (seq, data))

    def run(self) -> None:
        """Deliver what is on the way, and all that it leads to."""
        while self.network:
            seq, data = self.network.pop(0)
            self._take(self.inbound.arrive(seq, data, self.now_us))

    def _take(self, arrived: StreamUpdate[bytes]) -> None:
        self.delivered += arrived.deliver
        self.lost += arrived.lost
        if arrived.resend_from:
            self._resend(arrived.resend_from)

    def _resend(self, first_seq: int) -> None:
        if (self.fates.pop(0) if self.fates else "keep") == "lose":
            return
        replay = self.outbound.since(first_seq)
        if replay.next_seq > first_seq:
            self._take(self.inbound.skip_to(replay.next_seq, lost=replay.lost))
        for seq, data in enumerate(replay.messages, replay.next_seq):
            self._put(seq, data)

    def silence(self) -> None:
        """Time passes without a message: announcements and second asks."""
        self.now_us += RESEND_RETRY_US
        self._take(self.inbound.overdue(self.now_us))
        if self.outbound.must_announce(self.now_us):
            ask_from = self.inbound.expect_until(self.outbound.last_seq, self.now_us)
            self._take(StreamUpdate([], resend_from=ask_from))
        self.run()


fate = st.sampled_from(["keep", "lose", "twice", "first"])


@given(st.lists(fate, max_size=60), st.integers(0, 40), st.integers(1, 8))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_once_and_in_order_under_any_drop_duplicate_and_reorder(
    fates: list[str], total: int, burst: int
) -> None:
    wire = Wire(list(fates))
    sent = [b"%d" % i for i in range(total)]
    for i, data in enumerate(sent):
        wire.send(data)
        if i % burst == 0:
            wire.run()
    wire.run()
    wire.fates.clear()  # the network heals
    for _ in range(3 * MAX_RESEND_REQUESTS):
        wire.silence()
        wire.outbound.reannounce()
    assert wire.delivered == sorted(set(wire.delivered), key=int)
    assert (wire.delivered == sent) == (wire.lost == 0), "a loss is reported, and never without need"


@given(st.lists(st.sampled_from(["keep", "twice", "first"]), max_size=60), st.integers(0, 40), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_message_is_lost_when_resends_arrive(fates: list[str], total: int, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, max(total - 1, 0)), max_size=total))
    wire, sent = Wire([]), [b"%d" % i for i in range(total)]
    for i, item in enumerate(sent):
        wire.fates = ["lose"] if i in gone else fates[:1]
        del fates[:1]
        wire.send(item)
        wire.fates = []
        wire.run()
    for _ in range(ANNOUNCEMENTS):
        wire.silence()
    assert wire.delivered == sent
    assert wire.lost == 0


def test_messages_in_order_are_delivered_at_once() -> None:
    inbound: Inbound[str] = Inbound(epoch=1)
    assert inbound.arrive(1, "a", 0) == StreamUpdate(["a"])
    assert inbound.arrive(2, "b", 0) == StreamUpdate(["b"])
    assert inbound.arrive(2, "b", 0) == StreamUpdate([])


def test_gap_is_requested_once_then_again_then_given_up() -> None:
    last_us = 10 + (MAX_RESEND_REQUESTS - 1) * RESEND_RETRY_US
    inbound: Inbound[str] = Inbound(epoch=1)
    inbound.arrive(1, "a", 0)
    assert inbound.arrive(3, "c", 10) == StreamUpdate([], resend_from=2)
    assert inbound.arrive(3, "c", 11) == StreamUpdate([]), "a duplicate of an early message"
    assert inbound.arrive(4, "d", 20) == StreamUpdate([]), "asked already"
    assert inbound.overdue(10 + RESEND_RETRY_US - 1) == StreamUpdate([])
    assert inbound.overdue(10 + RESEND_RETRY_US) == StreamUpdate([], resend_from=2)
    for asks in range(2, MAX_RESEND_REQUESTS):
        assert inbound.overdue(10 + asks * RESEND_RETRY_US) == StreamUpdate([], resend_from=2)
    assert inbound.arrive(5, "e", last_us + 5 * RESEND_RETRY_US) == StreamUpdate([]), (
        "traffic does not ask for ever"
    )
    assert inbound.overdue(last_us + RESEND_RETRY_US) == StreamUpdate(["c", "d", "e"], lost=True)
    assert inbound.arrive(2, "b", 0) == StreamUpdate([]), "too late"
    assert inbound.arrive(7, "g", 10 + 2 * RESEND_RETRY_US) == StreamUpdate([], resend_from=6), (
        "a new hole, new asks"
    )


def test_hole_after_a_filled_hole_is_requested_too() -> None:
    inbound: Inbound[str] = Inbound(epoch=1)
    assert inbound.arrive(2, "b", 0).resend_from == 1
    assert inbound.arrive(4, "d", 0).resend_from == 0
    assert inbound.arrive(1, "a", 1) == StreamUpdate(["a", "b"], resend_from=3)


def test_announced_tail_is_requested_until_it_is_here_or_given_up() -> None:
    inbound: Inbound[str] = Inbound(epoch=1)
    inbound.arrive(1, "a", 0)
    assert inbound.expect_until(1, 5) == 0
    assert inbound.expect_until(3, 5) == 2
    for asks in range(1, MAX_RESEND_REQUESTS):
        assert inbound.overdue(5 + asks * RESEND_RETRY_US) == StreamUpdate([], resend_from=2)
    assert inbound.overdue(5 + MAX_RESEND_REQUESTS * RESEND_RETRY_US) == StreamUpdate([], lost=True)
    assert inbound.overdue(5 + 2 * MAX_RESEND_REQUESTS * RESEND_RETRY_US) == StreamUpdate([])
    assert inbound.arrive(4, "d", 6) == StreamUpdate(["d"])


def test_unrequested_hole_is_requested() -> None:
    inbound: Inbound[str] = Inbound(epoch=1)
    inbound.arrive(1, "a", 0)
    inbound.arrive(3, "c", 0)
    inbound.arrive(6, "f", 0)
    assert inbound.skip_to(3, lost=True) == StreamUpdate(["c"], lost=True)
    assert inbound.overdue(1) == StreamUpdate([], resend_from=4)


def test_hole_is_given_up_after_too_many_early_messages() -> None:
    inbound: Inbound[int] = Inbound(epoch=1)
    for seq in range(2, MAX_EARLY + 2):
        assert inbound.arrive(seq, seq, 0).deliver == []
    assert inbound.arrive(MAX_EARLY + 2, 0, 0) == StreamUpdate([*range(2, MAX_EARLY + 2), 0], lost=True)


def test_a_newcomer_joins_where_the_sender_stands_without_a_loss() -> None:
    stream = filled(7)
    stream.restart()
    stream.keep_sent(b"8", 0)
    inbound: Inbound[bytes] = Inbound(epoch=2)
    assert inbound.arrive(8, b"8", 0).resend_from == 1
    replay = stream.since(1)
    assert (replay.next_seq, replay.messages, replay.lost) == (8, [b"8"], False)
    assert inbound.skip_to(8, lost=False) == StreamUpdate([b"8"])


def test_newcomer_gets_a_report_when_messages_meant_for_it_are_gone() -> None:
    stream = filled(7)
    stream.restart()
    stream.keep_sent(b"8", 0)
    stream.clear()
    replay = stream.since(1)
    assert (replay.next_seq, replay.messages, replay.lost) == (9, [], True)
    inbound: Inbound[bytes] = Inbound(epoch=2)
    assert inbound.skip_to(9, lost=True) == StreamUpdate([], lost=True)


def test_reader_that_has_read_before_loses_messages_at_any_report_of_the_sender() -> None:
    inbound: Inbound[str] = Inbound(epoch=1)
    inbound.arrive(1, "a", 0)
    assert inbound.skip_to(5, lost=False) == StreamUpdate([], lost=True)
    assert inbound.skip_to(5, lost=True) == StreamUpdate([]), "a repeated StreamReset changes nothing"


def test_history_is_bounded_and_reports_what_it_forgot() -> None:
    stream = filled(HISTORY + 10)
    replay = stream.since(1)
    assert (replay.next_seq, len(replay.messages), replay.lost) == (11, HISTORY, True)
    replay = stream.since(20)
    assert (replay.next_seq, replay.messages[0], replay.lost) == (20, b"20", False)
    replay = stream.since(HISTORY + 50)
    assert (replay.messages, replay.lost) == ([], False), "nothing was sent there yet"


def test_a_silent_stream_is_announced_a_few_times() -> None:
    stream = Outbound()
    assert not stream.must_announce(1_000_000)
    stream.reannounce()
    assert not stream.must_announce(1_000_000), "nothing was ever sent"
    stream.keep_sent(b"1", now_us=100)
    assert not stream.must_announce(99)
    assert [stream.must_announce(100) for _ in range(ANNOUNCEMENTS + 1)] == [True] * ANNOUNCEMENTS + [False]
    stream.reannounce()
    assert stream.must_announce(100)
