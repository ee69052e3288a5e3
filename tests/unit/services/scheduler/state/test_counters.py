"""What the scheduler counts: histograms against a sorted list, gauges against a state made by hand, and the
way to a collector."""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.otlp_receiver import Receiver
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.launcher.commands.status import Fleet, every_fact
from services.scheduler.reports import status
from services.scheduler.state.counters import Counters, Histogram
from services.scheduler.state.policies import Policy
from services.scheduler.state.state import Limits
from shared.telemetry.counters import HistogramPoint, MetricPoint, SchedulerCounter, lately
from shared.telemetry.export import meter_sink_from_env

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@given(st.lists(st.integers(0, 50)), st.integers(1, 1000))
def test_a_histogram_counts_by_upper_bounds(values: list[int], per_mille: int) -> None:
    bounds = (0, 5, 10, 40)
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    assert histogram.counts == [
        sum(low < v <= high for v in values)
        for low, high in zip((-1, *bounds), (*bounds, 1_000), strict=True)
    ]
    assert (histogram.count, histogram.total) == (len(values), sum(values))
    if values:
        exact = sorted(values)[-(-len(values) * per_mille // 1000) - 1]
        at = bisect.bisect_left(bounds, exact)
        assert histogram.quantile(per_mille) == bounds[min(at, len(bounds) - 1)]
    else:
        assert histogram.quantile(per_mille) == 0


def test_counters_sum_steps_ends_and_shares() -> None:
    counters = Counters()
    for mode in ("single", "run_ahead", "single"):
        counters.count_step(mode)
    counters.count_rejected(429)
    counters.count_finished("stop")
    counters.add_step(900, 1_000)
    counters.add_step(5_000, 0)
    assert (counters.mode, counters.steps) == ("single", {"single": 2, "run_ahead": 1})
    assert (counters.rejected, counters.finished) == ({429: 1}, {"stop": 1})
    assert (counters.step_us.count, counters.step_error_pm.count, counters.step_error_pm.total) == (2, 1, 100)
    assert counters.predicted_us == 1_000
    counters.add_ended(9_000, 6_000, 4)
    counters.add_ended(700, 0, 1)
    assert (counters.e2e_us.total, counters.tpot_us.count, counters.tpot_us.total) == (9_700, 1, 2_000)
    counters.inter_token_us.add(30, 3)
    assert (counters.inter_token_us.count, counters.inter_token_us.total) == (3, 90)
    counters.prefill_tokens, counters.recomputed_tokens = 400, 30
    counters.prefix_lookup_tokens, counters.prefix_hit_tokens = 300, 100
    assert (counters.recompute_overhead_pm, counters.prefix_hit_pm) == (75, 333)
    assert (Counters().recompute_overhead_pm, Counters().prefix_hit_pm) == (0, 0)


def busy() -> World:
    """Two slots, blocks of 4: two run, three wait."""
    world = World(Limits())
    world.add_engine(slots=2)
    for i in range(5):
        world.ask(f"r{i}", [10 + i, 2, 3, 4, 5], 6, slo_class="batch" if i > 2 else "standard")
    world.deliver()
    return world


def test_gauges_equal_the_state_of_a_busy_scheduler() -> None:
    world = busy()
    state = world.scheduler.state
    assert status.queued(state) == {"interactive": 0, "standard": 1, "batch": 2}
    (executor,) = state.executors.values()
    held = [len(s.table) for s in executor.running]
    blocks = status.blocks(executor)
    assert blocks["held"] == sum(held)
    assert blocks["free"] + blocks["cached"] + blocks["held"] + blocks["fenced"] == 32
    assert status.used_share(executor) == sum(held) / 32
    assert status.waste_tokens(executor) == sum(4 * len(s.table) - s.computed for s in executor.running)
    world.run()
    world.assert_idle()
    assert (status.waste_tokens(executor), status.queued(state)["batch"]) == (0, 0)


def test_counters_equal_the_tokens_of_a_run() -> None:
    world = busy()
    world.run()
    counters = world.scheduler.state.counters
    assert counters.generated_tokens == 5 * 6
    assert counters.prefill_tokens - counters.recomputed_tokens == 5 * 5 - counters.prefix_hit_tokens
    assert (counters.ttft_us.count, counters.queue_us.count) == (5, 5)
    assert (counters.e2e_us.count, counters.tpot_us.count, counters.inter_token_us.count) == (
        5,
        5,
        5 * (6 - 1),
    )
    assert counters.inter_token_us.total == counters.e2e_us.total - counters.ttft_us.total, (
        "the last token ends a sequence"
    )
    assert counters.finished == {"length": 5}
    assert sum(counters.steps.values()) == len(world.plans)
    readings = status.metric_points(world.scheduler.state)
    found = {(r.name, r.attributes): r.value for r in readings if isinstance(r, MetricPoint)}
    assert found["headrace.scheduler.generated_tokens", ()] == 30
    assert found["headrace.scheduler.running", (("executor", "e1"),)] == 0
    (ttft,) = [r for r in readings if r.name == SchedulerCounter.TTFT.metric]
    assert isinstance(ttft, HistogramPoint)
    assert (sum(ttft.counts), ttft.unit, ttft.bounds[0]) == (5, "s", 0.001)


def test_status_shows_what_was_measured() -> None:
    world = busy()
    world.run()
    state = world.scheduler.state
    answer = {"kind": "scheduler", "id": "s", "state": "ready", **status.status(state)}
    facts = {queue.split()[0]: queue.split()[-1] for queue in every_fact(Fleet("f", "", [answer]), answer)}
    assert (facts["measured.queue.batch"], facts["measured.queue.rejected"]) == ("0", "{}")
    assert (facts["measured.tokens.generated"], facts["executors.e1.kv_used_pct"]) == ("30", "0.0")
    took_us = sorted(step.forward_us + step.sample_us for step in state.step_log.ring)
    middle = took_us[len(took_us) // 2] + took_us[(len(took_us) - 1) // 2]
    assert facts["executors.e1.step_p50_ms"] == str(int(middle / 2) / 1000)
    assert lately(status.counted(state)) | {"prefilled": 0, "prefix_lookups": 0} == {
        "waiting": 0, "refused_429": 0, "refused_503": 0, "prefilled": 0, "generated": 30,
        "prefix_lookups": 0, "prefix_hits": 0, "preemptions": 0,
        "draft_rows": 0, "draft_tokens": 0, "accepted_tokens": 0,
    }  # fmt: skip


def test_blocks_that_move_between_tiers_are_counted() -> None:
    world = World(Limits(policy=Policy(tier="loadtest.policies:swap")))
    world.add_engine(blocks=12, slots=6)
    world.add_tier(FakeTier(capacity=64))
    for number in range(6):
        world.ask(f"r{number}", [number + 3] * 6, 18)
    for _ in range(50):
        world.run()
        if world.scheduler.is_idle:
            break
        world.tick(20_000)
    state = world.scheduler.state
    counters = state.counters
    found = {
        (r.name.removeprefix("headrace.scheduler."), r.attributes): r.value
        for r in status.metric_points(state)
        if isinstance(r, MetricPoint)
    }
    assert found["tiers.loads", ()] == counters.loads > 0
    assert found["tiers.stored_blocks", ()] == counters.stored_blocks > 0
    assert found["tiers.backoffs", ()] == 0
    (executor,) = state.executors.values()
    up = (("executor", "e1"), ("direction", "up"))
    assert found["tiers.moved", up] == executor.up.moved_bytes > 0
    assert found["tiers.rate", up] == executor.up.bytes_per_second
    assert sum(status.blocks(executor).values()) == 12
    restores = next(
        r for r in status.metric_points(state) if r.name == "headrace.scheduler.tiers.restore.duration"
    )
    assert isinstance(restores, HistogramPoint)
    assert sum(restores.counts) == counters.loads
    shown = status.status(state)
    tiers = shown["tiers"]
    assert isinstance(tiers, dict)
    assert tiers["e1"]["up_bytes_per_s"] == executor.up.bytes_per_second
    measured = shown["measured"]["tiers"]
    assert (measured["loads"], measured["lookups_open"], measured["jobs_open"]) == (counters.loads, 0, 0)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_METRICS_EXPORTER": "none"},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"},
    ],
)
def test_metrics_are_off_unless_requested(env: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        env.setenv(name, value)
    assert meter_sink_from_env("scheduler", "s") is None


def test_a_collector_gets_counters_gauges_and_histograms(env: pytest.MonkeyPatch, receiver: Receiver) -> None:
    env.setenv(ENDPOINT, receiver.url)
    env.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")
    sink = meter_sink_from_env("scheduler", "s")
    assert sink is not None
    sink.put([MetricPoint("n", 1, "1", is_counter=True)])
    state = MetricPoint("blocks", 7, "{block}", (("state", "free"),))
    sink.put(
        [
            MetricPoint("n", 5, "1", is_counter=True),
            state,
            HistogramPoint("wait", (0.5, 2.0), (1, 0, 3), 9.5, "s"),
        ]
    )
    sink.stop(10)
    (counter,) = receiver.wait_for_metric("n", 5).sum.data_points
    assert (counter.as_double or counter.as_int, receiver.metrics["n"].sum.is_monotonic) == (5, True)
    (gauge,) = receiver.metrics["blocks"].gauge.data_points
    assert (gauge.as_double or gauge.as_int, gauge.attributes[0].value.string_value) == (7, "free")
    (point,) = receiver.metrics["wait"].histogram.data_points
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([1, 0, 3], [0.5, 2.0])
    assert (point.count, point.sum, receiver.metrics["wait"].unit) == (4, 9.5, "s")
    assert not point.HasField("min")


def test_absent_collector_is_reported_once(env: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    env.setenv(ENDPOINT, "http://127.0.0.1:9")
    env.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")
    env.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    sink = meter_sink_from_env("scheduler", "s")
    assert sink is not None
    sink.put([MetricPoint("n", 1, "1", is_counter=True)])
    sink.stop(20)
    for thread in threading.enumerate():  # `stop` does not wait for a collector that is away
        if thread.name.startswith("metrics-"):
            thread.join(20)
    assert [r.message for r in caplog.records if r.name == "headrace.tracing"] == [
        "metrics: do not arrive at http://127.0.0.1:9/v1/metrics: start a collector there"
    ]
