"""Whether a step waits for places that are being copied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.state.state import Executor, Limits
from services.scheduler.step_planner import OVERDUE, are_copies_ending
from shared.codec import MAX_MESSAGE_BYTES, Envelope, encode

STEP_US, STORE_US = 60_000, 1_000
ASKED = {"first": [5] * 7, "second": [6] * 7}  # two blocks each, and both grow by one at a time


def only(world: World) -> Executor:
    (executor,) = world.scheduler.state.executors.values()
    return executor


@pytest.fixture
def short() -> World:
    """Two rows on four blocks want a fifth and a sixth: one has just been paused, and its blocks, which no
    tier holds, are being copied down."""
    limits = Limits(overlap="single")
    world = World(
        replace(limits, policy=replace(limits.policy, reservation="loadtest.policies:greedy")), now_us=1_000
    )
    world.add_engine(blocks=4, max_context=16)
    world.add_tier(FakeTier(capacity=64))
    executor = only(world)
    for request, prompt in ASKED.items():
        world.ask(request, prompt, 8)
    while not world.scheduler.state.counters.preemptions:
        executor.pace.step_us, executor.down.store_us = STEP_US, STORE_US
        assert world.deliver_tier() or world.deliver(), "no sequence was paused"
    return world


def test_a_row_is_in_the_step_for_which_its_place_comes_in_time(short: World) -> None:
    executor, planned = only(short), len(short.plans)
    assert executor.awaits_copies
    assert not executor.in_flight
    while len(short.plans) == planned:
        assert short.deliver_tier() or short.deliver_copy()
    (left,) = executor.running
    assert short.plans[-1].slots.tolist() == [left.slot]
    short.run()
    for request in ASKED:
        short.assert_answers(request)
    short.assert_idle()
    assert short.scheduler.state.counters.recomputed_tokens == 0


def test_no_sequence_starts_on_places_that_a_step_waits_for(short: World) -> None:
    executor = only(short)
    while executor.awaits_copies:
        assert len(executor.running) == 1
        assert short.deliver_tier() or short.deliver_copy()
    assert executor.in_flight


def test_no_step_waits_for_long(short: World) -> None:
    short.tick(OVERDUE * STORE_US + STEP_US)
    assert not only(short).awaits_copies


def test_no_step_waits_for_a_copy_that_costs_more_than_the_step(short: World) -> None:
    only(short).down.store_us = 2 * STEP_US
    short.tick(10)
    assert not only(short).awaits_copies


def test_how_long_stores_take_is_learned(short: World) -> None:
    executor = only(short)
    executor.down.store_us = 0
    began_us = min(job.began_us for job in short.scheduler.state.tiers.jobs.values())
    while not executor.down.store_us:
        assert short.deliver_tier() or short.deliver_copy() or short.deliver()
    assert executor.down.store_us == short.now_us - began_us


def test_a_step_has_a_row_for_each_of_1024_slots_and_its_messages_fit() -> None:
    slots, prompt, answer = 1_024, 1, 9
    world = World(now_us=1_000)
    world.add_engine(blocks=4 * slots, slots=slots, max_step_tokens=slots + 256)
    for number in range(slots + 1):
        world.ask(f"r{number}", [number % 900 + 50] * prompt, answer)
    world.run()
    fullest = max(world.plans, key=lambda plan: len(plan.slots))
    assert len(fullest.slots) == slots, "all but the last request, which waits for a slot"
    for plan in world.plans:
        assert len(encode(Envelope("scheduler.s", 1, 1, plan))) <= MAX_MESSAGE_BYTES
    for number in range(slots + 1):
        world.assert_answers(f"r{number}")
    world.assert_idle()


@pytest.mark.parametrize(("slots", "decodes", "tokens"), [(64, 60, 16), (16, 12, 52)])
def test_a_step_full_of_decodes_takes_a_quarter_of_step_tokens_of_prompts(
    slots: int, decodes: int, tokens: int
) -> None:
    """Steps have 64 tokens: what the decodes leave, or a quarter."""
    world = World(Limits(overlap="single", step_tokens=64), now_us=1_000)
    world.add_engine(blocks=1_000, slots=slots, max_step_tokens=200, max_context=300)
    for number in range(decodes):
        world.ask(f"d{number}", [number + 5] * 2, 40)
    while len(only(world).running) < decodes or any(count > 1 for count in world.plans[-1].counts):
        world.deliver()
    world.ask("long", list(range(5, 205)), 2)
    while world.plans[-1].counts[-1] == 1:
        world.deliver()
    assert world.plans[-1].counts.tolist() == [1] * decodes + [tokens]


LOOP_US = 100


@pytest.fixture
def ahead() -> World:
    """Steps run ahead; a sequence has just been paused while one is in flight."""
    limits = Limits(overlap="run_ahead", window=2)
    world = World(
        replace(limits, policy=replace(limits.policy, reservation="loadtest.policies:greedy")), now_us=1_000
    )
    world.add_engine(blocks=12, slots=6)
    world.add_tier(FakeTier(capacity=64))
    for number in range(4):
        world.ask(f"r{number}", [number + 3] * 6, 18)
    while not world.scheduler.state.counters.preemptions:
        assert world.deliver_tier() or world.deliver(), "no sequence was paused"
    return world


def test_a_victim_is_copied_while_the_steps_that_name_it_run(ahead: World) -> None:
    executor = only(ahead)
    assert executor.in_flight
    copied = [job for job in ahead.scheduler.state.tiers.jobs.values() if not job.up]
    fenced = {block for fence in executor.pool._fences.values() for block in fence}
    assert copied
    for job in copied:
        assert job.after_step == 0
        assert fenced.issuperset(job.blocks)
    while ahead.scheduler.state.tiers.jobs:
        assert ahead.deliver_tier() or ahead.deliver_copy()
    free = executor.pool.free_blocks
    ahead.deliver()
    assert executor.pool.clean
    assert executor.pool.free_blocks + sum(len(s.table) for s in executor.running) >= free
    ahead.run()
    for number in range(4):
        ahead.assert_answers(f"r{number}")
    assert ahead.scheduler.state.counters.recomputed_tokens <= ahead.scheduler.state.counters.preemptions


def test_a_plan_waits_for_a_copy_that_is_over_before_the_step_that_runs(ahead: World) -> None:
    executor, state = only(ahead), ahead.scheduler.state
    (flight,) = list(executor.in_flight)[:1]
    executor.in_flight.clear()
    executor.in_flight.append(flight)
    flight.predicted_us, executor.pace.last_us = STEP_US, state.now_us
    executor.cost_model.loop_us, executor.down.store_us = LOOP_US, STORE_US
    assert are_copies_ending(state, executor, 1)
    executor.down.store_us = STEP_US
    assert not are_copies_ending(state, executor, 1), "it ends too late"
    executor.down.store_us = STORE_US
    state.now_us += OVERDUE * STORE_US
    assert not are_copies_ending(state, executor, 1), "it is overdue"
    state.now_us -= OVERDUE * STORE_US
    executor.cost_model.loop_us = 0
    assert not are_copies_ending(state, executor, 1), "no result has shown how long a plan is on its way"
    executor.cost_model.loop_us = STEP_US
    assert not are_copies_ending(state, executor, 1), "the plan would come too late"
    executor.cost_model.loop_us, state.blocked_on = LOOP_US, ()
    assert not are_copies_ending(state, executor, 0), "no sequence waits for a place"
    executor.in_flight.clear()
    assert not are_copies_ending(state, executor, 1), "the device would stand still"


def test_paused_sequence_has_its_blocks_located_before_its_turn(ahead: World) -> None:
    state = ahead.scheduler.state
    while not any(group.resumes and group.lookup_results for group in state.waiting):
        assert ahead.deliver_tier() or ahead.deliver_copy() or ahead.deliver(), "no lookup was made"
    (group,) = [group for group in state.waiting if group.resumes and group.lookup_results]
    assert not group.lookup_since_us, "it asked at its turn"
