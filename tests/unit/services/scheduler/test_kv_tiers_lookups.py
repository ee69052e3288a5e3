"""A lookup of a prompt with more blocks than a message has room for, and what it shows of reuse."""

from __future__ import annotations

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.kv_tiers import lookups
from services.scheduler.state.reuse import Reused
from shared.messages import KvLookup

PAGE = 4
FACTS = {"blocks": 128, "max_context": 256, "block_tokens": 4}


def stored(monkeypatch: pytest.MonkeyPatch, prompt: list[int]) -> World:
    """The prompt is in L1, and a new engine holds none of it."""
    monkeypatch.setattr(lookups, "MAX_KEYS", PAGE)
    world = World()
    world.add_engine("e1", **FACTS)
    world.add_tier(FakeTier(capacity=128))
    world.ask("first", prompt, 2)
    world.run()
    for _ in range(4):
        world.tick(200_000)
        world.run()
    world.crash("e1")
    world.add_engine("e2", epoch=2, **FACTS)
    world.scheduler.state.reuse.tenants["public"] = Reused(0, 0)
    return world


@pytest.mark.parametrize("tokens", [17, 18, 33, 60, 200])
def test_prompt_wholly_in_l1_counts_as_reused_at_any_length(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    prompt = [number % 900 + 3 for number in range(tokens)]
    world = stored(monkeypatch, prompt)
    world.ask("second", prompt, 2)
    world.run()
    reused = world.scheduler.state.reuse.tenants["public"]
    assert (reused.found_tokens, reused.tokens) == (tokens, tokens)
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    assert closed.usage.cached_tokens == (tokens - 1) // 4 * 4
    world.finish()


def test_lookup_of_an_unknown_prompt_stops_at_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stored(monkeypatch, [5] * 60)
    asked = world.tier.counts[KvLookup.__name__]
    world.ask("other", [6] * 60, 2)
    world.run()
    assert world.tier.counts[KvLookup.__name__] == asked + 1
    assert world.scheduler.state.reuse.tenants["public"].found_tokens == 0
    world.finish()


def test_prompt_that_is_half_in_l1_counts_as_half_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [number % 900 + 3 for number in range(200)]
    world = stored(monkeypatch, prompt)
    world.ask("second", prompt[:100] + [7] * 100, 2)
    world.run()
    assert world.scheduler.state.reuse.tenants["public"].found_tokens == 100
    world.finish()


def test_answer_that_comes_after_the_wait_counts_what_is_still_unknown_as_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first message was answered, and the load will show the rest: the prompt starts after its wait."""
    prompt = [number % 900 + 3 for number in range(60)]
    world = stored(monkeypatch, prompt)
    world.ask("second", prompt, 2)
    assert world.deliver_tier()
    (group,) = world.scheduler.state.waiting
    (result,) = group.lookup_results.values()
    assert (len(result.found), result.goes_on) == (PAGE, True)
    world.tier.replies.clear()
    world.tier.frozen = True
    world.tick(lookups.MOST_WAIT_US)
    assert not list(world.scheduler.state.waiting)
    assert world.scheduler.state.reuse.tenants["public"].found_tokens == 60
    world.tier.thaw(world.now_us)
    world.finish()
