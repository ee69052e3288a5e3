"""What a copy will take: the line through the copies that have run, and the way of its messages."""

from __future__ import annotations

from services.scheduler.state.transfers import (
    ENOUGH_COPIES,
    LONG_COPY_BYTES,
    LONG_COPY_US,
    STALE_US,
    TransferLink,
)

MIB = 1 << 20


def test_a_copy_costs_something_and_each_byte_more() -> None:
    link = TransferLink()
    for mib, took_us in ((1, 100), (2, 180), (8, 660)):  # 20 us, and 80 for each MiB
        link.observe(mib * MIB, took_us)
    assert (link.copy_us(4 * MIB), link.block_us(MIB), link.wait_us()) == (340, 80, 0)
    link.begin(2 * MIB)
    link.begin(MIB)
    assert link.wait_us() == 2 * 20 + 3 * 80
    link.end(MIB)
    assert link.wait_us() == 20 + 2 * 80


def test_the_way_of_the_messages_is_a_moving_average() -> None:
    link = TransferLink()
    assert link.trip_us == 0
    for trip_us, want in ((800, 800), (1_600, 900), (-50, 787)):  # clocks of one process: never below 0
        link.observe_trip(trip_us)
        assert link.trip_us == want


def test_short_copies_do_not_change_the_rate() -> None:
    link = TransferLink()
    link.observe(4 * MIB, 400, now_us=10)
    assert link.is_fresh(20)
    assert not link.is_known(20)
    link.observe(LONG_COPY_BYTES, 1_000, now_us=20)
    assert link.is_known(30)
    assert not link.is_known(21 + STALE_US)
    slow = TransferLink()
    slow.observe(MIB, LONG_COPY_US, now_us=20)
    assert slow.is_known(30)
    again = TransferLink()
    for now_us in range(ENOUGH_COPIES):
        assert not again.is_known(now_us)
        again.observe(4 * MIB, 400, now_us)
    assert again.is_known(ENOUGH_COPIES)
