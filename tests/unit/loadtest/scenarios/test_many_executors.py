"""What routing makes of executors of different speeds, and of one prefix for all requests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import takewhile

from loadtest.scenarios.definitions import H200, SCENARIOS
from loadtest.scenarios.many_executors import balance, of_ideal, one_hot, overload
from loadtest.scenarios.real_tier import RealTier
from loadtest.scenarios.run import limits_of
from loadtest.simulator.requests import SimRequest, Workload, plain_prompt
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import FIRST_US, Setup, World

SECOND_US = 1_000_000


def test_a_fast_and_a_slow_executor_are_done_as_soon_as_by_the_best_split() -> None:
    """Prompts of 4,000 to 12,000 tokens, more than both can do, on speeds of 4 to 1."""
    scenario, found = SCENARIOS["makespan_documents"], {}
    for arm in scenario.arms:
        world = World(Setup((scenario.machine, *scenario.others), limits_of(arm), 1), overload(1, 10))
        world.run()
        assert all(record.served for record in world.readers.records)
        found[arm.name] = of_ideal(world)["of_ideal"]
    assert found["ttft"] <= 1.1, found
    assert found["prefix"] > 1.15, found  # the load is such that a split by hits or room is worse
    assert found["room"] > 1.15, found


def test_one_hot_prefix_spreads_over_all_executors_within_ten_seconds() -> None:
    requests = tuple(takewhile(lambda asked: asked.arrival_us < 12 * SECOND_US, one_hot(1)))
    found = {}
    for executors in (1, 4):
        world = World(Setup((H200,) * executors), Workload(requests))
        world.begin()
        world.go_until(FIRST_US + 10 * SECOND_US)
        busiest = balance(world)["busiest_to_mean"]
        while world.next_event():
            pass
        records = world.readers.records
        assert all(record.served for record in records)
        hits = sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records)
        found[executors] = busiest, hits
    assert found[4][0] <= 1.3, found
    assert found[4][1] >= 0.9 * found[1][1] > 0.5, found


def test_a_closed_loop_divides_evenly_also_when_the_caches_are_full() -> None:
    """Equal requests that share nothing, on executors that differ a little. An executor keeps the blocks of
    ended sequences until they are needed: one with fewer rows must not get fewer requests for that."""
    model = H200.model
    near = replace(H200, blocks=1_024)
    slower = replace(near, model=replace(model, weights_us=model.weights_us * 11 // 10))
    tier = partial(RealTier, TierSpec(l1_bytes=1 << 30), near.block_bytes)
    world = World(Setup((near, slower), tier=tier), Workload(()))
    world.begin()
    for number in range(4):
        prompts = [plain_prompt(1_000 * number + at, 512) for at in range(96)]
        asked = [SimRequest(f"{number}.{at}", 0, prompt, 64, 64) for at, prompt in enumerate(prompts)]
        before = [engine.totals.prefill_tokens for engine in world.engines.values()]
        assert all(record.served for record in world.go_on(Workload(tuple(asked), clients=16)).records)
        after = [engine.totals.prefill_tokens for engine in world.engines.values()]
        shares = [now - then for now, then in zip(after, before, strict=True)]
        assert min(shares) >= 0.45 * sum(shares), f"round {number}: {shares}"
