"""Programs of agents: prompts extend each other, and what must be computed is counted exactly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from loadtest.simulator.agents import FIRST, PAUSES, AgentWorld, Load, LogNormal, figures_of
from loadtest.simulator.engine import Machine
from loadtest.simulator.world import Setup
from shared.step_model import PRESETS

MACHINE = Machine(PRESETS["h200-8b"], blocks=60_000)
SHORT = LogNormal(6, 0.5, 2, 12)
LOAD = Load(4, 2, pauses="fast", chats_s=0.5, turns=LogNormal(4, 0.4, 3, 8), answer=SHORT)


def world_of(load: Load = LOAD, machine: Machine = MACHINE, seed: int = 1) -> AgentWorld:
    world = AgentWorld(Setup((machine,), seed=seed), load)
    world.run()
    return world


@pytest.mark.parametrize(
    "load", [LOAD, replace(LOAD, compact_every=3), replace(LOAD, ids=True, liars_s=0.2, liars_hint=True)]
)
def test_agents_compute_each_token_once_in_memory_without_limit(load: Load) -> None:
    row = figures_of(world_of(load))
    assert (row["programs"], row["recomputed"]) == (4, 0)


def test_agents_compute_tokens_again_where_memory_is_short() -> None:
    load = replace(LOAD, programs=6, at_once=6, compact_at=14_000)
    row = figures_of(world_of(load, replace(MACHINE, blocks=2_000)))
    assert row["recomputed"] > row["needed"] // 16


def test_agents_are_the_same_in_two_runs_of_a_seed_and_differ_by_seed() -> None:
    first, again, other = figures_of(world_of()), figures_of(world_of()), figures_of(world_of(seed=2))
    assert first == again
    assert first != other


def test_continuations_find_all_but_the_last_block_of_what_came_before() -> None:
    records = {r.asked.request: r for r in world_of().readers.records}
    turns = [r for name, r in records.items() if "/" in name and not name.endswith("/0")]
    assert len(turns) >= 10
    for turn in turns:
        program, _, at = turn.asked.request.rpartition("/")
        before = records[f"{program}/{int(at) - 1}"]
        assert turn.cached_tokens == (before.prompt_tokens + before.tokens - 1) // 16 * 16


def test_sub_agents_run_while_their_parent_waits_and_carry_its_name() -> None:
    world = world_of(replace(LOAD, programs=8, ids=True))
    subs = [r for r in world.readers.records if "." in r.asked.request]
    assert subs
    assert {r.asked.session["parent"] for r in subs} == {r.asked.request.partition(".")[0] for r in subs}
    last = [r for r in world.readers.records if not r.asked.calls and "/" in r.asked.request]
    assert all(r.asked.session["session_final"] for r in last)
    assert {r.asked.calls for r in world.readers.records} <= {
        (),
        *((tool.name,) for tool in PAUSES["fast"]),
        ("agent",),
    }


def test_log_normal_draws_stay_between_their_bounds() -> None:
    rng = random.Random(1)
    drawn = sorted(FIRST.draw(rng) for _ in range(999))
    assert FIRST.least <= drawn[0] < drawn[-1] <= FIRST.most
    assert abs(drawn[499] - FIRST.median) < 100
    assert LogNormal(5, 0, 6, 9).draw(rng) == 6
