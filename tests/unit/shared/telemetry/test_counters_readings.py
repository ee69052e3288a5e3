"""`Recent`: how counts changed within the last ten seconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.telemetry.counters import SAMPLE_US, WINDOW_US, Recent


def test_change_is_empty_before_the_first_sample() -> None:
    recent = Recent()
    recent.sample(1, {})
    assert recent.change(2, {"done": 1}) == {}


def test_a_count_that_is_new_and_one_that_fell() -> None:
    recent = Recent()
    recent.sample(0, {"waiting": 9})
    assert recent.change(2_000_000, {"waiting": 4, "done": 3}) == {"seconds": 2.0, "waiting": -5, "done": 3}


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=60), st.integers(0, 1_000_000))
def test_the_change_is_since_the_last_sample_before_the_window(gaps_us: list[int], later_us: int) -> None:
    """A count of one each microsecond, so that each change is the length of its window."""
    recent, now_us, kept = Recent(), 0, [0]
    recent.sample(0, {"us": 0})
    for gap_us in gaps_us:
        now_us += gap_us
        recent.sample(now_us, {"us": now_us})
        if now_us - kept[-1] >= SAMPLE_US:
            kept.append(now_us)
    since_us = max([us for us in kept if us <= kept[-1] - WINDOW_US], default=0)
    changed = recent.change(now_us + later_us, {"us": now_us + later_us})
    assert changed["us"] == now_us + later_us - since_us
    assert changed["seconds"] == round(changed["us"] / 1e6, 1)
    assert changed["us"] <= WINDOW_US + 3_000_000 + SAMPLE_US + 1_000_000
