"""Which executors only prefill, and what becomes of a sequence that is handed over; see executors/roles.py.

`HEADRACE_HANDOVERS` makes the soak longer than in CI: 10,000 take some minutes.
"""

from __future__ import annotations

import os
import random

import pytest
from support.scheduler.fake_tier import FakeTier
from support.scheduler.world import World

from services.scheduler.executors import roles
from services.scheduler.state import policies
from services.scheduler.state.policies import RolesOption, RolesView, adaptive
from services.scheduler.state.requests import PeerDraining
from services.scheduler.state.state import DECODE, PREFILL, Limits

HANDOVERS = int(os.environ.get("HEADRACE_HANDOVERS", "100"))
SIZES = {"slots": 8, "blocks": 200, "max_context": 128}


@pytest.fixture(autouse=True)
def _at_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "PERIOD_US", 0)


def apart(policy: str = "loadtest.policies:prefill_1", executors: int = 2) -> World:
    """Executors of one host with a tier; the review has chosen their roles."""
    world = World(Limits(policy=policies.parse(f"roles={policy}"), step_tokens=16))
    for number in range(1, executors + 1):
        world.add_engine(f"e{number}", epoch=number, **SIZES)
    world.add_tier(FakeTier(capacity=400))
    world.tick(10)
    world.tick(10)
    return world


def roles_of(world: World) -> list[str]:
    return [executor.role for executor in world.scheduler.state.executors.values()]


def finished(world: World) -> World:
    world.finish()
    return world


def test_a_prompt_starts_on_one_and_goes_on_at_the_other() -> None:
    world = apart()
    assert roles_of(world) == [PREFILL, DECODE]
    world.ask("a", [5] * 60, 30)
    world.deliver_tier()
    state = world.scheduler.state
    assert len(state.executors["e1"].running) == 1
    meter = finished(world).scheduler.state.counters
    assert (meter.moves, meter.loads) == (1, 1)
    assert meter.recomputed_tokens <= 32 + 4
    by_prefill = [plan for plan in world.plans if plan.exec_epoch == 1]
    assert sum(sum(plan.counts) for plan in by_prefill) == 60, "it makes the first token and no other step"


def test_blocks_are_copied_while_the_prompt_is_computed() -> None:
    world = apart()
    world.ask("a", [5] * 120, 4)
    for _ in range(4):
        world.deliver("e1")
        world.deliver_tier()
        world.deliver_copy("e1")
        world.deliver_tier()
    assert not world.readers_of("a")[0].tokens
    assert world.scheduler.state.counters.stored_blocks > 0
    finished(world)


def test_a_change_is_wanted_twice() -> None:
    world = World(Limits(policy=policies.parse("roles=loadtest.policies:prefill_1")))
    for number in (1, 2):
        world.add_engine(f"e{number}", epoch=number, **SIZES)
    world.tick(10)
    assert roles_of(world) == ["", ""], "without a tier a handover would compute everything again"
    world.add_tier(FakeTier(capacity=400))
    assert roles_of(world) == ["", ""]
    world.tick(10)
    assert sorted(roles_of(world)) == [DECODE, PREFILL]
    world.set_policy("roles=colocated")
    world.tick(10)
    world.tick(10)
    assert roles_of(world) == ["", ""]
    assert world.scheduler.state.counters.role_changes == 2


def test_a_decode_without_room_elsewhere_goes_on_where_it_is() -> None:
    world = apart()
    world.check_every = 0
    world.scheduler.state.executors["e2"].pool.reserve(200)  # full
    world.ask("a", [5] * 20, 8)
    world.run()
    assert len(world.readers_of("a")[0].tokens) == 1
    world.tick(200_000)
    world.run()
    world.scheduler.state.executors["e2"].pool.unreserve(200)
    assert finished(world).scheduler.state.counters.moves == 0


def test_a_decode_that_no_decoding_executor_can_hold_stays_where_it_is() -> None:
    world = World(Limits(policy=policies.parse("roles=loadtest.policies:prefill_2"), step_tokens=16))
    for number, blocks in enumerate((200, 200, 8), 1):
        world.add_engine(f"e{number}", epoch=number, **SIZES | {"blocks": blocks})
    world.add_tier(FakeTier(capacity=400))
    world.tick(10)
    world.tick(10)
    assert roles_of(world) == [PREFILL, PREFILL, DECODE]
    world.ask("a", [5] * 60, 20)
    assert finished(world).scheduler.state.counters.moves == 0


