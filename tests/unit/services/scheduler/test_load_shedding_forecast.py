"""The predicted time to the first token."""

from __future__ import annotations

from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler import load_shedding
from services.scheduler.state import requests
from services.scheduler.state.state import Limits
from shared.step_model import StepModel

SLO = requests.parse("interactive=0/50/0,standard=0/50/0,batch=0/50/0")


def busy_world(waiting: int, known: bool = True) -> World:
    world = World(Limits(classes=SLO))
    world.add_engine(slots=1)
    if known:
        (executor,) = world.scheduler.state.executors.values()
        executor.costs = Known(StepModel(weights_us=0, token_ns=1_000), loop_us=700)
        executor.pace.step_us = 1_000
    for i in range(waiting):
        world.ask(f"r{i}", [5, i], 20)
    return world


def ttft_us(world: World, level: int = 1) -> int:
    world.ask("asked", [9] * 10, 5)
    return load_shedding.ttft_us(world.scheduler.state, world.asked["asked"], level)


def test_nothing_is_predicted_from_nothing() -> None:
    assert ttft_us(busy_world(10, known=False)) == 0


def test_an_idle_executor_takes_the_prompt_and_one_loop() -> None:
    """256 tokens beside nothing take 257 us by this model: 10 tokens 10 us, and the loop."""
    world = busy_world(0)
    (executor,) = world.scheduler.state.executors.values()
    asked = busy_world(0)
    asked.ask("a", [9] * 10, 5)
    assert (
        executor.costs.loop_us
        <= load_shedding.ttft_us(world.scheduler.state, asked.asked["a"], 1)
        <= 700 + 11
    )


def test_more_before_it_is_never_sooner() -> None:
    found = [ttft_us(busy_world(waiting)) for waiting in (1, 2, 4, 8, 16, 32)]
    assert found == sorted(found)
    assert found[-1] > found[0] > 0


def test_a_lower_class_waits_for_the_higher_ones_too() -> None:
    world = busy_world(8)
    assert ttft_us(world, 2) >= ttft_us(world, 1) >= ttft_us(world, 0)
