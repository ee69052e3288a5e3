"""A folder for the temporary files of one run. If the run is killed, the next run removes the folder.

The owner holds a lock (flock) on its folder while it lives. `sweep` removes the folders that it can lock.

`LogFiles` keeps the lines of each service there, for `headrace logs`. A full file becomes `FILE.1` and the
older one is dropped, so a service has at most 2 * FILE_BYTES.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from logging.handlers import RotatingFileHandler
from pathlib import Path

from shared.errors import SetupError

PREFIX = "headrace-run-"
FILE_BYTES = 4 * 1024 * 1024  # of a log: some 40,000 lines
SUFFIX = ".log"


class OwnFolder:
    """A new folder that exists until `cleanup` or the end of this process. Raises SetupError."""

    def __init__(self) -> None:
        self.name, lock = _made()
        self._end = weakref.finalize(self, _remove, self.name, lock)  # at the end of the process, too

    def cleanup(self) -> None:
        """Remove it. A second call does nothing."""
        self._end()


def sweep() -> list[str]:
    """Remove the folders of this user that no living process owns. Returns their paths."""
    return [str(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _remove_ownerless(path)]


def _made() -> tuple[str, int]:
    """A new folder and the file descriptor of its lock."""
    while True:
        try:
            path = tempfile.mkdtemp(prefix=PREFIX)
        except OSError as error:
            raise SetupError(
                f"temporary files cannot be written here ({error}): name a folder for them in TMPDIR"
            ) from None
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # some network file systems have no locks
                _remove(path, lock)
                raise SetupError(
                    f"{path} cannot be locked ({error}): name a folder for temporary files in TMPDIR"
                ) from None
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_ownerless(path: Path) -> bool:
    """False for one that is in use, has gone or is another user's."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives, or the file system has no locks
        os.close(lock)
        return False
    mine = os.fstat(lock).st_uid == os.getuid()
    if mine:
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    return mine


class LogFiles:
    """Appends each line to the file of its service. What cannot be written, on a full disk, is lost."""

    def __init__(self, folder: str, names: list[str]) -> None:
        """Raises SetupError."""
        self._folder = folder
        try:
            self._files = {name: _Lines(log_path(folder, name)) for name in names}
        except OSError as error:
            raise SetupError(f"log files cannot be written: {error}") from None

    def add(self, name: str, path: Path) -> None:
        """A file that the process `name` writes itself."""
        log_path(self._folder, name).symlink_to(path)

    def __call__(self, name: str, line: str) -> None:
        self._files[name].handle(logging.makeLogRecord({"msg": line}))


class _Lines(RotatingFileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: the line is on the terminal, too."""


def log_path(folder: str, name: str) -> Path:
    """The log file of a service."""
    return Path(folder, name.replace("/", "--") + SUFFIX)  # a name may end with that of a model, owner/name
