"""A folder for the temporary files of one run. Who is killed leaves it behind: the next run removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from shared.errors import SetupError

PREFIX = "headrace-run-"


class OwnFolder:
    """A new folder, the owner's as long as this process lives or until `cleanup`. Raises SetupError."""

    def __init__(self) -> None:
        self.name, lock = _made()
        self._end = weakref.finalize(self, _remove, self.name, lock)  # at the end of the process, too

    def cleanup(self) -> None:
        """Remove it. A second call does nothing."""
        self._end()


def sweep() -> list[str]:
    """Remove the folders of this user that no living process owns; their paths."""
    return [str(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _removed(path)]


def _made() -> tuple[str, int]:
    """A folder, and the lock on it that says that its owner lives."""
    while True:
        try:
            path = tempfile.mkdtemp(prefix=PREFIX)
        except OSError as error:
            raise SetupError(
                f"no temporary files can be written here ({error}): name a folder for them in TMPDIR"
            ) from None
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:  # some network file systems have no locks
                _remove(path, lock)
                raise SetupError(
                    f"nothing can be locked in {path} ({error}): name a folder for temporary files in TMPDIR"
                ) from None
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _removed(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it lives, or nothing can be locked there
        os.close(lock)
        return False
    mine = os.fstat(lock).st_uid == os.getuid()
    if mine:
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    return mine
