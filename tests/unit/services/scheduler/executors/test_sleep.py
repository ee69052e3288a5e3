"""Executors sleep and wake; requests wake them; what runs there goes on with the same tokens."""

from __future__ import annotations

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.executors import sleep
from services.scheduler.load_shedding import WAKE_WAIT_US
from services.scheduler.reports import status
from services.scheduler.state.requests import PeerLost, PeerReady, SleepSet
from services.scheduler.state.state import Limits
from shared.errors import SetupError

PROMPT = [*range(5, 14)]
SHARED = Limits(shares_memory=True)


def states(world: World) -> dict[str, str]:
    return sleep.states(world.scheduler.state)


def asleep(limits: Limits | None = None) -> World:
    """A world whose only engine has answered a request and sleeps."""
    world = World(limits or Limits())
    world.add_engine()
    world.ask("before", PROMPT, 8)
    world.run()
    world.handle(SleepSet(True))
    assert states(world) == {"e1": "falling asleep"}
    world.run()
    assert states(world) == {"e1": "asleep"}
    return world


def test_a_request_wakes_its_model_and_gets_the_same_tokens() -> None:
    world = asleep()
    world.ask("after", PROMPT, 8)
    assert (world.accepted, world.rejected) == (["before", "after"], [])
    assert world.naps == ["sleep e1", "wake e1"]
    assert states(world) == {"e1": "waking"}
    world.ask("third", PROMPT, 8)
    world.run()
    assert world.naps == ["sleep e1", "wake e1"], "it gets the command once"
    for request in ("before", "after", "third"):
        world.assert_answers(request)
    assert world.readers_of("after")[0].tokens == world.readers_of("before")[0].tokens
    world.assert_idle()
    assert world.resets == []


def test_blocks_are_empty_after_a_sleep() -> None:
    world = asleep()
    world.handle(SleepSet(False))
    world.run()
    executor = world.scheduler.state.executors["e1"]
    assert (executor.pool.cached_blocks, executor.epoch) == (0, 3)
    world.ask("after", PROMPT, 8)
    world.run()
    assert world.scheduler.state.counters.prefix_hit_tokens == 0
    world.assert_answers("after")


def test_a_request_that_comes_while_it_drains_waits_and_wakes_it() -> None:
    world = World()
    world.add_engine()
    world.ask("runs", PROMPT, 30)
    world.deliver()
    world.handle(SleepSet(True))
    world.ask("waits", PROMPT, 8)
    world.tick(sleep.DRAIN_US * 2)
    assert (world.naps, states(world)) == ([], {"e1": "draining"}), "preempted, it would wake it at once"
    world.run()
    assert world.naps == ["sleep e1", "wake e1"]
    world.assert_answers("runs")
    world.assert_answers("waits")
    world.assert_idle()


def test_a_wake_before_the_sleep_takes_it_back() -> None:
    world = World()
    world.add_engine()
    world.ask("runs", PROMPT, 30)
    world.deliver()
    world.handle(SleepSet(True))
    world.ask("waits", PROMPT, 8)
    world.handle(SleepSet(False))
    assert states(world) == {"e1": "loaded"}
    world.run()
    assert world.naps == []
    world.assert_answers("waits")


@pytest.mark.parametrize("tier", [False, True])
def test_memory_that_others_share_is_given_up_in_time(tier: bool) -> None:
    """What runs is preempted; it goes on after the next wake, from the tier if there is one."""
    world = World(SHARED)
    world.add_engine()
    if tier:
        world.add_tier(FakeTier(capacity=64))
    world.ask("runs", PROMPT, 30)
    for _ in range(12):
        world.deliver()
    world.handle(SleepSet(True))
    world.tick(sleep.DRAIN_US - 1_000)
    assert world.naps == []
    world.tick(1_000)
    world.run()
    assert (world.naps, states(world)) == (["sleep e1"], {"e1": "asleep"})
    assert 0 < len(world.readers_of("runs")[0].tokens) < 30
    world.ask("waits", PROMPT, 8)
    world.tick(1_000_000)
    assert world.naps == ["sleep e1"], "the launcher decides which one wakes"
    world.handle(SleepSet(False, ("e1",)))
    world.run()
    world.assert_answers("runs")
    world.assert_answers("waits")
    assert (world.scheduler.state.counters.restored_tokens > 0) == tier
    world.assert_idle()


def test_the_wait_for_a_wake_has_an_end() -> None:
    world = asleep(SHARED)
    world.ask("waits", PROMPT, 8)
    world.tick(WAKE_WAIT_US - 1_000)
    (reader,) = world.readers_of("waits")
    assert reader.closed is None
    world.tick(1_000)
    assert reader.closed is not None
    assert reader.closed.code == 503


def test_another_executor_goes_on_alone() -> None:
    world = World(SHARED)
    world.add_engine("e1")
    world.add_engine("e2")
    world.ask("a", PROMPT, 30)
    world.ask("b", [*range(40, 49)], 30)
    world.deliver("e1")
    world.deliver("e2")
    world.handle(SleepSet(True, ("e1",)))
    world.tick(sleep.DRAIN_US)
    world.run()
    assert (world.naps, states(world)) == (["sleep e1"], {"e1": "asleep", "e2": "loaded"})
    world.ask("c", PROMPT, 8)
    world.run()
    for request in "abc":
        world.assert_answers(request)


def test_a_sleeper_that_dies_is_forgotten_and_comes_back_awake() -> None:
    world = asleep()
    world.crash("e1")
    assert states(world) == {}
    world.ask("refused", PROMPT, 8)
    assert [r.code for r in world.rejected] == [503]
    world.add_engine(epoch=9)
    assert states(world) == {"e1": "loaded"}
    world.ask("after", PROMPT, 8)
    world.run()
    world.assert_answers("after")


def test_heartbeats_of_a_sleeper_reset_nothing() -> None:
    world = asleep()
    world.handle(PeerReady("executor", "e1", 1, 0))
    world.handle(PeerLost("detokenizer", "d9"))
    assert (world.resets, states(world)) == ([], {"e1": "asleep"})


def test_kind_of_a_sleeping_model_keeps_its_place() -> None:
    world = World()
    world.add_engine(digest="one")
    world.handle(SleepSet(True))
    world.run()
    world.add_engine("e2", digest="two")
    assert "e2" in world.refusals
    world.ask("a", PROMPT, 8)
    world.run()
    world.assert_answers("a")


def test_status_shows_the_state_of_sleep() -> None:
    world = asleep()
    assert status.status(world.scheduler.state)["states"] == {"e1": "asleep"}
    assert sleep.parse("sleep") == SleepSet(True)
    assert sleep.parse("wake e1 e2") == SleepSet(False, ("e1", "e2"))
    for wrong in ("", "nap", "sleeping e1"):
        with pytest.raises(SetupError, match="neither"):
            sleep.parse(wrong)
