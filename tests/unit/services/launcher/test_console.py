"""Lines for people, and what becomes of them without a reader or without room."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO

import pytest

from services.launcher.console import ServiceLines, fail, kind_of, print_line
from shared import errors
from shared.errors import Unavailable


def broken_pipe() -> TextIO:
    ours, theirs = os.pipe()
    os.close(ours)
    return os.fdopen(theirs, "w")


def test_lines_without_a_reader_are_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, broken_pipe())
    for _ in range(2):
        print_line("no reader")
        ServiceLines(["a"], sys.stderr)("a", "no reader")
        assert fail(Unavailable("no reader")) == 1
    sys.stdout.close()  # raises where a line still waits for a reader
    sys.stderr.close()


def test_an_error_has_its_kind_in_words_and_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(errors.BadRequest("send `prompt`")) == 1
    assert capsys.readouterr().err == "error (invalid request): send `prompt`\n"
    kinds = [kind_of(kind("why")) for kind in errors.HeadraceError.__subclasses__()]
    assert not [kind for kind in kinds if not kind.replace(" ", "").isalpha()]


def test_a_full_disk_loses_lines_until_it_has_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closed below
    monkeypatch.setattr(sys, "stdout", full)
    print_line("into the void")
    with (tmp_path / "room").open("w") as room:
        os.dup2(room.fileno(), full.fileno())
    print_line("and again")
    full.close()
    assert (tmp_path / "room").read_text().endswith("and again\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_next_line_replaces_a_progress_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, plain = Terminal(), io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", plain)
    lines = ServiceLines(["a"], screen, bare=True)
    lines("a", "loading: 1 of 2 …")
    print_line("to a file …")
    lines("a", "loading: 2 of 2 …")
    lines("a", "ready")
    lines("a", "more")
    assert screen.getvalue() == "loading: 1 of 2 …\r\033[Kloading: 2 of 2 …\r\033[Kready\nmore\n"
    assert plain.getvalue() == "to a file …\n"
