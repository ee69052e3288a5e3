"""The predicted time to the first token."""

from __future__ import annotations

import dataclasses

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
        executor.cost_model = Known(StepModel(weights_us=0, token_ns=1_000), loop_us=700)
        executor.pace.step_us = 1_000
    for i in range(waiting):
        world.ask(f"r{i}", [5, i], 20)
    return world


def ttft_us(world: World, level: int = 1) -> int:
    world.ask("asked", [9] * 10, 5)
    return load_shedding.ttft_us(world.scheduler.state, world.asked["asked"], level)


def test_forecast_is_absent_without_measurements() -> None:
    assert ttft_us(busy_world(10, known=False)) == 0


def test_an_idle_executor_takes_the_prompt_and_one_loop() -> None:
    """256 tokens beside nothing take 257 us by this model: 10 tokens 10 us, and the loop."""
    world = busy_world(0)
    (executor,) = world.scheduler.state.executors.values()
    asked = busy_world(0)
    asked.ask("a", [9] * 10, 5)
    assert (
        executor.cost_model.loop_us
        <= load_shedding.ttft_us(world.scheduler.state, asked.asked["a"], 1)
        <= 700 + 11
    )


def test_more_before_it_is_never_sooner() -> None:
    found = [ttft_us(busy_world(waiting)) for waiting in (1, 2, 4, 8, 16, 32)]
    assert found == sorted(found)
    assert found[-1] > found[0] > 0


def test_requests_for_one_token_hold_their_slots_for_one_step() -> None:
    """40 of them wait for one slot, although the mean output is 256 tokens; so do requests for vectors."""
    found = {}
    for tokens in (1, 5, 20):
        world = World(Limits(classes=SLO))
        world.add_engine(slots=1)
        (executor,) = world.scheduler.state.executors.values()
        executor.cost_model = Known(StepModel(weights_us=0, token_ns=1_000), loop_us=700)
        executor.pace.step_us = 1_000
        for i in range(40):
            world.ask(f"r{i}", [5, i], tokens)
        assert world.scheduler.state.mean_output_tokens == 256
        found[tokens] = ttft_us(world)
    assert 39_000 < found[1] < 60_000
    assert found[1] < found[5] < found[20] < 50 * 20_000


def test_a_lower_class_waits_for_the_higher_ones_too() -> None:
    world = busy_world(8)
    assert ttft_us(world, 2) >= ttft_us(world, 1) >= ttft_us(world, 0)


def refused(world: World, prompt: int = 10) -> list[str]:
    before = len(world.rejected)
    world.ask("late", [9] * prompt, 5)
    return [rejected.message for rejected in world.rejected[before:]]


def hopeless(seconds_per_token: int) -> World:
    """An idle world with a measured time a token of so long; a first token may take 60 s."""
    world = World(Limits(classes=requests.parse("standard=60000/100/0")))
    world.add_engine(slots=2)
    (executor,) = world.scheduler.state.executors.values()
    executor.cost_model = Known(StepModel(weights_us=0, token_ns=seconds_per_token * 10**9), loop_us=700)
    return world


def test_first_request_is_never_refused_by_the_forecast() -> None:
    world = hopeless(100)
    assert refused(world) == []
    world.run()
    world.assert_answers("late")


def test_request_after_another_of_its_tenant_is_refused_by_the_forecast() -> None:
    """And of a tenant that waits already: one that waits for nothing always may."""
    world = hopeless(100)
    for name in ("first", "second", "third"):  # two run
        world.ask(name, [5] * 10, 20)
    assert ["the first token would take" in why for why in refused(world)] == [True]


def test_a_speed_below_a_token_a_second_is_a_speed() -> None:
    """10 prompt tokens of 100 s each before it, after steps with 8: 1,200 s and a loop, and no more."""
    world = hopeless(100)
    world.ask("first", [5] * 10, 20)
    assert [sum(plan.counts) for plan in world.plans] == [4, 4]
    asked = hopeless(100)
    asked.ask("late", [9] * 10, 5)
    late = load_shedding.ttft_us(world.scheduler.state, asked.asked["late"], 1)
    assert late == 1_200_000_000 + 700


def test_one_stall_does_not_make_every_wait_for_a_slot_long() -> None:
    """One that waits for a slot waits for the steps of its holder: one took 20 s in place of 1 ms."""
    world = busy_world(1)
    (executor,) = world.scheduler.state.executors.values()
    before_us = ttft_us(world)
    executor.pace.note_step(20_000_000, predicted_us=1_000)
    assert ttft_us(world) <= 2 * before_us
    for _ in range(200):
        executor.pace.note_step(5_000, predicted_us=5_000)
    assert executor.pace.step_us > 4_900


def test_a_wide_request_waits_for_one_slot() -> None:
    """Its choices start one by one: the first of them gets its token no later than a narrow one would."""
    found, steps = [], []
    for n in (1, 2, 8):
        world = World(Limits(classes=SLO, window=1))
        world.add_engine(slots=16, blocks=4_000, max_context=4_000)
        (executor,) = world.scheduler.state.executors.values()
        executor.cost_model = Known(StepModel(weights_us=10_000, token_ns=1_000), loop_us=700)
        executor.pace.step_us = 10_000
        for i in range(14):
            world.ask(f"long{i}", [5 + i] * 4, 3_000)
        for i in range(2):
            world.ask(f"short{i}", [50 + i] * 4, 5)
        world.ask("waits", [98] * 4, 5)
        wide = dataclasses.replace(world.asked["waits"], n=n)
        found.append(load_shedding.ttft_us(world.scheduler.state, wide, 1))
        world.ask("wide", [97] * 4, 5, n=n)
        took = 0
        while not any(reader.tokens for reader in world.readers_of("wide")):
            took += world.deliver()
        steps.append(took)
    assert found == [found[0]] * 3
    assert steps == [steps[0]] * 3
