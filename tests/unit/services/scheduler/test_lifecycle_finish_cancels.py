"""A cancel gives memory back at once, after the fence: when the steps in flight have answered, no block
and no slot of the request is held. With the default window that is two steps."""

from __future__ import annotations

import pytest
from support.scheduler.world import World

from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import Arrived
from services.scheduler.state.state import Limits
from shared.messages import Cancel, Detached, ints

CANCEL = Arrived("client", Cancel(tenant="public", request="a"))


def running(window: int, results: int, **more: object) -> World:
    """Two requests, "a" to be stopped and "b" that goes on, after some results."""
    policy = Policy(reservation="reserve")
    world = World(limits=Limits(window=window, step_tokens=16, overlap="run_ahead", policy=policy))
    world.add_engine(blocks=64, slots=8)
    world.ask("b", [7, 8, 9], 40)
    world.ask("a", list(range(10, 30)), 30, **more)
    for _ in range(results):
        assert world.deliver()
    return world


def held_by_others(world: World) -> bool:
    """True when all that is held belongs to sequences that still run."""
    executor = world.scheduler.state.executors["e1"]
    mine = {block for sequence in executor.running for block in sequence.table}
    pool = executor.pool
    names = {sequence.request.tokenized.request for sequence in executor.running}
    free = pool.free_blocks == pool.blocks - len(mine) and pool.fenced_blocks == 0
    return names == {"b"} and free and len(pool.free_slots) == pool.slots - len(executor.running)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("results", [0, 1, 2, 3, 9])  # in the middle of the prompt, at its end, in the answer
@pytest.mark.parametrize("choices", [1, 3])
def test_blocks_are_free_when_the_steps_in_flight_have_answered(
    window: int, results: int, choices: int
) -> None:
    world = running(window, results, n=choices)
    flying = len(world.scheduler.state.executors["e1"].in_flight)
    assert flying == window
    world.handle(CANCEL)
    for _ in range(flying):
        assert not held_by_others(world), "a step in flight may still write there"
        world.deliver()
    assert held_by_others(world)
    world.run()
    world.assert_answers("b")
    world.assert_idle()


def test_a_waiting_request_holds_nothing() -> None:
    world = running(2, 3)
    world.ask("c", [1] * 10, 50, n=4)  # does not fit beside the others
    assert len(world.scheduler.state.waiting) == 1
    world.handle(Arrived("client", Cancel(tenant="public", request="c")))
    assert not world.scheduler.state.waiting
    world.run()
    world.assert_answers("a")
    world.assert_idle()


@pytest.mark.parametrize("finish", [False, True])
def test_request_of_a_client_that_has_gone_is_stopped_or_finished_by_its_option(finish: bool) -> None:
    world = running(2, 5, finish_detached=finish)
    (reader,) = world.readers_of("a")
    world.handle(Arrived("detokenizer.d1", Detached(seqs=ints([reader.opened.seq]))))
    world.deliver()
    world.deliver()
    assert held_by_others(world) == (not finish)
    world.run()
    if finish:
        world.assert_answers("a")
    else:
        assert reader.closed is not None
        assert (reader.closed.reason, reader.closed.code) == ("error", 499)
    world.assert_answers("b")
    world.assert_idle()
