"""Steps that are planned late, in the virtual world: what arrivals gain, and that the device never waits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import mean

import pytest

from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.world import Setup, World
from services.scheduler import overlap
from services.scheduler.state.state import Executor, Limits
from shared.messages import StepResult, ints
from shared.step_model import StepModel, StepShape

MS = 1_000
STEP_US = 50 * MS
BATCH, LONE = 8, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven(StepModel):
    """Each step takes up to `by_us` less, at random."""

    by_us: int
    rng: random.Random = field(default_factory=lambda: random.Random(1), hash=False)

    def step_us(self, shape: StepShape) -> int:
        return self.weights_us - self.rng.randrange(self.by_us)


def beside_a_batch(model: StepModel, **limits: object) -> World:
    """Some rows decode all the time, and a lone request comes now and then, at any phase of a step."""
    rng = random.Random(3)
    batch = [SimRequest(f"b{i}", 0, plain_prompt(i + 1, 32), 4_000, 4_000) for i in range(BATCH)]
    lone = [
        SimRequest(f"one{i}", (5_000 + 500 * i) * MS + rng.randrange(STEP_US), plain_prompt(99 + i, 8), 1, 1)
        for i in range(LONE)
    ]
    machine = Machine(model, hop=Hop(MS, MS))
    world = World(Setup((machine,), Limits(**limits), until_us=26_000_000), Workload((*batch, *lone)))  # type: ignore[arg-type]  # test shorthand
    world.run()
    assert len(world.readers.records) == LONE
    return world


def steps_waited(world: World) -> float:
    """The mean time to the first token of a lone request, in steps."""
    return mean(record.ttft_us for record in world.readers.records) / STEP_US


def test_an_arrival_waits_for_the_rest_of_one_step() -> None:
    world = beside_a_batch(StepModel(weights_us=STEP_US, token_ns=0))
    assert 1.4 < steps_waited(world) < 1.75  # half a step and its own; 2.5 with two steps in flight
    assert world.engines["e0"].totals.idle_us <= 5 * MS  # until the first plan is there


def test_steps_of_uneven_length_leave_no_gap() -> None:
    world = beside_a_batch(Uneven(weights_us=STEP_US, token_ns=0, by_us=STEP_US // 5))
    totals = world.engines["e0"].totals
    assert totals.idle_us < totals.busy_us // 500
    assert steps_waited(world) < 2.0


def test_short_steps_are_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    was = overlap.plan_due_us
    monkeypatch.setattr(overlap, "plan_due_us", lambda state: asked.append(was(state)) or asked[-1])
    beside_a_batch(StepModel(weights_us=10 * MS, token_ns=0))
    assert asked
    assert not any(asked)


def test_the_device_is_as_busy_as_with_plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StepModel(weights_us=STEP_US, token_ns=0)
    late = beside_a_batch(model).engines["e0"].totals
    monkeypatch.setattr(overlap, "can_plan_later", lambda state, executor: False)
    at_once = beside_a_batch(model)
    assert steps_waited(at_once) > 2.4
    assert late.steps >= at_once.engines["e0"].totals.steps - 1


def test_a_missed_end_raises_the_lead() -> None:
    world = beside_a_batch(StepModel(weights_us=STEP_US, token_ns=0))
    executor: Executor = world.scheduler.state.executors["e0"]
    pace, before = executor.pace, executor.pace.lead_us + 4 * executor.pace.lead_spread_us
    flight = executor.in_flight[0]
    flight.lead_us = before
    overlap.learn_lead(
        executor, flight, StepResult(exec_epoch=1, step=1, ids=ints(), done=ints(), wait_us=8 * MS)
    )
    after = pace.lead_us + 4 * pace.lead_spread_us
    assert after > before + 8 * MS
    for _ in range(200):
        overlap.learn_lead(
            executor, flight, StepResult(exec_epoch=1, step=1, ids=ints(), done=ints(), queued_us=before // 2)
        )
    assert pace.lead_us + 4 * pace.lead_spread_us < before