def test_a_decode_gets_the_room_that_ended_sequences_keep_elsewhere() -> None:
    world = World(Limits(policy=policies.parse("roles=loadtest.policies:prefill_1"), step_tokens=16))
    world.add_engine("e2", epoch=2, **SIZES | {"blocks": 96})
    world.add_tier(FakeTier(capacity=400))
    for number in range(3):
        world.ask(f"ended{number}", [number + 3] * 90, 12)
        world.run()
    world.add_engine("e1", epoch=1, **SIZES)
    world.tick(10)
    world.tick(10)
    assert sorted(roles_of(world)) == [DECODE, PREFILL]
    kept = world.scheduler.state.executors["e2"].pool
    assert (kept.unreserved_blocks, kept.dirty_blocks) == (21, 75)
    world.ask("a", [9] * 120, 8)
    world.run()
    assert len(world.readers_of("a")[0].tokens) == 8
    assert finished(world).scheduler.state.counters.moves == 1


def test_a_higher_class_moves_before_one_that_waits_for_room() -> None:
    world = apart()
    pool = world.scheduler.state.executors["e2"].pool
    world.check_every = 0
    pool.reserve(190)
    world.ask("large", [5] * 100, 8, slo_class="standard")
    world.run()
    world.ask("small", [6] * 20, 8, slo_class="interactive")
    world.run()
    assert [len(world.readers_of(name)[0].tokens) for name in ("large", "small")] == [1, 8]
    pool.unreserve(190)
    assert finished(world).scheduler.state.counters.moves == 2


@pytest.mark.parametrize("left", ["e1", "e2"])
def test_one_that_is_left_alone_does_both(left: str) -> None:
    world = apart()
    world.ask("a", [5] * 60, 30)
    world.handle(PeerDraining("executor", "e2" if left == "e1" else "e1"))
    world.ask("b", [6] * 60, 30)
    for _ in range(4):
        world.deliver_tier()
    running = world.scheduler.state.executors[left].running
    assert "b" in [s.request.tokenized.request for s in running]
    finished(world)


def option(prefills: int, itl_us: int, tail_us: int, ttft_us: int) -> RolesOption:
    return RolesOption(prefills, itl_us, tail_us, ttft_us)


@pytest.mark.parametrize(
    ("now", "tail_us", "itl_us", "ttft_us", "wanted"),
    [
        (0, 80, 50, 200, 1),
        (0, 90, 50, 200, 0),  # too small a gain
        (0, 80, 51, 200, 0),  # decodes take longer
        (0, 50, 55, 200, 1),  # by 10 %, for half of the tail
        (0, 50, 56, 200, 0),
        (0, 51, 55, 200, 0),
        (0, 80, 50, 201, 0),  # prompts take longer
        (0, 50, 50, 220, 1),
        (0, 50, 50, 221, 0),
        (1, 100, 60, 240, 1),  # not worse by 20 %
        (1, 101, 60, 240, 0),
        (1, 100, 61, 240, 0),
        (1, 100, 60, 241, 0),
    ],
)
def test_the_rule_has_hysteresis(now: int, tail_us: int, itl_us: int, ttft_us: int, wanted: int) -> None:
    view = RolesView(2, now, (option(0, 50, 100, 200), option(1, itl_us, tail_us, ttft_us)))
    assert adaptive(view) == wanted


def test_division_stays_when_nothing_is_measured() -> None:
    assert adaptive(RolesView(4, 2, ())) == 0


def test_handovers_among_random_deaths_leave_nothing() -> None:
    """Executors and the tier die at any time: every answer is right, and no block, slot or lease is left."""
    dice, world, names = random.Random(7), apart(executors=3), ["e1", "e2", "e3"]
    epoch, asked = 10, 0
    while world.scheduler.state.counters.moves < HANDOVERS:
        state = world.scheduler.state
        if len(state.requests) < 12:
            asked += 1
            prompt = [dice.randrange(3, 20)] * dice.randrange(4, 100)
            world.ask(f"r{asked}", prompt, dice.randrange(2, 24), seed=asked, n=dice.choice((1, 1, 2)))
        for name in [name for name in names if name in world.engines]:
            world.deliver(name)
            if dice.random() < 0.7:
                world.deliver_copy(name)
        for _ in range(dice.randrange(4)):
            world.deliver_tier()
        world.tick(dice.choice((10, 500, 20_000)))
        if dice.random() < 0.02:
            name, epoch = dice.choice(names), epoch + 1
            if name in world.engines:
                world.crash(name)
            world.add_engine(name, epoch=epoch, **SIZES)
        if dice.random() < 0.01:
            if world.side.tier is not None:
                world.lose_tier()
            world.restart_tier()
    for reader in [reader for reader in world.readers.values() if reader.closed and reader.closed.code]:
        assert reader.closed is not None
        assert "executors have died while they computed" in reader.closed.message
        world.asked.pop(reader.opened.request, None)
    assert len(world.asked) > 0.9 * asked
    finished(world)
