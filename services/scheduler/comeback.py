"""A paused sequence comes back: it is spared for a while, and what its return cost is compared with what
was predicted."""

from __future__ import annotations

from services.scheduler.records import Sequence
from services.scheduler.state import Executor, InFlight, State
from services.scheduler.tiers.worth import Recompute
from services.scheduler.waiting import Unit
from shared.step_model import StepShape

SPARED_US = 2_000_000  # at least: whoever is paused again at once has come back for nothing
SPARED_TIMES = 4  # the cost of its return


def returned(state: State, executor: Executor, sequence: Sequence, unit: Unit) -> None:
    """It runs again, and perhaps waits for a tier."""
    if not unit.resumes:
        return
    lost = max(0, min(sequence.reach, len(sequence.tokens) - 1) - sequence.computed)
    cost_us = Recompute.of(executor).tokens_us(sequence.computed, lost)
    if not state.limits.policy.greedy:
        sequence.spared_until_us = state.now_us + max(SPARED_US, SPARED_TIMES * cost_us)
    if not sequence.loading:
        owes(executor, sequence)


def owes(executor: Executor, sequence: Sequence) -> None:
    """What it had and has lost is computed from now on. Of one that was paused within its prompt nothing can
    be said: its chunks go on into what is new."""
    lost = len(sequence.tokens) - 1 - sequence.computed
    if 0 < lost <= sequence.reach - sequence.computed:
        costs = Recompute.behind(executor, sequence)
        sequence.owed_us = costs.tokens_us(sequence.computed, lost + 1)  # and the one that it is sampled from
        sequence.paid_us = 0


def stepped(state: State, executor: Executor, flight: InFlight, took_us: int) -> None:
    """A step has run: what it took beyond its decodes is the price of its chunks, by their tokens. The last
    chunk settles it: later ones are planned before its result is here."""
    plan, first = flight.plan, len(flight.plan.slots) - len(flight.chunks)
    owing = [
        (s, row)
        for row, (s, _) in enumerate(flight.chunks, first)
        if s.owed_us and s.opened_after < flight.step
    ]
    if not owing:
        return
    chunk_tokens = sum(plan.counts[first:])
    price_us = max(0, took_us - _without_chunks_us(executor, flight))
    for sequence, row in owing:
        sequence.paid_us += price_us * plan.counts[row] // max(chunk_tokens, 1)
        if plan.starts[row] + plan.counts[row] >= sequence.opened_length:
            _settle(state, sequence)


def _settle(state: State, sequence: Sequence) -> None:
    state.meter.add_recompute(sequence.paid_us, sequence.owed_us)
    sequence.decide(
        state.now_us,
        "recomputed",
        "what it had lost is there again",
        predicted_us=sequence.owed_us,
        took_us=sequence.paid_us,
    )
    sequence.owed_us = 0


def _without_chunks_us(executor: Executor, flight: InFlight) -> int:
    plan, rows = flight.plan, len(flight.plan.slots) - len(flight.chunks)
    if not rows:
        return 0
    cached = sum(plan.starts[:rows])
    return executor.costs.predict_us(StepShape(rows, rows, cached + rows, cached))
