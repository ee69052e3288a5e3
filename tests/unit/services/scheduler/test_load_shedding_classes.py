"""The door judges a request by who is before it in its own class and above, not by the whole queue."""

from __future__ import annotations

from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler.state import requests
from services.scheduler.state.state import Limits
from shared.step_model import StepModel


def test_waiting_batch_requests_do_not_turn_an_interactive_one_away() -> None:
    """One slot, a queue of class batch: an interactive request takes the place of the one that runs, at once,
    so its first token is a step or two away however long that queue is."""
    world = World(Limits(classes=requests.parse("interactive=1000/50/0,batch=0/500/0")))
    world.add_engine(slots=1)
    (executor,) = world.scheduler.state.executors.values()
    executor.costs = Known(StepModel(weights_us=10_000, token_ns=0), loop_us=700)
    executor.pace.step_us = 10_000
    for i in range(40):
        world.ask(f"b{i}", [5, i], 40, slo_class="batch")
    world.ask("i", [9, 9], 4, slo_class="interactive")
    assert world.rejected == []
    for _ in range(8):
        world.deliver()
    assert [len(reader.tokens) for reader in world.readers_of("i")] == [4]
