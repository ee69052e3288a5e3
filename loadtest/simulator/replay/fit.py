"""Fits virtual machines to those of a log: their speed, size and distance."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from loadtest.simulator.engine import Machine
from loadtest.simulator.hops import Hop
from loadtest.simulator.replay.history import Past, Ran
from services.scheduler.reports.event_log import LogError
from services.scheduler.state.cost_model import CostModel
from shared.step_model import StepModel, StepShape

SAMPLE = 4_096  # steps of a long log that the fit is made of, evenly spread


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedModel(StepModel):
    """The step time that `CostModel` has learned from a log, in the form that engines ask for."""

    costs: CostModel

    def step_us(self, shape: StepShape) -> int:
        """At least one microsecond: time must pass."""
        return max(self.costs.predict_us(shape), 1)


@dataclass(frozen=True, slots=True)
class Fit:
    """A machine, and how far its step times are from those of the log."""

    machine: Machine
    steps: int
    error_pct: float  # mean |fitted - real| / real


def fit(past: Past) -> Fit:
    """The machine of one executor. Raises LogError when its steps have no times."""
    steps = [step for step in past.steps if step.took_us > 0]
    if not steps:
        raise LogError(f"the log has no step of {past.hello.executor} with its time: nothing can be fitted")
    stride = -(-len(steps) // SAMPLE)
    sample = steps[::stride]
    random.Random(0).shuffle(sample)  # the fit forgets: no part of the log shall be its last
    costs = CostModel()
    for step in sample:
        costs.observe(step.shape, step.took_us)
    model = LearnedModel(weights_us=0, token_ns=0, host_row_ns=_host_row_ns(steps), costs=costs)
    errors = [abs(model.step_us(step.shape) - step.took_us) / step.took_us for step in sample]
    hello = past.hello
    machine = Machine(
        model=model,
        blocks=hello.blocks,
        block_tokens=hello.block_tokens,
        slots=hello.slots,
        max_step_tokens=hello.max_step_tokens,
        max_context=hello.max_context,
        stages=hello.stages,
        hop=Hop(delay_us=int(median(step.loop_us for step in steps)) // 2),
    )
    return Fit(machine, len(steps), round(100 * sum(errors) / len(errors), 2))


def _host_row_ns(steps: Iterable[Ran]) -> int:
    hosted = [step for step in steps if step.host_rows]
    return 1_000 * sum(s.host_us for s in hosted) // max(sum(s.host_rows for s in hosted), 1)
