"""A lookup of a prompt with more blocks than a message has room for, and what it shows of reuse."""

from __future__ import annotations

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.kv_tiers import lookups
from services.scheduler.lifecycle import new_sequence
from services.scheduler.state.requests import Request
from services.scheduler.state.reuse import Reused
from services.scheduler.state.transfers import LookupResult
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.kv_blocks import extend, root_key
from shared.messages import KvLookup, ints

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


def on_device_and_in_l1(prompt: list[int]) -> World:
    """All blocks of the prompt are on the device and in L1."""
    world = World()
    world.add_engine("e1", **FACTS)
    world.add_tier(FakeTier(capacity=128))
    for number in range(2):
        world.ask(f"first{number}", prompt, 2)
        world.run()
    for _ in range(60):
        world.tick(200_000)
        world.run()
    pool = world.scheduler.state.executors["e1"].pool
    assert (pool.dirty_blocks, len(pool.clean)) == (0, 20)
    return world


def test_load_goes_on_after_the_blocks_that_only_the_device_has() -> None:
    """The device has evicted the head of a prompt and its end, and L1 the middle."""
    prompt = [number % 900 + 3 for number in range(80)]
    world = on_device_and_in_l1(prompt)
    pool = world.scheduler.state.executors["e1"].pool
    keys = [pool.key_of[block] for block in range(128) if pool.key_of[block] is not None]
    chain: list[bytes] = []
    extend(chain, root_key("f", "public"), ints(prompt), 4, 80)
    assert set(chain) == set(keys)
    for key in chain[:5] + chain[12:]:
        pool.forget(pool.block_of[key])
    for key in chain[5:12]:
        world.tier.forget(key)
    world.run()
    world.ask("second", prompt, 2)
    world.run()
    closed = world.readers_of("second")[0].closed
    assert closed is not None
    assert closed.usage.cached_tokens == 76  # all but the last block, which holds the last token
    assert world.scheduler.state.counters.loads == 2
    world.finish()


def test_lookup_with_a_hole_is_repeated_after_a_store() -> None:
    """The device had those blocks then: it may have stored and evicted them since."""
    world = on_device_and_in_l1([number % 900 + 3 for number in range(80)])
    state = world.scheduler.state
    executor, (tier,) = state.executors["e1"], state.tiers.by_host.values()
    request = next(iter(world.asked.values()))
    world.check_every = 0
    for resumes, found, is_old in (
        (False, (1, 1, 0, 0), False),
        (False, (0, 0, 1, 1), True),
        (False, (1, 0, 1, 0), True),
        (True, (1, 1, 0, 0), True),
        (True, (1, 1, 1, 1), False),
    ):
        asked = Request(request, "", "t", arrival_us=state.now_us, deadline_us=10**12)
        sequence = new_sequence(state, asked, 0)
        sequence.tokens = ints([9] * 20)
        group = SequenceGroup(asked, [sequence], sequence.seq, resumes=resumes)
        target = (tier.actor, executor.hello.fingerprint)
        group.lookup_results[target] = LookupResult(state.now_us, found, state.now_us, stores=tier.stores - 1)
        assert lookups._is_old(state, executor, tier, group, lookups.STALE_US) == is_old
        group.lookup_results[target].stores = tier.stores
        assert not lookups._is_old(state, executor, tier, group, lookups.STALE_US)
