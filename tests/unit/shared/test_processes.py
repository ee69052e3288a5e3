"""How processes of ours are started: with our code and the user's, and nothing of the working directory."""

from __future__ import annotations

import gc
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from support.source_tree import ROOT

from shared import processes
from shared.processes import (
    give_back_memory,
    importing,
    module_command,
    unchanged_libraries,
    with_import_path,
)

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


def test_installed_packages_are_found_and_never_go_before_the_standard_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = Path(site.getsitepackages()[0]) / "shared" / "processes.py"
    monkeypatch.setattr(processes, "__file__", str(installed))
    assert with_import_path({"PYTHONPATH": "/mine"}) == {"PYTHONPATH": "/mine"}


def test_a_module_runs_beside_files_of_any_name(tmp_path: Path) -> None:
    for name in ("inspect", "argparse", "shared"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this file is of another program')")
    command = module_command("services.launcher.serve", "--help")
    done = subprocess.run(
        command, cwd=tmp_path, env=with_import_path({}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


@pytest.mark.parametrize("fails", [False, True])
def test_imports_are_not_interrupted_by_collections_and_their_objects_are_left_alone_later(
    fails: bool,
) -> None:
    gc.unfreeze()
    try:
        with pytest.raises(ModuleNotFoundError) if fails else importing(), importing():
            assert not gc.isenabled()
            if fails:
                raise ModuleNotFoundError
        assert gc.isenabled()
        assert gc.get_freeze_count() > 1_000
    finally:
        gc.unfreeze()


SMAPS = """\
1000-3000 r-xp 00000000 fe:00 1   /lib/code.so.6
Rss:                   8 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex
3000-4000 r--p 00002000 fe:00 1   /lib/code.so.6
Anonymous:             4 kB
Swap:                  0 kB
4000-5000 r--p 00003000 fe:00 1   /lib/code.so.6
Anonymous:             0 kB
Swap:                  4 kB
5000-6000 rw-p 00004000 fe:00 1   /lib/code.so.6
Anonymous:             0 kB
Swap:                  0 kB
6000-7000 r--s 00000000 fe:00 2   /models/a model.gguf
Anonymous:             0 kB
Swap:                  0 kB
7000-8000 r--p 00000000 00:00 0
Anonymous:             0 kB
Swap:                  0 kB
8000-9000 r--p 00000000 fe:00 3   /lib/with blanks/last.so
Anonymous:             0 kB
Swap:                  0 kB
"""


def test_parts_of_libraries_are_given_back_unless_the_process_has_changed_them() -> None:
    """Relocated pages, in memory or in swap, are not in the file; nor are those of other files safe."""
    assert list(unchanged_libraries(SMAPS)) == [(0x1000, 0x3000), (0x8000, 0x9000)]


def test_memory_of_the_start_is_given_back_and_everything_works_on() -> None:
    program = """
import re, zlib, sqlite3, numpy
from pathlib import Path
from shared.processes import give_back_memory

def of_files():
    return int(re.search(r"^RssFile:\\s+(\\d+)", Path("/proc/self/status").read_text(), re.M)[1])

numpy.linalg.inv(numpy.eye(64))
before = of_files()
give_back_memory()
print(of_files() < 0.7 * before, numpy.linalg.inv(2 * numpy.eye(2))[0, 0], zlib.crc32(b"a"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "True 0.5 3904355907\n"


def test_a_machine_without_smaps_or_glibc_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SMAPS", Path("/nowhere"))
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda _: object())
    give_back_memory()


def test_process_whose_folder_was_removed_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    processes.ensure_folder()
    assert Path.cwd() == tmp_path
    (gone := tmp_path / "gone").mkdir()
    os.chdir(gone)
    gone.rmdir()
    processes.ensure_folder()
    assert Path.cwd() == Path("/")
