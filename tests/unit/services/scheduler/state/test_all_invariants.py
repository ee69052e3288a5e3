"""`check` finds each thing that is kept and does not equal a recount."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scheduler import invariants
from support.scheduler.world import World

from services.scheduler.state.requests import Phase, Sequence
from services.scheduler.state.state import Executor, State

FAULTS: dict[str, Callable[[State, Executor], object]] = {
    "a slot is lost": lambda state, e: setattr(e.pool, "slots", 2),
    "a reservation has no sequence": lambda state, e: e.pool.reserve(1),
    "a table is not counted": lambda state, e: e.pool.adopt([e.running[0].table[0]]),
    "a step is lost": lambda state, e: e.in_flight.pop(),
    "a row in flight is not planned": lambda state, e: e.running[0].tokens.append(1),
    "the sums do not follow": lambda state, e: setattr(e.row_sums(), "decode_tokens", 9),
    "runs and has ended \\(0, 0, 0\\)": lambda state, e: e.remove(e.running[0]),
    "a deadline": lambda state, e: state.deadlines.heap.clear(),
    "has ended \\(1, 0, 0\\)": lambda state, e: setattr(_waiting(state), "phase", Phase.CLOSING),
    "it has blocks, and runs nowhere": lambda state, e: _waiting(state).table.append(1),
    "backlogs": lambda state, e: setattr(state.waiting.tenants["public"], "tokens", 1),
    "sums are not its groups'": lambda state, e: setattr(state.waiting.queues["m", 1], "tokens", 1),
    "a heap overlooks a client": lambda state, e: state.waiting.queues["m", 1].heads.clear(),
}


def _waiting(state: State) -> Sequence:
    return next(iter(state.waiting)).sequences[0]


@pytest.mark.parametrize("why", FAULTS)
def test_check_finds_the_fault_when_state_is_damaged(why: str) -> None:
    world = World()
    world.add_engine(slots=1)
    world.ask("runs", [1, 2, 3, 4, 5], 8)
    world.ask("waits", [6, 7], 8)
    state = world.scheduler.state
    invariants.check(state)
    FAULTS[why](state, state.executors["e1"])
    with pytest.raises(AssertionError, match=why):
        invariants.check(state)
