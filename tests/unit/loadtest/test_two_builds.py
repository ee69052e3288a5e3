"""Two builds in turn: the ratio of each round, and the interval of their median."""

from __future__ import annotations

from loadtest.two_builds import summary


def test_a_ratio_compares_the_builds_of_one_round() -> None:
    found = summary([100.0, 50.0, 200.0], [50.0, 50.0, 400.0])
    assert found["ratios"] == [2.0, 1.0, 0.5]
    assert found["ratio"] == 1.0
    assert found["rounds_90"] == [0.5, 2.0]


def test_the_interval_of_the_median_is_narrower_than_that_of_the_rounds() -> None:
    before = [100.0 + (turn * 7) % 20 for turn in range(40)]
    found = summary(before, [100.0] * 40)
    (low, high), (least, most) = found["median_90"], found["rounds_90"]
    assert least < low <= found["ratio"] <= high < most
