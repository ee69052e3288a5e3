"""Kernels are compiled without being launched, each once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.executor.cuda import graph_runner

TESTS = Path(__file__).parents[4]


def test_kernels_compile_without_a_launch_and_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "support.executor.compiled_ahead"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=200, cwd=TESTS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {
        "new": [2, 0],
        "compiled": ["_move", "_scatter"],
        "target": [0] * 8,
        "restored": True,
    }


@pytest.mark.parametrize(
    ("new", "launched"),
    [([0], ["sample 1"]), ([2, 30], ["sample 1", "mixed 64", "decode 1"])],
    ids=["all kernels are cached", "some are not"],
)
def test_graphs_compile_ahead_where_the_cache_lacks_kernels_of_the_smallest(
    monkeypatch: pytest.MonkeyPatch, new: list[int], launched: list[str]
) -> None:
    found: list[str] = []

    def compile_ahead(launch: Callable[[], None]) -> int:
        launch()
        return new.pop(0)

    monkeypatch.setattr(graph_runner, "compile_ahead", compile_ahead)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner: Any = graph_runner.GraphRunner.__new__(graph_runner.GraphRunner)
    runner._tile_planner = SimpleNamespace(layout=lambda kind, size, queries: f"{kind} {size}")
    runner._staging = SimpleNamespace(stage=lambda *given: None)
    runner._forward = runner._sample = lambda layout, size: found.append(layout)
    runner._compile([("mixed", 64, 1), ("decode", 1, 1), ("sample", 1, 1)])
    assert found == launched
