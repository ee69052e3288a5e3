"""The folder in which the nats-server of `up` keeps durable requests from one start to the next.

One server at a time may use it: `up` and the server hold a lock on it, which ends with the last of the two.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.launcher.nats_server import ServerLimits
from shared.errors import SetupError

MEMORY, FILE = "16MB", "3GB"  # of JetStream: its streams are on disk
SPACE_BYTES = 33_554_432  # for a server that starts again: some of the largest messages
HELD_S, LOOK_S = 5.0, 0.02  # for the server of an `up` that was killed to end


def folder_of(fleet: str) -> Path:
    """The folder of a fleet, in the user's folder for state
    (https://specifications.freedesktop.org/basedir-spec)."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "headrace" / fleet / "durable"


def limits_of(fleet: str, wait_s: float = HELD_S) -> ServerLimits:
    """The limits of a server with JetStream in the folder of a fleet, which another server may hold for
    `wait_s` more. Raises SetupError."""
    folder = folder_of(fleet)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are their writer's alone
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SetupError(
            f"durable requests cannot be kept in {folder} ({error}): name another folder in XDG_STATE_HOME, "
            "or start with --no-durable"
        ) from None
    _take(lock, folder, wait_s)
    store = str(folder)
    return replace(ServerLimits(), jetstream_memory=MEMORY, jetstream_file=FILE, store=store, lock=lock)


class FullDisk:
    """Decides when to restart a nats-server that could not write. Such a server takes no more messages until
    it is restarted, even when there is space (seen with 2.15); what it has stored stays."""

    def __init__(self, folder: str, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._told = False

    def has_space_again(self, health: bytes) -> bool:
        """True if the server with this answer of /healthz cannot write, although there is space."""
        if not self._folder or b"write error" not in health:
            self._told = self._told and not health  # no answer: it starts
            return False
        if not (why := self._unwritable()):
            self._report("nats-server could not write durable requests, and there is space: it starts again")
            return True
        if not self._told:
            self._told = True
            self._report(why)
        return False

    def _unwritable(self) -> str:
        """Why nothing can be written to the folder; empty if something can. A server that cannot open its
        files for writing does not start at all: nothing would be served."""
        refused = "durable requests are refused until"
        try:
            if shutil.disk_usage(self._folder).free < SPACE_BYTES:
                return f"the disk is full: {refused} {self._folder} has space"
            with tempfile.TemporaryFile(dir=self._folder):
                return ""
        except OSError as error:  # it was removed, or is read-only since its disk had an error
            return f"the disk cannot be written: {refused} {self._folder} can be ({error.strerror})"


def _take(lock: int, folder: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline:
                os.close(lock)
                raise SetupError(
                    f"another `headrace up` keeps durable requests in {folder} ({error.strerror}): choose "
                    "another --fleet, or start with --no-durable"
                ) from None
            time.sleep(LOOK_S)
        else:
            return
