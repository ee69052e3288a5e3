"""The victim policy `cheapest`: what a pause costs for each block that it frees."""

from __future__ import annotations

import pytest
from support.scheduler.known_costs import Known
from support.scheduler.world import World

from services.scheduler import preemption
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state import policies
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, Limits
from shared.step_model import StepModel

# A longer context costs more a token; a step of few tokens may take as long again.
QUADRATIC = StepModel(weights_us=10_000, token_ns=1_000, pair_ps=10_000_000)


def two_jobs(victim: str) -> tuple[World, Executor]:
    """A short job, then a long one; six of the sixteen blocks are free."""
    world = World(Limits(window=1, policy=policies.parse(f"victim={victim}")))
    world.add_engine(blocks=16, slots=4)
    (executor,) = world.scheduler.state.executors.values()
    executor.cost_model = Known(QUADRATIC, 700)
    world.ask("short", [5] * 8, 16, slo_class="batch")
    world.ask("long", [6] * 24, 16, slo_class="batch")
    world.deliver()
    return world, executor


def price_of(executor: Executor, sequence: Sequence) -> int:
    return preemption._price(executor, sequence, RecomputeCost.of(executor))


@pytest.mark.parametrize(("victim", "stays"), [("latest", "short"), ("cheapest", "long")])
def test_cheapest_pause_is_chosen_over_the_latest(victim: str, stays: str) -> None:
    world, executor = two_jobs(victim)
    world.ask("now", [7] * 26, 2, slo_class="interactive")
    running = {s.request.tokenized.request for s in executor.running}
    assert stays in running
    assert len(running & {"short", "long"}) == 1
    world.run()
    for name in ("short", "long", "now"):
        world.assert_answers(name)


def test_price_equals_one_by_hand() -> None:
    """Without a tier: the time to compute the tokens again, by the blocks that no other sequence holds."""
    _, executor = two_jobs("cheapest")
    short, long = executor.running
    again_us = RecomputeCost.of(executor).tokens_us(0, short.computed)
    blocks = len(short.table) + short.reserved
    assert price_of(executor, short) == again_us * 1000 // blocks
    assert price_of(executor, short) < price_of(executor, long)


def test_blocks_that_a_tier_holds_need_no_copy_down() -> None:
    _, executor = two_jobs("cheapest")
    long = executor.running[1]
    executor.pool.write_back = True
    before = price_of(executor, long)
    executor.pool.clean = set(long.table)
    assert price_of(executor, long) < before


def test_lower_class_is_paused_first_at_any_cost() -> None:
    _, executor = two_jobs("cheapest")
    short, long = executor.running
    short.level, short.turn.price, long.turn.price = 0, 1, 1_000
    assert policies.cheapest([short, long]) == [long, short]
