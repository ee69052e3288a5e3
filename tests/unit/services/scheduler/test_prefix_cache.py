"""The prefix cache through the scheduler: `cached_tokens` against tries of what was computed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from support.scheduler import invariants
from support.scheduler.world import RESERVE, World

from services.scheduler.state.state import Limits

BT = 4  # block_tokens of these engines


def cached(world: World, request: str) -> int:
    closed = world.readers_of(request)[0].closed
    assert closed is not None
    return closed.usage.cached_tokens


@dataclass
class Trie:
    """Full blocks whose KV an executor with endless memory has, by tenant."""

    nodes: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def add(self, tenant: str, tokens: list[int]) -> None:
        self.nodes |= {(tenant, tuple(tokens[:end])) for end in range(BT, len(tokens) + 1, BT)}

    def hit(self, tenant: str, prompt: list[int]) -> int:
        """The last token is always computed."""
        end = 0
        while end + BT < len(prompt) and (tenant, tuple(prompt[: end + BT])) in self.nodes:
            end += BT
        return end


@pytest.mark.parametrize("seed", range(8))
def test_cached_tokens_equal_a_tries(seed: int) -> None:
    dice, trie, world = random.Random(seed), Trie(), World()
    world.add_engine(blocks=4_000, slots=4)
    for i in range(60):
        prompt = [
            token for _ in range(dice.randint(1, 6)) for token in dice.choice([(7,) * 4, (8,) * 4, (9,)])
        ]
        tenant, n = dice.choice(("one", "two")), dice.choice((1, 1, 2))
        world.ask(f"r{i}", prompt, dice.randint(1, 9), tenant=tenant, n=n, seed=dice.randrange(2))
        world.run()
        assert [cached(world, f"r{i}")] * n == [
            r.closed.usage.cached_tokens for r in world.readers_of(f"r{i}") if r.closed
        ]
        assert cached(world, f"r{i}") == trie.hit(tenant, prompt)
        for reader in world.readers_of(f"r{i}"):
            trie.add(tenant, [*prompt, *reader.tokens][:-1])  # the KV of the last token is never computed
        world.assert_answers(f"r{i}")
    world.assert_idle()


def test_two_tenants_never_share() -> None:
    world = World()
    world.add_engine()
    for tenant in ("one", "two", "one"):
        world.ask(f"{tenant}{len(world.asked)}", [7] * 13, 2, tenant=tenant)
        world.run()
    assert [cached(world, name) for name in ("one0", "two1", "one2")] == [0, 0, 12]


def test_one_that_was_admitted_before_the_first_had_computed_catches_up() -> None:
    """Both are admitted at once; each block that one computes the other adopts."""
    world = World(Limits(window=1, step_tokens=8))
    world.add_engine(slots=4)
    world.ask("busy", [5], 3)
    for name in ("first", "second"):
        world.ask(name, [7] * 25, 2)
    assert len(world.scheduler.state.executors["e1"].running) == 3
    world.run()
    world.assert_answers("first")
    world.assert_answers("second")
    computed = sum(
        count
        for plan in world.plans
        for count, fed in zip(plan.counts, plan.from_device, strict=True)
        if not fed
    )
    assert computed == 1 + 50 - cached(world, "first") - cached(world, "second")
    assert max(cached(world, "first"), cached(world, "second")) == 24
    world.assert_idle()


def test_own_work_done_again_is_not_cached() -> None:
    """Paused and back: what it finds of its own is neither cached nor charged."""
    world = World()
    world.add_engine(blocks=9, slots=3)
    for i in range(3):
        world.ask(f"r{i}", [7 + i] * 6, 16)
    world.run()
    assert world.scheduler.state.counters.preemptions > 0
    assert [cached(world, f"r{i}") for i in range(3)] == [0, 0, 0]
    for i in range(3):
        world.assert_answers(f"r{i}")
    served = world.scheduler.state.waiting.served.get(("public", 1))
    assert served == 3 * (6 + 2 * 16)
    world.assert_idle()


def test_a_failed_step_leaves_nothing_to_share() -> None:
    world = World(RESERVE)
    world.add_engine()
    world.ask("before", [7] * 13, 2)
    world.run()
    world.engines["e1"].fails = True
    world.ask("fails", [7] * 13, 2)
    world.run()
    world.ask("after", [7] * 13, 2)
    world.run()
    assert cached(world, "after") == 0
    world.assert_answers("after")
    world.ask("again", [7] * 13, 2)
    world.run()
    assert cached(world, "again") == 12
    world.assert_idle()


def test_another_executor_has_nothing_of_the_dead_one() -> None:
    world = World()
    world.add_engine("e1")
    world.ask("before", [7] * 13, 2)
    world.run()
    world.ask("moves", [7] * 13, 9)
    world.deliver()
    world.crash("e1")
    world.add_engine("e2")
    world.run()
    assert cached(world, "moves") == 12, "found once, and never charged: what is computed again is our loss"
    world.ask("after", [7] * 13, 2)
    world.run()
    assert cached(world, "after") == 12
    for name in ("moves", "after"):
        world.assert_answers(name)
    world.assert_idle()


def test_tables_of_long_hits_travel_in_several_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.step_planner.MAX_TABLE_ENTRIES", 8)
    world = World()
    world.add_engine(blocks=64, slots=6)
    world.ask("before", [7] * 21, 2)
    world.run()
    for i in range(6):
        world.ask(f"r{i}", [7] * 20 + [20 + i] * 3, 3, n=1)
    world.run()
    assert [cached(world, f"r{i}") for i in range(6)] == [20] * 6
    assert max(len(plan.table_blocks) for plan in world.plans) <= 8
    world.assert_idle()


def test_many_long_hits_at_once_travel_in_several_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.step_planner.MAX_TABLE_ENTRIES", 8)
    world = World(Limits(window=1))
    world.add_engine(blocks=64, slots=6)
    world.ask("before", [7] * 21, 12)
    for i in range(6):
        world.ask(f"r{i}", [7] * 20 + [20 + i] * 3, 3)
    world.run()
    assert max(len(plan.table_blocks) for plan in world.plans) <= 8
    for name in world.asked:
        world.assert_answers(name)


def test_sequence_keys_its_blocks_for_its_executor_when_another_kind_was_considered_last() -> None:
    """Two kinds with blocks of other sizes: admission asks both, and starts on the first."""
    world = World(Limits(accept_mixed=True))
    world.add_engine("e1", kind="f4", digest="a", blocks=64, block_tokens=4)
    world.add_engine("e2", kind="f8", digest="b", blocks=8, block_tokens=8)
    for number in range(2):
        world.ask(f"r{number}", [*range(1, 18)], 9)
        assert [e.running != [] for e in world.scheduler.state.executors.values()] == [True, False]
        invariants.check(world.scheduler.state)
        world.run()
        world.assert_answers(f"r{number}")
    assert [cached(world, f"r{number}") for number in range(2)] == [0, 16]
