"""What routing makes of executors of different speeds, and of one prefix for all requests."""

from __future__ import annotations

from itertools import takewhile

from loadtest.scenarios.definitions import H200, SCENARIOS
from loadtest.scenarios.many_executors import balance, of_ideal, one_hot, overload
from loadtest.scenarios.run import limits_of
from loadtest.simulator.requests import Workload
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
