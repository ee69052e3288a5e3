"""Requests that arrive together get their room together, and no more than they need."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from support.scheduler.world import World
from support.scheduler.world_checks import ALL

from services.scheduler import admission, headroom, preemption, step_planner
from services.scheduler.admission import MAX_TOGETHER
from services.scheduler.state import requests
from services.scheduler.state.policies import Policy
from services.scheduler.state.requests import Arrived, PeerDraining, Sequence
from services.scheduler.state.state import Executor, Limits, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.messages import Cancel

NEVER = requests.parse("interactive=0/50/0,standard=0/50/0,batch=0/50/0")
LONG = 40  # tokens: no request ends within a test's first steps


def full(slots: int = 8, limits: Limits | None = None, tenant: str = "public", **facts: int) -> World:
    """An engine with a row of class batch in each slot, and two steps in flight."""
    world = World(limits or Limits(classes=NEVER, window=2, overlap="run_ahead"), checks=[*ALL])
    world.add_engine(**{"slots": slots, "blocks": 400, **facts})
    for i in range(slots):
        world.ask(f"batch{i}", [7 + i] * 4, LONG, slo_class="batch", tenant=tenant)
    for _ in range(4):
        world.deliver()
    assert len(running(world)) == slots
    return world


def running(world: World, name: str = "e1") -> list[str]:
    return [s.request.tokenized.request for s in world.scheduler.state.executors[name].running]


def preemptions(world: World) -> int:
    return world.scheduler.state.counters.preemptions


def finish(world: World, *without: str) -> None:
    world.run()
    for name in world.accepted:
        if name not in without:
            world.assert_answers(name)
    world.assert_idle()


@pytest.mark.parametrize("overlap", ["single", "run_ahead", "two_batch"])
def test_a_burst_runs_after_the_steps_in_flight(overlap: str) -> None:
    """One row for each result would let the last of six wait for more than ten steps."""
    world = full(limits=Limits(classes=NEVER, window=2, overlap=overlap))
    burst = [f"now{i}" for i in range(6)]
    for i, name in enumerate(burst):
        world.ask(name, [90 + i] * 4, 10, slo_class="interactive")
    assert preemptions(world) == 6
    for _ in range(3):
        world.deliver()
    assert set(burst) < set(running(world))
    assert preemptions(world) == 6
    finish(world)


def test_a_burst_of_more_than_are_looked_at_gets_all_rows_in_two_rounds() -> None:
    slots = MAX_TOGETHER + 8
    world = full(slots, max_step_tokens=512)
    for i in range(slots):
        world.ask(f"now{i}", [90 + i] * 4, LONG, slo_class="interactive")
    assert preemptions(world) == 1 + MAX_TOGETHER
    for _ in range(7):
        world.deliver()
    assert sum(name.startswith("now") for name in running(world)) == slots
    assert preemptions(world) == slots
    finish(world)


def test_each_of_a_mixed_burst_takes_only_from_classes_below_it() -> None:
    """From class batch for all but its own, then from class standard for an interactive request alone."""
    world = full(4, tenant="z")
    world.ask("batch", [50] * 4, 10, slo_class="batch", tenant="c")
    world.ask("a1", [51] * 4, LONG, slo_class="standard", tenant="a")
    world.ask("a2", [52] * 4, LONG, slo_class="standard", tenant="a")
    world.ask("a3", [53] * 4, LONG, slo_class="interactive", tenant="a")
    for _ in range(3):
        world.deliver()
    assert preemptions(world) == 3
    assert sorted(name for name in running(world) if name.startswith("a")) == ["a1", "a2", "a3"]
    world.ask("a4", [54] * 4, 10, slo_class="standard", tenant="a")
    world.ask("a5", [55] * 4, 10, slo_class="interactive", tenant="a")
    world.ask("a6", [56] * 4, 10, slo_class="interactive", tenant="a")
    for _ in range(3):
        world.deliver()
    assert {"a3", "a5", "a6"} < set(running(world))
    assert "a4" not in running(world), "a row of its own class made room for it"
    assert preemptions(world) == 5
    finish(world)


@pytest.mark.parametrize("together", [0, MAX_TOGETHER])
def test_a_tenant_without_a_running_sequence_has_its_part_of_a_burst(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_TOGETHER", together)
    world = full(4)
    for i in range(6):
        world.ask(f"a{i}", [60 + i] * 4, 10, slo_class="interactive", tenant="a")
    world.ask("b0", [90] * 4, 10, slo_class="interactive", tenant="b")
    for _ in range(9):
        world.deliver()
    assert preemptions(world) == 3
    assert {"a0", "a1", "b0"} < set(running(world))
    finish(world)


@pytest.mark.parametrize("together", [0, MAX_TOGETHER])
def test_a_burst_leaves_other_tenants_their_share(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many start as would one by one: those that have room, but do not run yet, count."""
    monkeypatch.setattr(admission, "MAX_TOGETHER", together)
    world = full(tenant="z")
    for i in range(8):
        world.ask(f"now{i}", [90 + i] * 4, LONG, slo_class="interactive")
    for _ in range(20):
        world.deliver()
    assert sorted(set(running(world)) - {f"batch{i}" for i in range(8)}) == [f"now{i}" for i in range(5)]
    assert preemptions(world) == 5
    finish(world)


