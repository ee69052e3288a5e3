"""A waiting group blocks none that could start elsewhere, and is never overtaken for ever."""

from __future__ import annotations

import dataclasses

import pytest
from support.scheduler.world import World
from support.scheduler.world_checks import ALL

from services.scheduler import headroom, preemption
from services.scheduler.state import requests
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import Ticked
from services.scheduler.state.state import Limits
from services.scheduler.state.waiting_queue import INPUT_WEIGHT, MAX_CANDIDATES, OUTPUT_WEIGHT
from shared.messages import ints

NEVER = requests.parse("interactive=0/50/0,standard=0/50/0,batch=0/50/0")


def running(world: World, name: str = "e1") -> list[str]:
    return [s.request.tokenized.request for s in world.scheduler.state.executors[name].running]


def steps(world: World, count: int) -> None:
    """Let each engine answer so many steps."""
    for _ in range(count):
        for name in world.engines:
            world.deliver(name)


def test_a_large_request_waits_on_its_executor_alone() -> None:
    """Only the large executor can hold it, and is full: eight small ones start on the other one."""
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve")), checks=[*ALL])
    world.add_engine("large", blocks=16, slots=8)
    world.add_engine("small", blocks=8, slots=8)
    world.ask("runs", [4] * 4, 44)  # 12 blocks
    world.ask("large", [5] * 20, 40)  # 15: as soon as the large one is empty
    for i in range(8):
        world.ask(f"r{i}", [6, i], 2)
    assert running(world, "large") == ["runs"]
    assert running(world, "small") == [f"r{i}" for i in range(8)]
    while "large" not in running(world, "large"):
        assert running(world, "large") == ["runs"], "the one that waits there is overtaken"
        world.deliver("large")
    world.run()
    for name in ("runs", "large", *(f"r{i}" for i in range(8))):
        world.assert_answers(name)
    world.assert_idle()


def test_a_small_one_that_comes_later_starts_where_the_first_will_not() -> None:
    """Nothing has changed on any executor since the first had to wait."""
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve")))
    world.add_engine("large", blocks=16, slots=8)
    world.add_engine("small", blocks=8, slots=8)
    world.ask("runs", [4] * 4, 44)
    world.ask("large", [5] * 20, 40)
    world.handle(Ticked())
    world.ask("later", [6], 2)
    assert running(world, "small") == ["later"]


def test_a_small_one_starts_where_many_large_ones_before_it_never_will() -> None:
    """More of them than are looked at: none of them fits on the small executor."""
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve")))
    world.add_engine("large", blocks=16, slots=8)
    world.add_engine("small", blocks=8, slots=8)
    world.ask("runs", [4] * 4, 44)
    for i in range(MAX_CANDIDATES + 2):
        world.ask(f"large{i}", [5] * 20, 40)
    for i in range(8):
        world.ask(f"r{i}", [6, i], 2)
    assert running(world, "small") == [f"r{i}" for i in range(8)]


def test_the_first_keeps_one_executor_until_it_starts() -> None:
    """With room that comes on both in turn, and small ones that would take it at once, it would start on
    none."""
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve"), overlap="single"))
    for name in ("e1", "e2"):
        world.add_engine(name, blocks=16, slots=16)
        for i in range(4):
            world.ask(f"{name}{i}", [4] * 4, 12)  # 4 blocks each
    world.ask("large", [5] * 20, 40)
    started_after = 0
    for i in range(60):
        world.ask(f"r{i}", [6, i], 6)
        if "large" in [*running(world, "e1"), *running(world, "e2")]:
            break
        world.deliver("e1")
        world.deliver("e2")
        started_after += 1
    assert started_after <= 14, "12 tokens of those that run, and the window"
    world.run()
    world.assert_answers("large")


def test_a_wide_request_takes_the_slots_that_are_free() -> None:
    """n = slots beside two that run for long: 14 choices start at once, the others when these end."""
    world = World(Limits(classes=NEVER), checks=[*ALL])
    world.add_engine(slots=16, blocks=400)
    for name in ("one", "two"):
        world.ask(name, [4] * 4, 40)
    world.ask("wide", [5] * 9, 6, n=16)
    assert sorted(running(world)) == ["one", "two", *["wide"] * 14]
    world.run()
    world.assert_answers("wide")
    world.assert_idle()


