"""What routing makes of executors of different speeds."""

from __future__ import annotations

import pytest

from loadtest.sim.arms import limits_of
from loadtest.sim.many_executors import of_ideal, overload
from loadtest.sim.scenarios import SCENARIOS
from loadtest.simulator.world import Setup, World

pytestmark = pytest.mark.no_cover  # long runs: traced they take three times as long


def test_a_fast_and_a_slow_executor_are_done_as_soon_as_by_the_best_split() -> None:
    """Prompts of 4,000 to 12,000 tokens, more than both can do, on speeds of 4 to 1."""
    scenario, found = SCENARIOS["makespan_documents"], {}
    for arm in scenario.arms:
        world = World(
            Setup((scenario.machine, *scenario.others), limits_of(arm), 1), overload("documents", 1, 20)
        )
        world.run()
        assert all(record.served for record in world.readers.records)
        found[arm.name] = of_ideal(world)["of_ideal"]
    assert found["ttft"] <= 1.1, found
    assert found["prefix"] > 1.15, found  # the load is such that a split by hits or room is worse
    assert found["room"] > 1.15, found
