"""The log files of a fleet: what is kept, what is printed, and what follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcher import own_folder
from services.launcher.commands.logs import Tail, logs
from services.launcher.own_folder import LogFiles
from services.launcher.session import RunState
from shared.errors import BadRequest, SetupError


def note(folder: Path) -> RunState:
    return RunState(
        pid=1, fleet="f", nats_url="nats://h:1", monitoring_url="", models=["m"], logs=str(folder)
    )


def test_a_service_has_its_last_lines_in_at_most_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_folder, "FILE_BYTES", 200)
    files = LogFiles(str(tmp_path), ["a", "b"])
    for i in range(500):
        files("a", f"line {i} é")
    files("b", "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1", "b.log"]
    assert all(path.stat().st_size <= 200 for path in tmp_path.iterdir())
    kept = Tail(tmp_path / "a.log").last(1000)
    assert kept == [f"line {i} é" for i in range(500 - len(kept), 500)]
    assert len(kept) > 200 // len("line 500 é\n".encode())
    assert Tail(tmp_path / "a.log").last(2) == ["line 498 é", "line 499 é"]
    assert Tail(tmp_path / "a.log").last(0) == []


def test_new_lines_are_read_once_and_over_a_change_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_folder, "FILE_BYTES", 200)
    files = LogFiles(str(tmp_path), ["a"])
    files("a", "before")
    tail, seen = Tail(tmp_path / "a.log"), list[str]()
    assert tail.last(5) == ["before"]
    for i in range(60):
        files("a", f"line {i}")
        if i % 7 == 0:
            seen += tail.new()
    assert seen + tail.new() == [f"line {i}" for i in range(60)]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_bytes("one\nhalf of \xc3".encode("latin-1"))
    tail = Tail(file)
    assert tail.last(5) == ["one"]
    with file.open("ab") as more:
        more.write(b"\xa9\nnext")
    assert tail.new() == ["half of é"]


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path), ["a"])
    (tmp_path / "a.log").unlink()
    (tmp_path / "a.log").symlink_to("/dev/full")
    full = LogFiles(str(tmp_path), ["a"])
    full("a", "into the void")
    files("a", "into no name")
    with pytest.raises(SetupError, match="log files cannot be written"):
        LogFiles(str(tmp_path / "none"), ["a"])


def test_services_by_name_or_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["executor@a/b-1.7b", "tokenizer-0", "tokenizer-1"]
    files = LogFiles(str(tmp_path), names)
    for name in names:
        files(name, f"of {name}")
    (tmp_path / "nats.txt").write_text("Server is ready\n")
    files.add("nats-server", tmp_path / "nats.txt")
    for service, shown in (
        ("tok", "tokenizer-0 | of tokenizer-0\ntokenizer-1 | of tokenizer-1\n"),
        ("executor", "of executor@a/b-1.7b\n"),
        ("nats", "Server is ready\n"),
    ):
        logs(note(tmp_path), service, 10, follow=False)
        assert capsys.readouterr().out == shown
    with pytest.raises(BadRequest, match=r"no service 'gpu' in fleet f: choose one of executor@a--b-1\.7b, "):
        logs(note(tmp_path), "gpu", 10, follow=False)
    with pytest.raises(BadRequest, match="from 0 on"):
        logs(note(tmp_path), "", -1, follow=False)
    with pytest.raises(SetupError, match="no fleet of this name runs on this machine"):
        logs(None, "", 1, follow=False)
