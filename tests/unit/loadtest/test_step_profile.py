"""The step profile's arithmetic, on steps made by hand."""

from __future__ import annotations

import pytest

from loadtest.step_profile import Observed, kind_of, step_times, summary
from shared.codec import Envelope, encode
from shared.messages import Message, StepPlan, StepResult, ints
from shared.nats.interface import Delivery

STEP_US = 1_000


def plan(step: int, counts: list[int]) -> StepPlan:
    rows = ints(range(len(counts)))
    return StepPlan(
        exec_epoch=1,
        step=step,
        mode="single",
        micro_batch=0,
        slots=rows,
        starts=rows,
        counts=ints(counts),
        from_device=rows,
        sample_rows=rows,
        sample_slots=rows,
    )


def result(step: int) -> StepResult:
    """Step n starts at n ms, waits 100 µs before, works 700 + 50 and is published 40 + n µs after its end."""
    start_us = step * STEP_US
    return StepResult(
        exec_epoch=1,
        step=step,
        ids=ints([1]),
        done=ints([0]),
        start_wall_us=start_us,
        end_wall_us=start_us + 750,
        forward_us=700,
        sample_us=50,
        wait_us=100,
        published_us=40 + step - 1,
    )


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ([1] * 30, "decode, 30-32 rows"),
        ([1] * 29, "decode, fewer rows"),
        ([1] * 31 + [64], "mixed, chunks to 64"),
        ([40, 25], "mixed, chunks over 64"),
    ],
)
def test_a_step_is_filed_by_its_rows(counts: list[int], kind: str) -> None:
    assert kind_of(plan(1, counts)) == kind


def test_times_are_those_of_steps_whose_neighbours_were_seen() -> None:
    observed = Observed()
    messages: list[Message] = []
    for step in (1, 2, 3, 5):
        messages += [plan(step, [1] * 32), result(step)]
    for message in messages:
        observed.take(Delivery("", encode(Envelope("x.y", 1, 1, message)), "", {}))
    (only,) = step_times(observed)
    assert (only.period, only.wait, only.forward, only.sample) == (STEP_US, 100, 700, 50)
    assert only.publish == 42  # as the result after it says
    assert only.slots == STEP_US - 750 - 100
    assert only.busy == 700 + 50 + 42
    assert only.share == pytest.approx(100 * 750 / (792 + 150))
    (row,) = summary({"threads": 1}, [only] * 10, 1.25)
    assert (row["steps"], row["count"], row["period_ms"]) == ("decode, 30-32 rows", 10, 1.0)
    assert row["share_of_sums_percent"] == row["share_percent"] == 79.62


def test_a_failed_step_is_no_figure() -> None:
    observed = Observed()
    observed.plans[2] = plan(2, [1])
    observed.results = {1: result(1), 2: StepResult(exec_epoch=1, step=2, ids=ints(), done=ints(), error="x")}
    observed.results[3] = result(3)
    observed.arrived_wall_us[2] = 0
    with pytest.raises(RuntimeError, match="step 2 failed: x"):
        list(step_times(observed))
