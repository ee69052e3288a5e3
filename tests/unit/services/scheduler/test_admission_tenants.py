"""Two tenants: at any requests of one of them, the other gets its part, and is never refused for it."""

from __future__ import annotations

import pytest
from support.scheduler.known_costs import Known
from support.scheduler.world import World
from support.scheduler.world_checks import ALL

from services.scheduler import admission
from services.scheduler.state import requests
from services.scheduler.state.policies import Policy
from services.scheduler.state.state import Limits
from shared.step_model import StepModel

SLO = requests.parse("interactive=1000/50/0,standard=1000/50/0,batch=0/50/0")
NEVER = requests.parse("interactive=0/50/0,standard=0/50/0,batch=0/50/0")
WINDOW = 2


def flooded(slots: int = 4, blocks: int = 64, **more: object) -> World:
    """Tenant a has filled the executor, and the queue."""
    world = World(Limits(classes=SLO, max_waiting=20, max_waiting_tokens=400, window=WINDOW), checks=[*ALL])
    world.add_engine(slots=slots, blocks=blocks, max_context=blocks * 4)
    length = int(str(more.pop("length", 4)))
    for i in range(60):
        world.ask(f"a{i}", [7 + i] * length, 20, tenant="a", **more)
    return world


def steps_until_first_token(world: World, name: str) -> int:
    steps = 0
    while not any(reader.tokens for reader in world.readers_of(name)):
        assert world.deliver(), "nothing runs"
        steps += 1
    return steps


def test_a_tenant_over_its_share_is_refused_first() -> None:
    world = flooded()
    waits = world.scheduler.state.waiting
    assert len(waits) == 20
    assert {rejected.code for rejected in world.rejected} == {429}
    assert "20 requests are waiting, 20 of them yours" in world.rejected[0].message
    refused = len(world.rejected)
    for i in range(11):
        world.ask(f"b{i}", [99] * 4, 5, tenant="b")
    world.ask("a-again", [99] * 4, 5, tenant="a")
    world.ask("c", [99] * 4, 5, tenant="c")
    assert [r.request for r in world.rejected[refused:]] == ["b10", "a-again"], "10 are half of 20"
    world.run()


def test_prompt_tokens_that_wait_are_shared_likewise() -> None:
    world = flooded(length=60)
    state = world.scheduler.state
    assert state.waiting.queued_tokens <= 400 < state.waiting.queued_tokens + 60
    refused = len(world.rejected)
    for i in range(6):
        world.ask(f"b{i}", [99] * 60, 5, tenant="b")
    assert 120 < state.waiting.tenants["b"].tokens <= 200, "half of 400"
    assert {r.tenant for r in world.rejected[refused:]} == {"b"}


def test_tenant_with_nothing_waiting_is_refused_by_no_forecast() -> None:
    """By the requests of the other one its first token is a minute away, and the limit a second."""
    world = World(Limits(classes=SLO, window=WINDOW))
    world.add_engine(slots=4, blocks=4096, max_context=4096)
    (executor,) = world.scheduler.state.executors.values()
    for i in range(8):
        world.ask(f"a{i}", [7 + i] * 1_500, 20, tenant="a")
    executor.cost_model = Known(StepModel(weights_us=10_000, token_ns=10_000_000), loop_us=700)
    executor.pace.step_us = 10_000
    world.ask("a-more", [7] * 60, 20, tenant="a")
    assert [r.request for r in world.rejected] == ["a-more"]
    world.ask("b", [99] * 4, 5, tenant="b")
    assert world.accepted[-1] == "b"


@pytest.mark.parametrize("slo_class", requests.CLASS_NAMES)
@pytest.mark.parametrize("length", [4, 60])
def test_one_request_at_a_time_waits_for_the_steps_in_flight_alone(slo_class: str, length: int) -> None:
    """However many of the other one run or wait, how long their prompts are, and any class that they claim:
    a place is given up by the tenant that has more than its share, and its prompt is computed before
    theirs."""
    world = flooded(slo_class=slo_class, length=length)
    for i in range(6):
        world.ask(f"b{i}", [99, i], 3, tenant="b")
        assert steps_until_first_token(world, f"b{i}") <= 2 * WINDOW + 1
        while world.readers_of(f"b{i}")[0].closed is None:
            world.deliver()
    assert all(rejected.tenant == "a" for rejected in world.rejected)
    world.run()
    for i in range(6):
        world.assert_answers(f"b{i}")
    for name in ("a0", "a1", "a5"):
        world.assert_answers(name)
    world.assert_idle()


def test_request_in_the_lowest_class_takes_no_place() -> None:
    world = flooded()
    world.ask("b", [99] * 4, 5, tenant="b", slo_class="batch")
    assert not any(s.turn.preemptions for s in world.scheduler.state.sequences.values())


def test_tenant_loses_its_only_sequence_to_no_newcomer() -> None:
    """On a single slot tenants would push one another out for ever."""
    world = flooded(slots=1)
    world.ask("b", [99] * 4, 5, tenant="b")
    assert not any(s.turn.preemptions for s in world.scheduler.state.sequences.values())
    world.run()
    world.assert_answers("b")


