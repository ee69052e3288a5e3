"""The executors that KEDA would run by `scale_wanted` and the manifests' ScaledObject, in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import yaml
from support.kubernetes.autoscaler import Autoscaler
from support.kubernetes.elastic_world import START_S, ElasticWorld, S
from support.source_tree import ROOT

from loadtest.simulator.engine import Machine
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from services.scheduler.state.requests import CLASS_NAMES, parse
from services.scheduler.state.state import Limits
from shared.step_model import StepModel

SPEC = yaml.safe_load((ROOT / "deploy/kubernetes/components/keda/scaled_object.yaml").read_text())["spec"]
POLL_S, COOLDOWN_S = SPEC["pollingInterval"], SPEC["cooldownPeriod"]
WINDOW_S = SPEC["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"][
    "stabilizationWindowSeconds"
]
# No request is refused, and none rises to a higher class by waiting.
PATIENT = "interactive=0/50/0,standard=0/100/0,batch=0/500/0"
SLOW = Machine(
    StepModel(weights_us=200_000, token_ns=4_000_000, row_ns=10_000_000),
    slots=16, blocks=2_000, max_step_tokens=512, max_context=4_096,
)  # fmt: skip


def world(arrivals: list[float], until_s: int, machine: Machine = SLOW) -> ElasticWorld:
    """Requests at these seconds, without an executor at first."""
    requests = [
        SimRequest(f"r{i}", int(at * S), plain_prompt(i, 64), output_tokens=40, max_tokens=64)
        for i, at in enumerate(sorted(arrivals))
    ]
    made = ElasticWorld(machine, Autoscaler(SPEC), Workload(tuple(requests)), until_s)
    made.run()
    return made


def assert_steady(made: ElasticWorld) -> None:
    """Nothing is lost, an executor starts as soon as one is needed, and stays for its window or cooldown."""
    assert made.unanswered == set()
    assert made.scheduler.is_idle
    needed = {at: bool(any(terms.values())) for at, _, terms in made.history}
    assert all(replicas for at, replicas, _ in made.history if needed[at])
    turned_s, way = 0.0, 1
    for at, before, after in made.autoscaler.changes:
        if after == 0:
            assert not any(is_needed for t, is_needed in needed.items() if at - COOLDOWN_S < t <= at)
        elif (after > before) != (way > 0):
            assert way < 0 or at - turned_s >= WINDOW_S, "up, and down at once"
        turned_s, way = at, after - before
    assert [n for _, n, _ in made.history][-1] == 0


def test_replicas_go_from_none_to_many_and_back_to_none() -> None:
    rng = random.Random(1)
    made = world([rng.uniform(0, 60) for _ in range(150)], 1_500)
    assert_steady(made)
    replicas = [n for _, n, _ in made.history]
    assert replicas[0] == 0
    assert max(replicas) >= 3
    first, *_ = made.autoscaler.changes
    assert first[1:] == (0, 1)
    assert first[0] <= min(r.arrival_us for r in made.readers.records) / S + POLL_S
    at_s, *_ = made.autoscaler.changes[-1]
    last = max(record.ended_us for record in made.readers.records) / S - 1
    assert abs(at_s - last - COOLDOWN_S) <= POLL_S
    assert made.refused[503] > 0, "at first there was none"


def test_a_request_that_is_not_durable_waits_for_the_executor_that_it_starts() -> None:
    limits = Limits(cold_start_wait_us=600 * S)
    requests = tuple(SimRequest(f"r{i}", 100 * S + i, plain_prompt(i, 64), 40, 64) for i in range(3))
    made = ElasticWorld(SLOW, Autoscaler(SPEC), Workload(requests), 1_000, durable=False, limits=limits)
    made.run()
    assert_steady(made)
    assert not made.refused
    assert [(before, after) for _, before, after in made.autoscaler.changes] == [(0, 1), (1, 0)]


def test_twenty_requests_that_wait_for_the_first_executor_start_in_the_order_of_their_classes() -> None:
    """They come in the reverse order, while no executor runs; four run at a time."""
    requests = tuple(
        SimRequest(f"r{i}", 100 * S + i, plain_prompt(i, 64), 40, 64, slo_class=CLASS_NAMES[-1 - i // 7])
        for i in range(20)
    )
    limits = Limits(cold_start_wait_us=600 * S, classes=parse(PATIENT))
    made = ElasticWorld(
        replace(SLOW, slots=4), Autoscaler(SPEC), Workload(requests), 1_500, durable=False, limits=limits
    )
    made.run()
    assert_steady(made)
    assert not made.refused
    started = sorted(made.readers.records, key=lambda record: record.first_us)
    assert [r.asked.slo_class for r in started] == sorted(
        (asked.slo_class for asked in requests), key=CLASS_NAMES.index
    )


def test_one_request_needs_one_executor() -> None:
    made = world([100.0], 1_000)
    assert_steady(made)
    assert [(before, after) for _, before, after in made.autoscaler.changes] == [(0, 1), (1, 0)]
    (record,) = [r for r in made.readers.records if r.served]
    assert record.ended_us / S < 100 + POLL_S + START_S + 30


@pytest.mark.parametrize("seed", range(2))
def test_a_square_wave_does_not_flap(seed: int) -> None:
    """Ten minutes: five with load, five without."""
    rng = random.Random(seed)
    load = [wave * 600 + rng.uniform(0, 300) for wave in range(3) for _ in range(rng.randrange(1, 200))]
    made = world(load, 3_000)
    assert_steady(made)