def test_the_second_of_a_burst_takes_the_free_slot_of_another_executor() -> None:
    world = full(4)
    world.add_engine("e2", slots=4, blocks=400)
    for i in range(3):
        world.ask(f"more{i}", [40 + i] * 4, LONG, slo_class="batch", tenant="z")
    world.ask("ends", [44] * 4, LONG, slo_class="batch", tenant="z")
    for _ in range(4):
        world.deliver("e2")
    world.handle(Arrived("client", Cancel(tenant="z", request="ends")))
    assert world.scheduler.state.executors["e2"].pool.fenced_slots == 1
    for i in range(3):
        world.ask(f"now{i}", [90 + i] * 4, 10, slo_class="interactive")
    assert preemptions(world) == 2, "three requests, and one slot is about to be free"
    for _ in range(4):
        world.deliver("e1"), world.deliver("e2")
    assert sum(name.startswith("now") for name in (*running(world), *running(world, "e2"))) == 3
    assert preemptions(world) == 2
    finish(world, "ends")


@pytest.mark.parametrize("drains", [False, True])
def test_a_request_that_waits_for_another_executor_takes_no_row(drains: bool) -> None:
    """It fits the large executor alone, which is full of its own class or drains; the one after it gets a
    row of the small executor."""
    world = full(4, blocks=80)
    world.add_engine("large", slots=1, blocks=400, max_context=1_600)
    world.ask("holds", [5] * 4, LONG, slo_class="interactive")
    world.ask("now0", [90] * 4, 10, slo_class="interactive")
    world.ask("large", [6] * 600, 10, slo_class="interactive")
    if drains:
        world.handle(PeerDraining("executor", "large"))
    world.ask("now1", [91] * 4, 10, slo_class="interactive")
    assert running(world, "large") == ["holds"]
    for _ in range(3):
        world.deliver("e1")
    assert {"now0", "now1"} < set(running(world))
    assert preemptions(world) == 2
    if not drains:
        finish(world)


def test_no_row_goes_for_a_request_after_one_that_waits() -> None:
    """The large one holds the executor until the first row ends: a small one after it would not start."""
    limits = Limits(classes=NEVER, window=2, policy=Policy(reservation="reserve"))
    world = World(limits, checks=[*ALL])
    world.add_engine(slots=4, blocks=48, max_context=200)
    world.ask("first", [5] * 4, 76, slo_class="interactive")  # 20 blocks
    for i in range(3):
        world.ask(f"batch{i}", [7 + i] * 4, 12, slo_class="batch")  # 4 each
    for _ in range(3):
        world.deliver()
    world.ask("now0", [90] * 4, 4, slo_class="interactive")
    world.ask("large", [6] * 100, 60, slo_class="interactive")  # 40
    world.ask("now1", [91] * 4, 4, slo_class="interactive")
    assert preemptions(world) == 1
    finish(world)


