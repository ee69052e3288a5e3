"""What a service's libraries find in the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.launcher.serve import OPENMP_SPINS, environment

# A service that ends where it would be built, and prints how its OpenMP waits.
SHOW = """
import services.launcher.serve as serve
serve.BUILDERS["executor"] = "this_module_does_not_exist:build"
try:
    serve.main(["executor"])
except SystemExit:
    pass
import os
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_of_an_executor_sleep_soon_unless_the_user_sets_how_they_wait(
    given: dict[str, str],
) -> None:
    ours = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], env={**ours, "PYTHONPATH": os.pathsep.join(sys.path), **given},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    spins = given.get("GOMP_SPINCOUNT", "None" if given else OPENMP_SPINS)
    assert shown.stdout.split() == [spins, given.get("OMP_WAIT_POLICY", "None")], shown.stderr


def test_only_an_executor_computes_in_threads_of_openmp() -> None:
    assert environment("scheduler", {}) == {}
    assert environment("kv_offload", {})["CUDA_VISIBLE_DEVICES"] == ""
