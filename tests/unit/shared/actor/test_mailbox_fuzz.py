"""A stream whose numbers may be anything: the actor lives, nothing is delivered twice or out of order, and
garbage does not end the stream."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shared.actor.mailbox import (
    HISTORY,
    MAX_EARLY,
    MAX_RESEND_REQUESTS,
    RESEND_RETRY_US,
    Inbound,
    Outbound,
    StreamUpdate,
)

ABSURD = st.integers(2**50, 2**53 - 1)
number = st.integers(-5, 60) | st.integers(-(2**53), 2**53 - 1)
step = st.tuples(st.sampled_from(["arrive", "skip", "lose", "behind", "overdue"]), number)


@given(st.lists(step, max_size=80))
def test_any_numbers_in_any_order(steps: list[tuple[str, int]]) -> None:
    inbound, delivered, now_us = Inbound[int](epoch=1), list[int](), 0
    for what, value in steps:
        now_us += RESEND_RETRY_US // 2
        arrived: StreamUpdate[int] = StreamUpdate([])
        match what:
            case "arrive":
                arrived = inbound.arrive(value, value, now_us)
            case "skip" | "lose":
                arrived = inbound.skip_to(value, lost=what == "lose")
            case "behind":
                assert inbound.expect_until(value, now_us) >= 0
            case "overdue":
                arrived = inbound.overdue(now_us)
        delivered += arrived.deliver
        assert arrived.resend_from >= 0
    assert delivered == sorted(set(delivered))
    assert all(seq > 0 for seq in delivered)


@given(st.sampled_from(["arrive", "skip", "behind"]), ABSURD)
def test_garbage_does_not_end_a_stream(what: str, value: int) -> None:
    inbound: Inbound[str] = Inbound(epoch=1)
    assert inbound.arrive(1, "a", 0).deliver == ["a"]
    handlers: dict[str, Callable[[], object]] = {
        "arrive": lambda: inbound.arrive(value, "x", 0),
        "skip": lambda: inbound.skip_to(value, lost=True),
        "behind": lambda: inbound.expect_until(value, 0),
    }
    handlers[what]()
    for asked in range(MAX_RESEND_REQUESTS + 2):
        assert inbound.overdue((asked + 1) * RESEND_RETRY_US) == StreamUpdate([])
    assert inbound.arrive(2, "b", 0) == StreamUpdate(["b"])


def test_a_hole_that_never_fills_is_given_up_at_the_limit() -> None:
    inbound: Inbound[int] = Inbound(epoch=1)
    inbound.arrive(1, 1, 0)
    for seq in range(3, MAX_EARLY + 3):
        assert not inbound.arrive(seq, seq, 0).deliver
    arrived = inbound.arrive(MAX_EARLY + 3, MAX_EARLY + 3, 0)
    assert arrived.lost
    assert arrived.deliver == list(range(3, MAX_EARLY + 4))


@given(st.integers(0, 40), number)
def test_a_resend_from_any_number(sent: int, first_seq: int) -> None:
    outbound = Outbound()
    for seq in range(1, sent + 1):
        outbound.keep_sent(b"%d" % seq, 0)
    replay = outbound.since(first_seq)
    want = [b"%d" % seq for seq in range(1, sent + 1) if seq >= first_seq]
    assert replay.messages == want
    assert len(replay.messages) <= HISTORY
