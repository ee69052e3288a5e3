"""The folder in which the nats-server of `up` keeps durable requests from one start to the next.

One server at a time may use it: `up` and the server hold a lock on it, which ends with the last of the two.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

from services.launcher.nats_server import ServerLimits
from shared.errors import SetupError

MEMORY, FILE = "16MB", "3GB"  # of JetStream: its streams are on disk
HELD_S, LOOK_S = 5.0, 0.02  # for the server of an `up` that was killed to end


def folder_of(fleet: str) -> Path:
    """The folder of a fleet, in the user's folder for state
    (https://specifications.freedesktop.org/basedir-spec)."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "headrace" / fleet / "durable"


def limits_of(fleet: str) -> ServerLimits:
    """The limits of a server with JetStream in the folder of a fleet. Raises SetupError."""
    folder = folder_of(fleet)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are their writer's alone
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SetupError(
            f"durable requests cannot be kept in {folder} ({error}): name another folder in XDG_STATE_HOME, "
            "or start with --no-durable"
        ) from None
    _take(lock, folder)
    store = str(folder)
    return replace(ServerLimits(), jetstream_memory=MEMORY, jetstream_file=FILE, store=store, lock=lock)


def _take(lock: int, folder: Path) -> None:
    deadline = time.monotonic() + HELD_S
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
