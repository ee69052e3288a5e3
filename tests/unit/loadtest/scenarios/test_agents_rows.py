"""The rows and arms of agents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.scenarios import agents
from loadtest.scenarios.real_tier import RealTier
from loadtest.simulator.agents import SYSTEM_TOKENS, TENANTS, AgentWorld, LogNormal, figures_of
from loadtest.simulator.tiers import TierSpec
from loadtest.simulator.world import Setup

SHORT = LogNormal(3, 0, 3, 3)


def test_agents_run_of_a_small_row_writes_a_line_for_each_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(agents.ROW_6, load=replace(agents.FEW, programs=2, at_once=2, turns=SHORT, answer=SHORT))
    monkeypatch.setitem(agents.ROWS, "6", small)
    out = tmp_path / "runs.jsonl"
    assert agents.main(["--arms", "default", "free_hbm", "--seeds", "1", "--json", str(out)]) == 0
    default, free = [json.loads(line) for line in out.read_text().splitlines()]
    assert (default["arm"], free["arm"], free["recomputed"], free["down_gb"]) == ("default", "free_hbm", 0, 0)
    assert capsys.readouterr().out.count("| 6 |") == 2


def test_agents_machine_of_32b_has_steps_of_four_times_and_twice_the_kv() -> None:
    small, large = agents.L, agents.H
    assert large.model.weights_us == 4 * small.model.weights_us
    assert (large.block_bytes, large.blocks) == (2 * small.block_bytes, 190_000 // 16)


def test_agents_one_after_another_share_a_system_prompt_and_leave_nothing_else_below() -> None:
    """The second program of a tenant shows that its system prompt is shared, and computes it again."""
    load = replace(agents.FEW, programs=6, at_once=1, turns=SHORT, answer=SHORT, chats_s=0, pauses="fast")
    machine = replace(agents.L, blocks=3_000)
    tier = RealTier(TierSpec(30_000 * machine.block_bytes), machine.block_bytes)
    world = AgentWorld(Setup((machine,), seed=1, tier=lambda: tier), replace(load, ids=True))
    world.run()
    assert figures_of(world)["recomputed"] <= len(TENANTS) * SYSTEM_TOKENS
    assert len(tier._kv.core.state.l1.entries) <= len(TENANTS) * (SYSTEM_TOKENS // 16 + 64)
