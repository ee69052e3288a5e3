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
    sequence.spared_until_us = state.now_us + max(SPARED_US, SPARED_TIMES * cost_us)
    if not sequence.loading:
        owes(executor, sequence)


def owes(executor: Executor, sequence: Sequence) -> None:
    """What it had and has lost is computed from now on. Of one that was paused within its prompt nothing can
    be said: its chunks go on into what is new."""
    lost = len(sequence.tokens) - 1 - sequence.computed
    if 0 < lost <= sequence.reach - sequence.computed:
        sequence.owed_us = Recompute.of(executor).tokens_us(sequence.computed, lost)
        sequence.paid_us = 0


def stepped(state: State, executor: Executor, flight: InFlight, took_us: int) -> None:
    """A step has run: what it took beyond its decodes is the price of its chunks, by their tokens."""
    owing = [(s, note.tokens) for s, note in flight.chunks if s.owed_us]
    if not owing:
        return
    chunk_tokens = sum(note.tokens for _, note in flight.chunks)
    price_us = max(0, took_us - _without_chunks_us(executor, flight))
    for sequence, tokens in owing:
        sequence.paid_us += price_us * tokens // max(chunk_tokens, 1)
        if not sequence.prefilling:
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
