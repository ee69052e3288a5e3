"""A sampling parameter that is added to a copy of the product, by the guide's list, works everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.source_tree import PRODUCT, ROOT

GUIDE = ROOT / "docs" / "guides" / "add_a_sampling_parameter.md"
MOST_FILES = 6
# A parameter that no kernel takes. By file: the text to replace, and with what.
EDITS = {
    "shared/api.py": (
        "    presence_penalty: Penalty =",
        '    max_gap: float = Field(0.0, ge=0, le=100, description="below the largest logit; 0: any")\n'
        "    presence_penalty: Penalty =",
    ),
    "shared/messages.py": (
        "    bias_values: Floats = field(default_factory=floats)\n",
        "    bias_values: Floats = field(default_factory=floats)\n    max_gap: float = 0.0\n",
    ),
    "kernels/sampling/ref.py": (
        "FILTERS: Stages = (",
        "def keep_near(logits: Tensor, gap: Tensor) -> Tensor:\n"
        "    least = logits.amax(-1) - gap\n"
        "    return logits.masked_fill(logits < least[:, None], -torch.inf)\n\n\n"
        'FILTERS: Stages = (Stage((Parameter("max_gap", 0.0),), keep_near), ',
    ),
}


def test_a_parameter_takes_few_files(tmp_path: Path) -> None:
    for name in PRODUCT:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "cpu_jit"))
    # The compiled kernels of a CPU stay in their own place, where their cache is.
    with (tmp_path / "kernels" / "__init__.py").open("a") as package:
        package.write(f"\n__path__.append({str(ROOT / 'kernels')!r})\n")
    for name, (old, new) in EDITS.items():
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1
        (tmp_path / name).write_text(text.replace(old, new))
    assert len(EDITS) <= MOST_FILES
    steps = GUIDE.read_text().partition("Tests, in the order")[0]
    assert EDITS.keys() <= set(re.findall(r"`([\w./]+\.py)`", steps)), "files that the guide misses"
    (tmp_path / "model").mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "support.executor.new_parameter", str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}, cwd=tmp_path, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