def test_choices_start_as_blocks_come_free() -> None:
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve")), checks=[*ALL])
    world.add_engine(slots=8, blocks=20)
    world.ask("runs", [4] * 4, 36)  # 10 blocks
    world.ask("wide", [5] * 8, 8, n=6)  # 2 shared and 2 each: 4 choices in 10 blocks, all in 14
    assert sorted(running(world)) == ["runs", *["wide"] * 4]
    world.run()
    world.assert_answers("wide")
    world.assert_idle()


def test_a_choice_that_waits_can_be_cancelled_with_its_request() -> None:
    world = World(Limits(classes=NEVER), checks=[*ALL])
    world.add_engine(slots=4, blocks=200)
    world.ask("runs", [4] * 4, 30)
    world.ask("wide", [5] * 9, 6, n=4)
    assert len(world.scheduler.state.waiting) == 1
    world.scheduler.state.requests["public", "wide"].deadline_us = 1
    world.tick(2_000_000_000)
    world.run()
    assert {reader.closed.code for reader in world.readers_of("wide") if reader.closed} == {408}
    world.assert_idle()


@pytest.mark.parametrize("slots", [2, 8])
def test_a_wide_request_is_charged_for_all_of_its_choices(slots: int) -> None:
    """Its prompt once, as it is computed once, at any time that its choices start."""
    world = World(Limits(classes=NEVER))
    world.add_engine(slots=slots, blocks=200)
    prompt, output = 8, 6
    if slots == 2:
        world.ask("runs", [4] * 4, 3, tenant="other")
    world.ask("wide", [5] * prompt, output, n=2, tenant="wide")
    world.run()
    served = world.scheduler.state.waiting.served
    charged = served.get(("wide", 1)) - served.floors[1]  # it was lifted to what runs
    least = INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * 2 * output
    again = INPUT_WEIGHT * 4  # the second one may compute the last block of the prompt for itself
    assert least <= charged <= least + (again if slots == 2 else 0)


def test_a_row_that_fails_is_forgotten_where_its_choices_are() -> None:
    """Two choices on executors of different size: the blocks of each are those of its own executor."""
    world = World(Limits(classes=NEVER, policy=Policy(routing="room")), checks=[*ALL])
    world.add_engine("large", slots=1, blocks=400)
    world.add_engine("small", slots=2, blocks=20)
    world.ask("fills", [4] * 4, 3)
    world.ask("wide", [5] * 30, 20, n=2)
    steps(world, 2)
    assert (running(world, "large"), running(world, "small")) == (["fills"], ["wide", "wide"])
    state = world.scheduler.state
    for sequence in state.requests["public", "wide"].sequences[1:]:
        headroom.withdraw(state, sequence, 0)
        preemption.requeue(state, sequence)
    steps(world, 6)
    assert (running(world, "large"), running(world, "small")) == (["wide"], ["wide"])
    result = world.results["small"][0]
    rows = [(0, "boom")]
    world.results["small"][0] = dataclasses.replace(result, ids=ints([-1]), row_errors=tuple(rows))
    world.run()
    assert {r.closed.code for r in world.readers_of("wide") if r.closed} == {500}
    world.assert_idle()


def aged_world(risen: bool) -> World:
    """A full executor of standard requests, and one of class batch that has waited for long, perhaps."""
    slo = requests.parse("interactive=0/50/0,standard=0/50/1000,batch=0/500/1000")
    world = World(Limits(classes=slo, policy=Policy(reservation="reserve")))
    world.add_engine(slots=2, blocks=32)
    for name in ("s0", "s1"):
        world.ask(name, [4] * 4, 50)
    world.ask("old", [5] * 4, 3, slo_class="batch")
    if risen:
        world.tick(1_000_000)
        world.tick(1_000_000)
    return world


def test_a_batch_request_that_has_aged_preempts_by_the_class_of_its_line() -> None:
    assert "old" not in running(aged_world(risen=False))
    world = aged_world(risen=True)
    for _ in range(2):  # the steps in flight
        world.deliver()
    assert "old" in running(world)
    paused = [s for s in world.scheduler.state.sequences.values() if s.turn.preemptions]
    assert [s.request.tokenized.request for s in paused] == ["s1"]
    while (now := running(world)) and "old" in now:  # the paused one does not take the place back
        assert "s1" not in now
        world.deliver()
    assert len(world.readers_of("old")[0].tokens) == 3
    world.run()
    for name in ("s0", "s1", "old"):
        world.assert_answers(name)
    world.assert_idle()
