"""`python -m loadtest.broker_cost`, small: both sides answer the same requests, every process is counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from loadtest.broker_cost import main
from loadtest.fleet import KINDS


def test_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost.json"
    words = "--only sim --pairs 1 --requests 6 --concurrency 3 --output-len 5 --set sim=step=500"
    monkeypatch.setattr(sys, "argv", ["broker_cost", *words.split(), "--out", str(out)])
    main()
    (case,) = json.loads(out.read_text())["cases"]
    (pair,) = case["pairs"]
    for side, parts in (("memory", {"client"}), ("nats", {"client", "nats-server", *KINDS})):
        assert set(pair[side]["cpu_s"]) == parts
        figures = pair[side]
        assert (figures["completed"], figures["total_output_tokens"]) == (6, 30)
        assert figures["cpu_s_per_1k_tokens"] == pytest.approx(sum(figures["cpu_s"].values()) / 30 * 1e3)
    assert f"cost {case['cost_pct']['median']:.2f} % of throughput" in capsys.readouterr().out
