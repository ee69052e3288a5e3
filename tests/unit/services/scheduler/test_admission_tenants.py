"""Two tenants: whatever one of them asks for, the other gets its part, and is never refused for it."""

from __future__ import annotations

import pytest
from support.scheduler.known_costs import Known
from support.scheduler.world import World
from support.scheduler.world_checks import ALL

from services.scheduler.state import requests
from services.scheduler.state.policies import Policy
from services.scheduler.state.state import Limits
from shared.step_model import StepModel

SLO = requests.parse("interactive=1000/50/0,standard=1000/50/0,batch=0/50/0")
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
    assert state.waiting.held_tokens <= 400 < state.waiting.held_tokens + 60
    refused = len(world.rejected)
    for i in range(6):
        world.ask(f"b{i}", [99] * 60, 5, tenant="b")
    assert 120 < state.waiting.tenants["b"].tokens <= 200, "half of 400"
    assert {r.tenant for r in world.rejected[refused:]} == {"b"}


def test_who_waits_for_nothing_is_refused_by_no_forecast() -> None:
    """By the requests of the other one its first token is a minute away, and the limit a second."""
    world = World(Limits(classes=SLO, window=WINDOW))
    world.add_engine(slots=4, blocks=4096, max_context=4096)
    (executor,) = world.scheduler.state.executors.values()
    for i in range(8):
        world.ask(f"a{i}", [7 + i] * 1_500, 20, tenant="a")
    executor.costs = Known(StepModel(weights_us=10_000, token_ns=10_000_000), loop_us=700)
    executor.pace.step_us = 10_000
    world.ask("a-more", [7] * 60, 20, tenant="a")
    assert [r.request for r in world.rejected] == ["a-more"]
    world.ask("b", [99] * 4, 5, tenant="b")
    assert world.accepted[-1] == "b"


@pytest.mark.parametrize("slo_class", requests.NAMES)
@pytest.mark.parametrize("length", [4, 60])
def test_one_request_at_a_time_waits_for_the_steps_in_flight_alone(slo_class: str, length: int) -> None:
    """However many of the other one run or wait, how long their prompts are, and whatever class they claim:
    a place is given up by who has more than its share, and its prompt is computed before theirs."""
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


def test_one_request_in_the_lowest_class_takes_nobodys_place() -> None:
    world = flooded()
    world.ask("b", [99] * 4, 5, tenant="b", slo_class="batch")
    assert not any(s.pauses for s in world.scheduler.state.sequences.values())


def test_nobody_loses_its_only_sequence_to_a_newcomer() -> None:
    """On a single slot tenants would push one another out for ever."""
    world = flooded(slots=1)
    world.ask("b", [99] * 4, 5, tenant="b")
    assert not any(s.pauses for s in world.scheduler.state.sequences.values())
    world.run()
    world.assert_answers("b")


def test_a_prompt_that_takes_most_blocks_gives_way() -> None:
    world = World(Limits(classes=SLO, policy=Policy(kv="reserve"), step_tokens=4), checks=[*ALL])
    world.add_engine(slots=4, blocks=16)
    world.ask("a", [7] * 50, 14, tenant="a")
    world.ask("b", [99] * 4, 4, tenant="b")
    assert steps_until_first_token(world, "b") <= 2 * WINDOW + 1
    world.run()
    for name in ("a", "b"):
        world.assert_answers(name)


def test_who_needs_a_block_takes_it_from_the_tenant_that_has_most() -> None:
    """The latest would be the one of the tenant that has least."""
    world = World(Limits(classes=SLO), checks=[*ALL])
    world.add_engine(slots=4, blocks=14)
    for i in range(3):
        world.ask(f"a{i}", [7 + i] * 4, 30, tenant="a")
    world.ask("b", [99] * 4, 30, tenant="b")
    world.run()
    pauses = [
        (trace.facts.choices[0].close.decisions, trace.facts.request)
        for trace in world.scheduler.state.recent.traces.values()
        if trace.facts.choices[0].close is not None
    ]
    first = min((d.at_us, name) for decisions, name in pauses for d in decisions if d.what == "pause")
    assert first[1] != "b"