def test_the_order_of_a_burst_is_that_of_admission() -> None:
    """Tenant c has nothing running, so its request of class standard takes the row of class batch. Tenant z
    then takes a row of class standard for its interactive one."""
    world = World(Limits(classes=NEVER, window=2, overlap="run_ahead"), checks=[*ALL])
    world.add_engine(slots=4, blocks=400)
    for i, slo_class in enumerate(("standard", "standard", "batch", "batch")):
        world.ask(f"{slo_class}{i}", [7 + i] * 4, LONG, slo_class=slo_class, tenant="z")
    for _ in range(4):
        world.deliver()
    world.ask("b", [90] * 4, 10, slo_class="interactive", tenant="b")
    world.ask("c", [91] * 4, 10, slo_class="standard", tenant="c")
    world.ask("z", [92] * 4, 10, slo_class="interactive", tenant="z")
    for _ in range(2):
        world.deliver()
    assert {"b", "z", "c"} < set(running(world))
    assert preemptions(world) == 3
    finish(world)


def test_rows_that_were_preempted_for_cancelled_requests_run_again() -> None:
    world = full()
    for i in range(6):
        world.ask(f"now{i}", [90 + i] * 4, 10, slo_class="interactive")
    gone = [f"now{i}" for i in range(2, 6)]
    for name in gone:
        world.handle(Arrived("client", Cancel(tenant="public", request=name)))
    for _ in range(3):
        world.deliver()
    assert preemptions(world) == 6
    assert sum(name.startswith("batch") for name in running(world)) == 6
    finish(world, *gone)


def test_a_cached_prefix_that_a_row_holds_is_counted_once() -> None:
    """Four requests share 12 blocks with a running one. Each needs 2 more: a row of class batch is enough
    for all four, where each with a prefix of its own would need more than all rows hold."""
    limits = Limits(classes=NEVER, window=2, policy=Policy(reservation="reserve"))
    world = World(limits, checks=[*ALL])
    world.add_engine(slots=16, blocks=48, max_context=100)
    prefix = list(range(100, 148))
    world.ask("first", [*prefix, 5], 7, slo_class="interactive")  # 14 blocks
    for i in range(3):
        world.ask(f"batch{i}", [7 + i] * 4, LONG, slo_class="batch", tenant="z")  # 11 each
    world.deliver()
    assert len(running(world)) == 4
    for i in range(4):
        world.ask(f"now{i}", [*prefix, 10 + i], 7, slo_class="interactive")
    for _ in range(3):
        world.deliver()
    assert len(running(world)) == 7
    assert preemptions(world) == 1
    finish(world)


def test_no_row_goes_for_blocks_that_the_request_shares_with_it() -> None:
    """The request shares 12 blocks with the row of class batch, and lacks 8 others: the row has 2."""
    limits = Limits(classes=NEVER, window=2, policy=Policy(reservation="reserve"))
    world = World(limits, checks=[*ALL])
    world.add_engine(blocks=24, max_context=100)
    prefix = list(range(100, 148))
    world.ask("batch", [*prefix, 5], 7, slo_class="batch")  # 14 blocks
    world.ask("first", [7] * 4, 28, slo_class="interactive")  # 8
    for _ in range(2):
        world.deliver()
    world.ask("now", [*prefix, 6], 39, slo_class="interactive")  # 22
    assert preemptions(world) == 0
    finish(world)
    assert preemptions(world) == 0


