"""A declared counter in each of its places: metric, heartbeat, status, the line of a service."""

from __future__ import annotations

import pytest

from shared.telemetry import counters
from shared.telemetry.counters import (
    ExecutorCounter,
    HistogramPoint,
    KvOffloadCounter,
    MetricPoint,
    SchedulerCounter,
)

COUNTED = {ExecutorCounter.STEPS: 7, ExecutorCounter.BUSY: 2_500_000, KvOffloadCounter.LOADED: 3}
EMPTY = {"kind": "gateway", "state": "starting"}


def test_each_place_has_what_is_declared_for_it() -> None:
    assert counters.points(COUNTED) == [
        MetricPoint("headrace.executor.steps", 7, "{step}", is_counter=True),
        MetricPoint("headrace.executor.device.busy", 2.5, "s", is_counter=True),
        MetricPoint("headrace.kv_offload.loaded_keys", 3, "{key}", is_counter=True),
    ]
    assert counters.in_load(COUNTED) == (("steps", 7),)
    assert counters.lately(COUNTED) == {"steps": 7}
    status = counters.in_status(COUNTED)
    assert status == {"steps": 7, "device_busy_us": 2_500_000, "keys": {"asked": {"loaded": 3}}}
    assert [each.of(status) for each in COUNTED] == [7, 2_500_000, 3]
    assert ExecutorCounter.STEPS.loaded(counters.in_load(COUNTED)) == 7


def test_absent_counter_is_read_as_0() -> None:
    assert (KvOffloadCounter.LOADED.of({"keys": {}}), KvOffloadCounter.LOADED.of({})) == (0, 0)
    assert (SchedulerCounter.GENERATED.grown({}), SchedulerCounter.RUNNING.loaded(())) == (0, 0)


def test_a_metric_has_a_value_for_each_attribute() -> None:
    assert SchedulerCounter.BLOCKS.point(4, "e1", "free") == MetricPoint(
        "headrace.scheduler.blocks", 4, "{block}", (("executor", "e1"), ("state", "free"))
    )
    with pytest.raises(ValueError, match="shorter"):
        SchedulerCounter.BLOCKS.point(4, "e1")
    assert SchedulerCounter.QUEUE_TIME.histogram((1_000, 20_000), (3, 0, 1), 65_000) == HistogramPoint(
        "headrace.scheduler.queue.duration", [0.001, 0.02], [3, 0, 1], 0.065, "s"
    )


@pytest.mark.parametrize(
    ("growth", "seconds", "shown"),
    [(1234, 10.0, "123"), (33, 10.0, "3.3"), (0, 10.0, "0"), (5, 0.0, "-"), (99_999, 1.0, "99,999")],
)
def test_a_line_shows_growth_per_second(growth: int, seconds: float, shown: str) -> None:
    facts = {"kind": "executor", "state": "ready", "last_10_s": {"seconds": seconds, "steps": growth}}
    assert counters.cells(facts) == [f"{shown} steps/s"]


@pytest.mark.parametrize(
    "facts", [EMPTY, {**EMPTY, "state": "ready"}, {"kind": "x", "state": "ready", "last_10_s": {}}]
)
def test_a_service_without_facts_has_no_cells(facts: dict[str, object]) -> None:
    assert counters.cells(facts) == []
