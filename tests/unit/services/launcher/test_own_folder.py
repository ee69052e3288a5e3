"""Temporary files of a run: gone with it, and swept by the next one when it was killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.launcher import own_folder
from services.launcher.own_folder import OwnFolder, sweep
from shared.errors import SetupError

OWNER = (
    "import signal; from services.launcher.own_folder import OwnFolder;"
    "f = OwnFolder(); print(f.name, flush=True)"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner(code: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", f"{OWNER}{code}"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_folder_goes_with_its_owner_or_is_swept_when_that_was_killed(place: Path) -> None:
    own = OwnFolder()
    Path(own.name, "file").write_text("x")
    process, killed = owner("; signal.pause()")
    assert sweep() == []
    assert Path(killed).is_dir()
    assert Path(killed).stat().st_mode & 0o777 == 0o700
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert sweep() == [killed]
    process, ended = owner("")
    process.communicate()
    assert list(place.iterdir()) == [Path(own.name)], f"{ended} went at the end of its owner"
    own.cleanup()
    own.cleanup()
    assert list(place.iterdir()) == []


def test_one_that_is_swept_while_it_is_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, mkdtemp = list[str](), tempfile.mkdtemp

    def swept(prefix: str) -> str:
        made.append(mkdtemp(prefix=prefix))
        if len(made) == 1:
            assert sweep() == made
        return made[-1]

    monkeypatch.setattr(own_folder.tempfile, "mkdtemp", swept)
    own = OwnFolder()
    assert len(made) == 2
    assert own.name == made[1]
    assert os.path.isdir(own.name)
    own.cleanup()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_folder_without_locks_is_an_error(monkeypatch: pytest.MonkeyPatch, place: Path, number: int) -> None:
    """As on some network file systems."""
    left = place / f"{own_folder.PREFIX}left"
    left.mkdir()

    def refused(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(own_folder.fcntl, "flock", refused)
    descriptors = os.listdir("/proc/self/fd")
    assert sweep() == []
    with pytest.raises(SetupError, match=r"cannot be locked .* in TMPDIR"):
        OwnFolder()
    assert os.listdir("/proc/self/fd") == descriptors
    assert list(place.iterdir()) == [left]


def test_missing_place_for_temporary_files_is_an_error(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "none"))
    with pytest.raises(SetupError, match="name a folder for them in TMPDIR"):
        OwnFolder()
