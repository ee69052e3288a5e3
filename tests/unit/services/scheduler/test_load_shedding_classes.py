"""The door judges a request by the requests before it in its own class and above, not by the whole queue."""

from __future__ import annotations

from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler import headroom
from services.scheduler.state import requests
from services.scheduler.state.state import Limits
from shared.step_model import StepModel


def test_waiting_batch_requests_do_not_turn_an_interactive_one_away() -> None:
    """One slot, a queue of class batch: an interactive request takes the place of the one that runs, at once,
    so its first token is a step or two away however long that queue is."""
    world = World(Limits(classes=requests.parse("interactive=1000/50/0,batch=0/500/0")))
    world.add_engine(slots=1)
    (executor,) = world.scheduler.state.executors.values()
    executor.cost_model = Known(StepModel(weights_us=10_000, token_ns=0), loop_us=700)
    executor.pace.step_us = 10_000
    for i in range(40):
        world.ask(f"b{i}", [5, i], 40, slo_class="batch")
    world.ask("i", [9, 9], 4, slo_class="interactive")
    assert world.rejected == []
    for _ in range(8):
        world.deliver()
    assert [len(reader.tokens) for reader in world.readers_of("i")] == [4]


def batch_world(slots: int, running: int, waiting: int) -> World:
    """Requests of class batch run and wait; a prompt of 6,000 tokens takes 60 s."""
    world = World(Limits(classes=requests.parse("interactive=1000/50/0,standard=1000/50/0,batch=0/500/0")))
    world.add_engine(slots=slots, blocks=4_000, max_context=12_000)
    (executor,) = world.scheduler.state.executors.values()
    executor.cost_model = Known(StepModel(weights_us=10_000, token_ns=10_000_000), loop_us=700)
    executor.pace.step_us = 10_000
    for i in range(running + waiting):
        world.ask(f"b{i}", [5 + i] * 4, 500, slo_class="batch")
    assert len(executor.running) == running
    return world


def test_lower_classes_that_run_are_not_ahead() -> None:
    """They give their places up: trying is the fastest."""
    for slo_class in ("interactive", "standard"):
        world = batch_world(slots=4, running=4, waiting=1)
        world.ask("late", [9] * 6_000, 5, slo_class=slo_class)
        assert world.rejected == []
        for _ in range(3):
            world.deliver()
        (executor,) = world.scheduler.state.executors.values()
        assert "late" in [s.request.tokenized.request for s in executor.running]


def test_running_sequence_that_keeps_its_place_counts_as_ahead() -> None:
    """One of its own class; one of a lower class that has risen, or is pinned."""
    for why in ("class", "risen", "pinned"):
        world = batch_world(slots=2, running=2, waiting=1)
        world.ask("i", [9] * 4, 400, slo_class="interactive")
        (executor,) = world.scheduler.state.executors.values()
        for _ in range(3):
            world.deliver()
        first = next(s for s in executor.running if s.level == 0)
        if why != "class":
            world.check_every = 0
            headroom.withdraw(world.scheduler.state, first, 0)
            (left,) = executor.running
            left.level, left.turn.pinned = (0, False) if why == "risen" else (2, True)
        world.ask("late", [9] * 6_000, 5, slo_class="interactive")
        assert ["the first token would take" in r.message for r in world.rejected] == [True], why
