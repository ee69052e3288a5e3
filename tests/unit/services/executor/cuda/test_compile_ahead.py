"""Kernels are compiled without being launched, each once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
