"""What is learned of pauses: by tool, by tenant, with priors, within bounds."""

from __future__ import annotations

import pytest

from services.scheduler.sessions.pauses import (
    BUCKETS,
    HALVED_AT,
    MOST_NAMES,
    TOOL_PAUSES,
    TOOL_RETURNS_PM,
    USER,
    USER_PAUSES,
    USER_RETURNS_PM,
    LearnedPauses,
    bucket_of,
)
from services.scheduler.state.policies import PauseView, learned

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("pause_us", "bucket"),
    [(0, 0), (1, 0), (1_000, 0), (1_001, 1), (2_000, 1), (2_001, 2), (4_000, 2), (10**12, BUCKETS - 1)],
)
def test_bucket_of_a_pause_is_a_power_of_two_of_a_millisecond(pause_us: int, bucket: int) -> None:
    assert bucket_of(pause_us) == bucket


def test_priors_are_whole() -> None:
    assert sum(TOOL_PAUSES) == sum(USER_PAUSES) == 1_000
    assert len(TOOL_PAUSES) == len(USER_PAUSES) == BUCKETS
    assert sum(TOOL_PAUSES[: bucket_of(SECOND) + 1]) == 860  # within about a second


def test_unknown_tool_has_the_prior() -> None:
    pauses = LearnedPauses()
    assert pauses.returns_pm("t", "shell") == TOOL_RETURNS_PM
    assert pauses.returns_pm("t", USER) == USER_RETURNS_PM
    assert pauses.quantile_us("t", "shell", 860) == 1_024_000
    assert pauses.names == {}


def test_pauses_of_a_tool_are_its_own_once_there_are_enough() -> None:
    pauses = LearnedPauses()
    for _ in range(8):
        pauses.add("t", "test", 15 * SECOND, was_lost=False)
        pauses.add("t", "read", SECOND // 10, was_lost=False)
    assert pauses.quantile_us("t", "test", 500) == 16_384_000
    assert pauses.quantile_us("t", "read", 500) == 128_000
    assert pauses.slowest("t", ("read", "test", "unknown")) == "test"
    assert pauses.quantile_us("t", "another", 900) == 16_384_000  # the tenant's
    assert pauses.quantile_us("u", "another", 900) == 16_384_000  # of all
    assert pauses.quantile_us("u", USER, 500) == 65_536_000  # what tools do shows nothing of users


def test_share_that_lasts_falls_with_the_time_and_is_never_nothing() -> None:
    pauses = LearnedPauses()
    for _ in range(100):
        pauses.add("t", "read", 3_000, was_lost=False)
    lasts = [pauses.lasts_pm("t", "read", us) for us in (0, 2_500, 3_000, 4_000, 10**9)]
    assert lasts == sorted(lasts, reverse=True)
    assert lasts[0] > 950
    assert 0 < lasts[-1] <= 11


def test_session_that_was_lost_and_returns_is_lost_no_longer() -> None:
    pauses = LearnedPauses()
    for _ in range(20):
        pauses.lose("t", USER)
    low = pauses.returns_pm("t", USER)
    assert low == 50  # the prior counts as four outcomes
    for _ in range(20):
        pauses.add("t", USER, 60 * SECOND, was_lost=True)
    assert pauses.returns_pm("t", USER) == 883
    assert pauses.names["t", USER, False].lost == 0


def test_counts_are_halved_so_that_the_last_samples_weigh_more() -> None:
    pauses = LearnedPauses()
    for _ in range(HALVED_AT - 1):
        pauses.add("t", "read", 1_000, was_lost=False)
    assert pauses.names["t", "read", True].samples == HALVED_AT - 1
    pauses.add("t", "read", 1_000, was_lost=False)
    assert pauses.names["t", "read", True].samples == HALVED_AT // 2


def test_names_are_bounded() -> None:
    pauses = LearnedPauses()
    for number in range(10_000):
        pauses.add("t", f"tool{number}", SECOND, was_lost=False)
        pauses.lose("t", f"tool{number}")
    assert len(pauses.names) == MOST_NAMES
    assert ("t", USER, True) in pauses.names  # used each time
    assert ("t", "tool9999", True) in pauses.names


@pytest.mark.parametrize(
    ("returns_pm", "lasts_pm", "chance_pm"),
    [(1_000, 500, 1_000), (500, 1_000, 500), (500, 500, 333), (950, 50, 487), (0, 1_000, 0), (950, 0, 0)],
)
def test_chance_of_a_return_is_that_of_bayes(returns_pm: int, lasts_pm: int, chance_pm: int) -> None:
    assert learned(PauseView(0, returns_pm, lasts_pm)) == chance_pm