@contextmanager
def exact(seen: list[int]) -> Iterator[None]:
    """Each preemption for waiting groups is needed then, and all of one call are enough. `seen` gets how many
    groups each successful call made room for."""
    until_fits, preempt = preemption._preempt_until_fits, preemption.preempt
    calls: list[tuple[SequenceGroup, ...]] = []

    def preempted(state: State, executor: Executor, victim: Sequence, why: str, of: list[Sequence]) -> None:
        for groups in calls:
            assert max(headroom.shortfall(state, executor, *groups)) > 0, "a victim without need"
            assert "has no running sequence" in why or victim.level > groups[-1].level, "class inversion"
        preempt(state, executor, victim, why, of)

    def checked(
        state: State,
        executor: Executor,
        groups: list[SequenceGroup],
        rows: list[Sequence],
        why: str,
        cede: bool = False,
    ) -> bool:
        before = state.counters.preemptions
        calls.append(tuple(groups))
        fits = until_fits(state, executor, groups, rows, why, cede)
        calls.pop()
        assert not fits or max(headroom.shortfall(state, executor, *groups)) <= 0, "victims for nothing"
        assert fits or state.counters.preemptions == before, "victims for nothing"
        seen.extend([len(groups)] * fits)
        return fits

    with (
        mock.patch.object(preemption, "_preempt_until_fits", checked),
        mock.patch.object(preemption, "preempt", preempted),
    ):
        yield


def test_no_more_are_preempted_than_a_burst_needs() -> None:
    """Bursts of any sizes, classes and tenants, with shared prefixes, on one or two executors."""
    seen: list[int] = []
    for seed in range(30):
        dice = random.Random(seed)
        policy = Policy(reservation=dice.choice(("on_demand", "reserve", "foreseen")))
        overlap = dice.choice(("single", "run_ahead", "two_batch", "auto"))
        limits = Limits(classes=NEVER, window=dice.randint(1, 3), policy=policy, overlap=overlap)
        world = World(limits, took_us=dice.choice((0, 200)), checks=[*ALL])
        for i in range(dice.randint(1, 2)):
            world.add_engine(f"e{i}", slots=dice.randint(2, 9), blocks=dice.randint(24, 90))
        with exact(seen):
            for burst in range(4):
                slo_classes = requests.CLASS_NAMES[2 * (burst == 0) :]
                for i in range(dice.randint(1, 10)):
                    prompt = [*dice.choice(([], [9] * 8)), *(dice.randrange(5, 900) for _ in range(4))]
                    world.ask(
                        f"r{burst}.{i}",
                        prompt,
                        dice.randint(4, 24),
                        tenant=dice.choice("aab"),
                        n=dice.choice((1, 1, 1, 2)),
                        slo_class=dice.choice(slo_classes),
                    )
                for _ in range(dice.randint(1, 5)):
                    world.deliver(dice.choice(list(world.engines)))
            finish(world)
    assert seen.count(2) > 10
    assert max(seen) >= 4


LOOP_US = 100


def held(world: World) -> Executor:
    """The engine of `full`, after the first result since an interactive request came."""
    (executor,) = world.scheduler.state.executors.values()
    executor.cost_model.loop_us = LOOP_US
    planned = len(world.plans)
    world.deliver()
    assert len(world.plans) in (planned, planned + 1)
    return executor


def test_the_next_step_waits_for_a_slot_that_the_steps_in_flight_free() -> None:
    """The prompt is in the step after those in flight, not in the one after that; and not each time."""
    world = full()
    (executor,) = world.scheduler.state.executors.values()
    world.now_us += step_planner.HELD_LOOPS * LOOP_US
    world.ask("now0", [90] * 4, 10, slo_class="interactive")
    assert len(held(world).in_flight) == 1, "a step was planned without the prompt"
    world.deliver()
    (slot,) = [s.slot for s in executor.running if s.level == 0]
    assert slot in executor.in_flight[0].plan.slots
    world.ask("now1", [91] * 4, 10, slo_class="interactive")
    assert len(held(world).in_flight) == 2, "a second step waited within HELD_LOOPS loops"
    finish(world)


def test_no_step_waits_for_a_request_of_the_lowest_class_that_runs() -> None:
    world = full()
    world.now_us += step_planner.HELD_LOOPS * LOOP_US
    world.handle(Arrived("client", Cancel(tenant="public", request="batch0")))
    world.ask("more", [90] * 4, 10, slo_class="batch")
    assert len(held(world).in_flight) == 2
    finish(world, "batch0")
