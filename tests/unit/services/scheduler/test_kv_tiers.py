"""Tiers as the scheduler uses them: what is paused goes down before its place is given out, and comes back
without being computed again; at any fault there, the tokens stay the same."""

from __future__ import annotations

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.state.policies import Policy
from services.scheduler.state.state import Limits
from shared.messages import KvLookup, KvReserve


def crowded(fake: FakeTier | None, requests: int = 6, **policy: str) -> World:
    """Requests on an engine with memory for two of them."""
    world = World(Limits(policy=Policy(**policy)))
    if fake is not None:
        world.add_engine(blocks=12, slots=6)
        world.add_tier(fake)
    else:
        world.add_engine(blocks=12, slots=6)
    for number in range(requests):
        world.ask(f"r{number}", [number % 900 + 3] * 6, 18)
    return world


def checked(world: World) -> World:
    world.finish()
    return world


def test_no_token_is_computed_twice_while_a_tier_stores_its_block() -> None:
    world = checked(crowded(FakeTier(capacity=64)))
    meter = world.scheduler.state.counters
    assert meter.preemptions > 0
    assert meter.loads > 0
    assert meter.stored_blocks > 0
    assert meter.recomputed_tokens <= meter.preemptions  # the last token of each, whose sample was in flight


def test_shared_beginning_on_the_device_does_not_hide_the_later_blocks_in_the_tier() -> None:
    """A common beginning stays on the device and is never copied: the tier lacks the first block of each."""
    world = World()
    world.add_engine(blocks=14, slots=6)
    world.add_tier(FakeTier(capacity=64))
    for number in range(6):
        world.ask(f"r{number}", [7, 7, 7, 7, number + 10, number + 10], 18)
    meter = checked(world).scheduler.state.counters
    assert meter.preemptions > 0
    assert meter.loads > 0
    assert meter.recomputed_tokens <= meter.preemptions


def test_paused_sequence_is_computed_again_without_a_tier() -> None:
    world = checked(crowded(None))
    meter = world.scheduler.state.counters
    assert meter.recomputed_tokens > 2 * meter.preemptions


@pytest.mark.parametrize("switch", ["no_room", "missing", "lossy", "frozen"])
def test_a_tier_that_is_of_no_use_costs_no_request_and_no_token(switch: str) -> None:
    tier = FakeTier(capacity=64)
    setattr(tier, switch, True)
    world = crowded(tier)
    for _ in range(200):
        world.run()
        if world.scheduler.is_idle:
            break
        world.tick(200_000)
    for request in world.asked:
        world.assert_answers(request)


def test_recompute_policy_uses_no_tier() -> None:
    world = checked(crowded(FakeTier(capacity=64), tier="loadtest.policies:recompute"))
    assert world.tier.counts == {}
    assert world.scheduler.state.counters.recomputed_tokens > 0


def test_swap_takes_all_of_a_victim_off_the_device() -> None:
    world = checked(crowded(FakeTier(capacity=200), 40, tier="loadtest.policies:swap"))
    meter = world.scheduler.state.counters
    assert meter.loads > 0
    assert meter.recomputed_tokens <= meter.preemptions


def test_a_second_engine_finds_what_the_first_has_stored() -> None:
    world = World()
    world.add_engine("e1", blocks=32)
    world.add_tier(FakeTier(capacity=64))
    prompt = list(range(3, 23))
    world.ask("first", prompt, 4)
    world.run()
    world.tick(200_000)
    world.run()
    assert world.tier.counts["KvReserve"] > 0
    world.crash("e1")
    world.add_engine("e2", epoch=2, blocks=32)
    world.ask("second", prompt, 4)
    checked(world)
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    assert closed.usage.cached_tokens == 16  # of 20: the last one is always computed


def test_a_lookup_goes_out_when_the_request_arrives() -> None:
    world = World()
    world.add_engine()
    world.add_tier(FakeTier(capacity=8))
    world.ask("a", [5] * 9, 2)
    assert world.tier.counts[KvLookup.__name__] == 1
    checked(world)
    assert KvReserve.__name__ not in world.tier.counts or world.tier.l1
