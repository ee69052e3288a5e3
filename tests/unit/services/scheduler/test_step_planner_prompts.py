"""Among prompts those that have begun go first; one that starts on cached blocks has not begun by that. The
one that was placed first comes to its end, at any order of the others.
"""

from __future__ import annotations

import pytest
from support.executor.paged_engine import vector_of
from support.scheduler.world import World

from services.scheduler import step_planner
from services.scheduler.state import requests
from services.scheduler.state.state import Limits
from shared.messages import WHOLE_VECTOR

NEVER = requests.parse("interactive=0/50/0,standard=0/50/0,batch=0/500/0")
STEP_TOKENS, STEP_US = 16, 50_000


def test_prompts_with_a_cached_prefix_do_not_overtake_one_without_for_ever() -> None:
    """Two blocks of prompt a step. Each step another request comes whose prefix is cached and that needs both
    blocks; the long prompt was there before all but the first of them."""
    world = World(Limits(overlap="single", step_tokens=8))
    world.add_engine(blocks=200, slots=8)
    cached = list(range(10, 26))
    world.ask("warm", [*cached, 1], 1)
    world.run()
    world.ask("h", [*cached, *range(100, 108)], 1)
    world.ask("long", list(range(200, 240)), 1)
    for i in range(40):
        world.ask(f"h{i}", [*cached, *range(300 + 8 * i, 308 + 8 * i)], 1)
        world.deliver()
        if world.readers_of("long")[0].tokens:
            break
    assert len(world.readers_of("long")[0].tokens) == 1


def small_steps() -> World:
    """Steps of 16 tokens, one at a time."""
    world = World(Limits(classes=NEVER, step_tokens=STEP_TOKENS, window=1))
    world.add_engine(slots=16, blocks=400)
    return world


def crowd(world: World, until: str, streams: list[tuple[str, str]], most: int = 300) -> int:
    """Streams of a tenant and a class, each of which asks for one prompt of 24 tokens after the other:
    together more than all steps hold. The steps until any first token."""
    asked: dict[int, str] = {}
    for step in range(most):
        if until in world.accepted and world.readers_of(until)[0].tokens:
            return step
        for i, (tenant, slo_class) in enumerate(streams):
            if i not in asked or world.readers_of(asked[i])[0].closed is not None:
                asked[i] = f"{i}-{len(world.accepted)}"
                prompt = [100 + len(world.accepted)] * 24
                world.ask(asked[i], prompt, 1, tenant=tenant, slo_class=slo_class)
        world.deliver()
        world.now_us += STEP_US
    return most


LATE_STEPS = step_planner.LATE_US // STEP_US


def test_prompts_of_one_tenant_do_not_starve_after_tenants_with_one_request_each() -> None:
    world = small_steps()
    streams = [(f"t{i}", "standard") for i in range(6)]
    crowd(world, "", streams, 10)
    for name in ("a1", "a2"):
        world.ask(name, [7] * 24, 4, tenant="a")
    each = 24 // (STEP_TOKENS // step_planner.LATE_PART)
    assert crowd(world, "a1", streams) <= LATE_STEPS + 7 * each, (
        "six may be there before it, and are late, too"
    )
    assert crowd(world, "a2", streams) <= each


def test_started_prompt_does_not_starve_after_a_higher_class() -> None:
    world = small_steps()
    world.ask("long", [7] * 60, 4)
    part = STEP_TOKENS // step_planner.LATE_PART
    assert crowd(world, "long", [("public", "interactive")] * 4) <= LATE_STEPS + 60 // part + 2


def test_prompts_of_many_tenants_are_computed_one_after_the_other() -> None:
    """Not a piece of each in turn, so that all would end last: 60 tokens take 3.75 steps."""
    world = small_steps()
    world.ask("warm", [3] * 4, 1, tenant="w")
    world.run()
    for i in range(8):
        world.ask(f"r{i}", [100 + i] * 60, 2, tenant=f"t{i}")
    ends: dict[int, int] = {}
    for step in range(1, 100):
        world.deliver()
        for i in range(8):
            if world.readers_of(f"r{i}")[0].tokens:
                ends.setdefault(i, step)
    assert list(ends) == list(range(8))
    assert all(end <= 4 * (i + 1) for i, end in ends.items())


def test_late_prompts_leave_most_of_a_step_to_tenants_with_one_request() -> None:
    """However many they are: one of them has a quarter."""
    world = small_steps()
    for i in range(8):
        world.ask(f"a{i}", [7 + i] * 60, 4, tenant="a")
    world.now_us += 2 * step_planner.LATE_US
    world.deliver()
    world.ask("b", [99] * 12, 4, tenant="b")
    world.deliver()
    plan = world.plans[-1]
    assert list(plan.counts) == [4, 12]
    world.run()
    for name in world.accepted:
        world.assert_answers(name)


def test_a_late_prompt_has_what_the_others_leave() -> None:
    world = small_steps()
    world.ask("a0", [7] * 60, 4, tenant="a")
    world.ask("a1", [8] * 60, 4, tenant="a")
    world.now_us += 2 * step_planner.LATE_US
    world.ask("b", [99] * 3, 4, tenant="b")
    world.deliver()
    assert sorted(world.plans[-1].counts) == [3, 13]
    world.ask("c", [98] * 3, 4, tenant="c")
    world.deliver()
    assert sum(world.plans[-1].counts) == STEP_TOKENS


def test_a_step_has_no_more_vectors_than_its_result_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts beside them are not held up."""
    monkeypatch.setattr(step_planner, "MOST_VECTORS", 3)
    world = World(Limits(overlap="single", step_tokens=64))
    world.add_engine(blocks=200, slots=16)
    for i in range(10):
        world.ask(f"v{i}", [7, 8 + i], 1, pooling=WHOLE_VECTOR)
    world.ask("chat", [5, 6], 1)
    world.run()
    assert [len(plan.sample_slots) for plan in world.plans] == [1, 3 + 1, 3, 3]  # the first came alone
    for i in range(10):
        (reader,) = world.readers_of(f"v{i}")
        assert reader.tokens == []
        assert reader.closed is not None
        assert (reader.closed.reason, reader.closed.final) == ("stop", 0)
        assert reader.closed.vector == vector_of([7, 8 + i])
    world.assert_idle()


def test_the_prompt_of_a_vector_serves_the_next_one() -> None:
    """All its full blocks, since its last token is computed, too."""
    world = World()
    world.add_engine()
    world.ask("first", list(range(10, 18)), 1, pooling=WHOLE_VECTOR)
    world.run()
    world.ask("second", [*range(10, 18), 5], 1, pooling=WHOLE_VECTOR)
    world.ask("again", list(range(10, 18)), 1, pooling=4)
    world.run()
    closed = [world.readers_of(name)[0].closed for name in ("first", "second", "again")]
    assert [each.usage.cached_tokens for each in closed if each is not None] == [0, 8, 4]
    assert world.scheduler.state.counters.generated_tokens == 0
