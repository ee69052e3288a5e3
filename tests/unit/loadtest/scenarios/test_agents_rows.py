"""The rows and arms of agents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.scenarios import agents
from loadtest.simulator.agents import LogNormal

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
