"""When L2 is not asked: failures in a row, canaries, hanging canaries; rates and deadlines."""

from __future__ import annotations

from services.kv_offload.events import Deadlines
from services.kv_offload.state import (
    HANGING_PROBES,
    PATIENCE_US,
    PROBE_US,
    PROMPT_US,
    WINDOW_US,
    Breaker,
    PresenceCache,
    Rate,
)


def opened(now_us: int = 0) -> Breaker:
    breaker = Breaker()
    assert [breaker.on_failed(now_us) for _ in range(3)] == [False, False, True]
    return breaker


def test_three_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.on_failed(0)
        breaker.on_failed(0)
        breaker.on_succeeded()
    assert (breaker.open, breaker.opened, breaker.next_us()) == (False, 0, None)
    for _ in range(3):
        breaker.on_failed(10)
    assert (breaker.open, breaker.opened, breaker.next_us()) == (True, 1, 10 + PROBE_US)
    assert not breaker.on_failed(20), "it is open already"


def test_a_canary_that_works_closes_it() -> None:
    breaker = opened()
    breaker.probing(7, PROBE_US)
    assert not breaker.on_probed(8, ok=True, now_us=PROBE_US), "of another call"
    assert breaker.on_probed(7, ok=True, now_us=PROBE_US + PROMPT_US)
    assert (breaker.open, breaker.next_us()) == (False, None)
    breaker.on_failed(0)
    breaker.on_failed(0)
    assert not breaker.open, "it counts anew"
    assert not breaker.on_probed(7, ok=True, now_us=0)


def test_a_canary_that_fails_is_repeated_once_a_second() -> None:
    breaker = opened()
    starts = []
    now_us = 0
    for call in range(4):
        now_us = max(breaker.next_us() or 0, now_us)
        starts.append(now_us)
        breaker.probing(call, now_us)
        now_us += 300_000
        assert not breaker.on_probed(call, ok=False, now_us=now_us)
    assert starts == [PROBE_US * (i + 1) for i in range(4)]


def test_few_canaries_hang_at_a_time_and_one_that_wakes_up_sends_the_next_at_once() -> None:
    breaker = opened()
    for call in range(HANGING_PROBES):
        assert breaker.next_us() == PROBE_US * (call + 1)
        breaker.probing(call, PROBE_US * (call + 1))
    assert breaker.next_us() == PROBE_US * HANGING_PROBES + PATIENCE_US
    late_us = 20 * PROBE_US
    assert not breaker.on_probed(0, ok=True, now_us=late_us), "it shows that L2 is back, not that it is well"
    assert breaker.next_us() == late_us
    breaker.probing(99, late_us)
    assert breaker.on_probed(99, ok=True, now_us=late_us + 1_000)


def test_a_rate_is_bytes_over_the_time_in_which_anything_ran() -> None:
    rate = Rate()
    rate.on_began(0)
    rate.on_began(WINDOW_US // 2)  # both at once: the time counts once
    rate.on_ended(1_000, WINDOW_US)
    rate.on_ended(1_000, WINDOW_US)
    first = rate.bytes_per_s
    assert first == 1_000 * 1_000_000 // WINDOW_US
    rate.on_began(100 * WINDOW_US)  # idle in between
    rate.on_ended(1_000, 101 * WINDOW_US)
    second = 2_000 * 1_000_000 // WINDOW_US  # what came after the first sample, over its time
    assert rate.bytes_per_s == first + (second - first) // 4


def test_failed_transfers_teach_no_rate_of_their_own() -> None:
    rate = Rate()
    rate.on_began(0)
    rate.on_ended(0, 10 * WINDOW_US)
    assert rate.bytes_per_s == 0
    rate.on_began(10 * WINDOW_US)
    rate.on_ended(1_000_000, 20 * WINDOW_US)
    assert rate.bytes_per_s == 1_000_000 * 1_000_000 // (20 * WINDOW_US), "the time that failed counts"


def test_deadlines_come_in_order_and_can_be_moved_and_dropped() -> None:
    due: Deadlines[str] = Deadlines()
    for what, at_us in (("b", 5), ("a", 5), ("c", 1), ("d", 2)):
        due.set(what, at_us)
    due.set("c", 9)
    due.drop("d")
    due.drop("nothing")
    assert due.next_us() == 5
    assert due.pop(4) is None
    assert [due.pop(5), due.pop(5), due.pop(5)] == ["b", "a", None]
    assert due.pop(9) == "c"
    assert due.next_us() is None


def test_deadlines_that_are_moved_and_dropped_take_bounded_memory() -> None:
    """Leases that are renewed, and calls that end in time: none of their entries comes to the top."""
    due: Deadlines[int] = Deadlines()
    for at in range(10_000):
        due.set(-1, 10**9 + at)
        due.set(-2, 5)
        due.set(at, 10**10 + at)
        if at % 10:
            due.drop(at)
        assert len(due._heap) <= 80 + 2 * len(due._due)
    assert due.pop(10**9) == -2
    assert due.pop(10**10 - 1) == -1
    assert [due.pop(10**11) for _ in range(1_001)] == [*range(0, 10_000, 10), None]


def test_presence_cache_has_the_last_names_that_were_looked_up() -> None:
    known = PresenceCache(most=2)
    names = [("f", bytes([i]) * 32) for i in range(3)]
    known.add(names[0])
    known.add(names[1])
    known.add(names[0])
    known.add(names[2])
    assert [name in known for name in names] == [True, False, True]
    known.forget(names[0])
    known.forget(names[0])
    assert len(known) == 1
    known.clear()
    assert len(known) == 0