def test_a_prompt_that_takes_most_blocks_gives_way() -> None:
    world = World(Limits(classes=SLO, policy=Policy(reservation="reserve"), step_tokens=4), checks=[*ALL])
    world.add_engine(slots=4, blocks=16)
    world.ask("a", [7] * 50, 14, tenant="a")
    world.ask("b", [99] * 4, 4, tenant="b")
    assert steps_until_first_token(world, "b") <= 2 * WINDOW + 1
    world.run()
    for name in ("a", "b"):
        world.assert_answers(name)


def test_sequence_that_needs_a_block_takes_it_from_the_tenant_with_most() -> None:
    """The latest would be the one of the tenant that has least."""
    world = World(Limits(classes=SLO), checks=[*ALL])
    world.add_engine(slots=4, blocks=14)
    for i in range(3):
        world.ask(f"a{i}", [7 + i] * 4, 30, tenant="a")
    world.ask("b", [99] * 4, 30, tenant="b")
    world.run()
    pauses = [
        (trace.facts.choices[0].close.decisions, trace.facts.request)
        for trace in world.scheduler.state.ended.by_key.values()
        if trace.facts.choices[0].close is not None
    ]
    first = min((d.at_us, name) for decisions, name in pauses for d in decisions if d.what == "preempt")
    assert first[1] != "b"


def after_a_large_one(long_blocks: int, large_blocks: int) -> World:
    """One request of tenant a runs, and a large one waits, of 1,000 blocks. Then `pass_by`."""
    world = World(Limits(classes=NEVER, policy=Policy(reservation="reserve"), window=1))
    world.add_engine(slots=8, blocks=1_000, max_context=5_000, max_step_tokens=1_024)
    world.ask("a-long", [4] * 4, 4 * long_blocks - 4, tenant="a")
    for tenant in "bcd":
        world.ask(tenant, [ord(tenant)] * 392, 8, tenant=tenant)
        for _ in range(3):  # they end at different times
            world.deliver()
    world.ask("a-large", [5] * 4, 4 * large_blocks - 4, tenant="a")
    return world


def pass_by(world: World, tenants: str, step_us: int, steps: int = 200) -> tuple[int, int]:
    """Each of the tenants asks for one thing of 100 blocks after the other, until the large one starts: how
    many did, and for how many steps."""
    asked, passed = {tenant: tenant for tenant in "bcd"}, 0
    for step in range(steps):
        if world.readers_of("a-large")[0].tokens:
            return passed, step
        for tenant in tenants:
            if world.readers_of(asked[tenant])[0].closed is not None:
                passed += 1
                asked[tenant] = f"{tenant}{passed}"
                world.ask(asked[tenant], [ord(tenant), *range(passed, passed + 391)], 8, tenant=tenant)
        world.deliver()
        world.now_us += step_us
    return passed, steps


def test_a_large_request_is_overtaken_for_a_while_and_no_longer() -> None:
    """Its tenant has a tenth of the blocks; those of three others come one at a time, and never leave it the
    seven tenths that it needs."""
    world = after_a_large_one(long_blocks=110, large_blocks=700)
    step_us = admission.OVERTAKEN_US // 40
    passed, steps = pass_by(world, "bcd", step_us)
    assert passed >= admission.OVERTAKEN
    assert 40 <= steps <= 40 + 3 * 8
    world.run()
    for name in world.accepted:
        world.assert_answers(name)


def test_few_small_requests_go_before_a_large_one() -> None:
    """However long it has waited: it would keep them from a place for as long as others run."""
    world = after_a_large_one(long_blocks=100, large_blocks=950)
    world.now_us += 2 * admission.OVERTAKEN_US
    for i in range(admission.OVERTAKEN):
        world.ask(f"e{i}", [9, i], 3, tenant="e")
        assert steps_until_first_token(world, f"e{i}") <= 3
        while world.readers_of(f"e{i}")[0].closed is None:
            world.deliver()
    world.ask("late", [9, 99], 3, tenant="e")
    for _ in range(5):
        world.deliver()
    assert not world.readers_of("late")[0].tokens, "it has been overtaken often enough"
    world.run()
    for name in world.accepted:
        world.assert_answers(name)


def test_a_tenant_over_its_share_gains_nothing_by_a_large_request() -> None:
    world = after_a_large_one(long_blocks=600, large_blocks=390)
    passed, steps = pass_by(world, "bcd", admission.OVERTAKEN_US // 40)
    assert steps == 200, "the long one runs"
    assert passed > 200 // 10 * 3 - 6, "each has a place at once: 9 steps for 8 tokens"


def test_a_flood_gains_nothing_by_waiting_for_long() -> None:
    world = flooded()
    for i in range(3 * admission.OVERTAKEN):
        world.now_us += admission.OVERTAKEN_US // 4
        world.ask(f"b{i}", [99, i], 3, tenant="b")
        assert steps_until_first_token(world, f"b{i}") <= 2 * WINDOW + 1
        while world.readers_of(f"b{i}")[0].closed is None:
            world.deliver()
