"""How processes of ours are started: with our code and the user's, and nothing of the working directory."""

from __future__ import annotations

import os
import site
import subprocess
from pathlib import Path

import pytest
from support.source_tree import ROOT

from shared import processes
from shared.processes import module_command, with_import_path

HERE = str(ROOT)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (None, [HERE]),
        (["/mine"], [HERE, "/mine"]),
        (["/mine", HERE], ["/mine", HERE]),
        (["", "/mine", ""], [HERE, "/mine"]),
    ],
)
def test_a_child_finds_this_code_then_the_users_and_not_the_working_directory(
    given: list[str] | None, made: list[str]
) -> None:
    env = {"A": "b"} if given is None else {"A": "b", "PYTHONPATH": os.pathsep.join(given)}
    assert with_import_path(env) == {"A": "b", "PYTHONPATH": os.pathsep.join(made)}


def test_what_is_installed_is_found_without_and_never_goes_before_the_standard_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = Path(site.getsitepackages()[0]) / "shared" / "processes.py"
    monkeypatch.setattr(processes, "__file__", str(installed))
    assert with_import_path({"PYTHONPATH": "/mine"}) == {"PYTHONPATH": "/mine"}


def test_a_module_runs_beside_files_of_any_name(tmp_path: Path) -> None:
    for name in ("inspect", "argparse", "shared"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this file is of somebody else')")
    command = module_command("services.launcher.serve", "--help")
    done = subprocess.run(
        command, cwd=tmp_path, env=with_import_path({}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
