"""Whether a step is planned now, or a moment later with the rows that wait for a copy.

Who is paused leaves blocks that have to be copied down before they are given out, and who comes back waits
for some from below. A row that misses a step for that sits out all of it, while the copy takes a small part
of one: on a CPU 5 of 70 ms.
"""

from __future__ import annotations

from services.scheduler.state import Executor, State
from services.scheduler.tiers import storing
from services.scheduler.tiers.jobs import executor_of

OVERDUE = 2  # times what copies take: then nobody knows when one ends


def in_time(state: State, executor: Executor, needy: int) -> bool:
    """True while the next step may be planned later for nothing: one runs, and before its end a copy will be
    over that somebody waits for."""
    pace, loop_us = executor.pace, executor.costs.loop_us
    flights = executor.in_flight
    if not state.tiers.jobs or not flights or not loop_us or executor.hello.stages > 1:
        return False
    runs_us = sum(flight.predicted_us for flight in flights)
    end_us = max(pace.last_us, flights[0].planned_us) + runs_us - OVERDUE * loop_us
    places_wanted = needy > 0 or bool(state.stuck)
    loads = {s.loading for s in executor.running if s.loading}
    for job in state.tiers.jobs.values():
        if job.number in loads:
            over_us = job.began_us + OVERDUE * job.predicted_us
        elif places_wanted and not job.up and executor_of(state, job) is executor:
            over_us = job.began_us + OVERDUE * executor.down.store_us
        else:
            continue
        if state.now_us < over_us < end_us:
            return True
    return False


def worth_waiting(state: State, executor: Executor, needy: int) -> bool:
    """True when some of the `needy` rows that lack a block will have one so soon that the step should wait,
    though the device stands still meanwhile: it is weighed against what the rows would lose, their share of a
    step. Begins the copies that it would wait for."""
    ledger = executor.ledger
    if executor.in_flight or needy <= ledger.free_blocks - ledger.reserved or not ledger.coming_blocks:
        return False
    storing.clean(state, executor)
    soon = min(needy - (ledger.free_blocks - ledger.reserved), ledger.copying_blocks)
    began_us = [
        job.began_us
        for job in state.tiers.jobs.values()
        if not job.up and executor_of(state, job) is executor
    ]
    if soon <= 0 or not began_us:
        return False
    store_us, waited_us = executor.down.store_us, state.now_us - min(began_us)
    gain_us = executor.pace.step_us * soon // len(executor.running)
    return store_us - waited_us <= gain_us and waited_us < OVERDUE * store_us
