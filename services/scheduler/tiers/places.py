"""Whether a step is planned now, or a moment later with the rows that need the places of others.

Who is paused leaves blocks that have to be copied down before they are given out. A row that waits for one of
them sits out a whole step, while the copy takes a small part of one: on a CPU 5 of 70 ms. The device stands
still meanwhile, so the wait is weighed against what the rows would lose: their share of a step.
"""

from __future__ import annotations

from services.scheduler.state import Executor, State
from services.scheduler.tiers import storing
from services.scheduler.tiers.jobs import executor_of

OVERDUE = 2  # times what stores take: then nobody knows when it ends


def worth_waiting(state: State, executor: Executor, needy: int) -> bool:
    """True when some of the `needy` rows that lack a block will have one so soon that the step should wait.
    Begins the copies that it would wait for."""
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
