"""`headrace logs` prints the log files of a running fleet (own_folder.py), and follows them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from services.launcher.console import ServiceLines, load
from services.launcher.own_folder import SUFFIX, log_path
from services.launcher.session import RunState, path_for, read
from shared.errors import BadRequest, SetupError

FILES_POLL_S = 0.2  # between two looks at the files: new lines are shown before a person misses them


def logs(note: RunState | None, service: str, last: int, *, follow: bool) -> None:
    """Print the `last` lines of each service whose name starts with `service`, then, with `follow`, new lines
    until the fleet ends. Raises SetupError for no fleet here, BadRequest for no such service."""
    if last < 0:
        raise BadRequest(f"-n takes a number of lines from 0 on, not {last}")
    if note is None:
        raise SetupError(
            "no fleet of this name runs on this machine: its log is where `headrace up` was started, or, of "
            "containers, in `docker compose logs`"
        )
    names = sorted(path.stem for path in Path(note.logs).glob(f"*{SUFFIX}"))
    found = [name for name in names if name.startswith(service)]
    if not found:
        raise BadRequest(
            f"there is no service {service!r} in fleet {note.fleet}: choose one of {', '.join(names)}"
        )
    lines = ServiceLines(found, sys.stdout, bare=len(found) == 1)
    tails = {name: Tail(log_path(note.logs, name)) for name in found}
    for name, tail in tails.items():
        for line in tail.last(last):
            print(lines.text(name, line))
    while follow:
        follow = os.path.exists(note.logs)
        for name, tail in tails.items():
            for line in tail.new():
                print(lines.text(name, line))
        sys.stdout.flush()
        time.sleep(FILES_POLL_S if follow else 0)


class Tail:
    """Reads the lines of one file and, once it is full, of the file that takes its place."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb")
        self._part = b""  # of a line that is being written

    def last(self, count: int) -> list[str]:
        """The last `count` lines so far. Call it first."""
        older = self._path.with_suffix(f"{SUFFIX}.1")
        self._part = older.read_bytes() if older.exists() else b""
        return self.new()[-count:] if count else []

    def new(self) -> list[str]:
        """The lines since the last call."""
        data = self._file.read()
        with contextlib.suppress(FileNotFoundError):  # the fleet has ended, or the next file is not there yet
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                data += self._file.read()  # the last lines before the change
                self._file.close()
                self._file = self._path.open("rb")
                data += self._file.read()
        *lines, self._part = (self._part + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def command(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add = parser.add_argument
    add("service", nargs="?", default="", metavar="SERVICE", help="its name or the start of it; default: all")
    add("-f", "--follow", action="store_true", help="print new lines until the fleet ends")
    add("-n", "--lines", type=int, default=100, metavar="N", help="last lines of each service; default 100")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    note = read(path_for(load(given).settings))
    logs(note, given.service, given.lines, follow=given.follow)
