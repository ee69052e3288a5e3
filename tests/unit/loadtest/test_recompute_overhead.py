"""The recompute overhead in the virtual world: what a paused sequence computes twice, with tiers and
without; and what the scheduler has predicted that its return would cost."""

from __future__ import annotations

import statistics
from functools import cache
from unittest import mock

import pytest

from loadtest import recompute_overhead
from loadtest.recompute_overhead import ARMS, Arm, Lengths, Outcome, points
from services.scheduler.state.counters import Counters

SMALL = Lengths(60, prompt=(32, 256), answer=(64, 768))
LATEST, TIERED = ARMS[0], ARMS[-1]


def test_the_points_of_the_protocol() -> None:
    made = points([(100, 60), (60, 100)], slots=100, block_tokens=16)  # 10 blocks each
    assert [(p.pool_pm, p.pool_blocks, p.l1, p.l1_blocks) for p in made] == [
        (380, 380, "holds the victims", 775),
        (380, 380, "a quarter of that", 193),
        (190, 190, "holds the victims", 1012),
        (190, 190, "a quarter of that", 253),
        (95, 95, "holds the victims", 1131),
        (95, 95, "a quarter of that", 282),
    ]
    assert SMALL.draw() == SMALL.draw() != SMALL.draw(1)


@cache
def run_of(arm: Arm, at: int) -> tuple[Outcome, list[float]]:
    """What a run came to, and how far off the predicted time of each return was."""
    errors: list[float] = []

    def add(meter: Counters, took_us: int, predicted_us: int) -> None:
        if predicted_us:
            errors.append(abs(took_us - predicted_us) / predicted_us)

    lengths = SMALL.draw()
    point = points(lengths, recompute_overhead.SLOTS, recompute_overhead.BLOCK_TOKENS)[at]
    with mock.patch.object(Counters, "add_restore" if arm.tiers else "add_recompute", add):
        return recompute_overhead.outcome(lengths, point, arm), errors


@pytest.mark.parametrize("at", [0, 4])
def test_victims_are_computed_once_when_there_is_room_for_their_blocks(at: int) -> None:
    latest, tiered = (run_of(arm, at)[0] for arm in (LATEST, TIERED))
    assert latest.overhead_pct > 3
    assert tiered.overhead_pct <= 1
    assert tiered.device_s < latest.device_s
    assert tiered.makespan_s < latest.makespan_s


@pytest.mark.parametrize("arm", [TIERED, LATEST])
def test_a_return_costs_what_was_predicted(arm: Arm) -> None:
    """From the first one on, without a time to learn in."""
    errors = run_of(arm, 4)[1]
    assert len(errors) > 30
    assert statistics.median(errors) <= 0.1
