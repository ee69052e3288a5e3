"""A client command finds its server and model here: by flags, then settings, then a running `headrace up`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.config import DEFAULT_NATS_URL, Loaded
from shared.nats import access
from shared.nats.bus import NatsBus
from shared.nats.interface import BusFault
from shared.nats.subjects import DEFAULT_TENANT

if TYPE_CHECKING:
    from shared.config import Settings

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the model to ask there."""

    nats_url: str
    model: str

    @property
    def tenant(self) -> str:
        """In whose name to ask: the tenant whose credentials the URL holds."""
        return access.tenant_of(self.nats_url, DEFAULT_TENANT)


def find_target(loaded: Loaded) -> Target:
    """Where to connect, and the model to ask for when a request names none."""
    from shared.vocab.files import served_name

    settings = loaded.settings
    note = read(path_for(settings))
    here = note if note is not None and settings.nats_url in ("", note.nats_url) else None
    named = settings.model_name or served_name(settings.model)
    chosen = loaded.origins["model"] != "default" or loaded.origins["model_name"] != "default"
    return Target(
        settings.nats_url or (here.nats_url if here else DEFAULT_NATS_URL),
        here.model if here and not chosen else named,
    )


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[NatsBus]:
    """A connection for the length of a command. What the server does not let these credentials do is told.
    Raises SetupError when nobody is there."""
    bus = await NatsBus.connect(url, name="headrace-cli", timeout_s=CONNECT_TIMEOUT_S, on_fault=_tell)
    try:
        yield bus
    finally:
        await bus.drain()


def _tell(fault: BusFault) -> None:
    if fault.kind in ("permission", "refused"):
        print(f"these credentials are not for that: {fault.detail}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The note that `headrace up` leaves so that a second shell finds its server without a flag."""

    pid: int
    fleet: str
    nats_url: str  # with the operator's credentials, where there are any
    monitoring_url: str
    model: str  # name under which it is served

    def write(self, path: Path) -> None:
        """Replace the note at `path` in one step. Nobody else may read it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{self.pid}")
        draft.touch(0o600)
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        draft.replace(path)


def path_for(settings: Settings) -> Path:
    """Where the note of this fleet lies: the user's runtime folder, else, where that is missing or cannot be
    written, the cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(runtime) / "headrace" if runtime else None
    if home is None or not os.access(home if home.exists() else home.parent, os.W_OK | os.X_OK):
        home = settings.cache_dir / "run"
    return home / f"{settings.fleet}.json"


def read(path: Path) -> RunState | None:
    """The note, if its `up` still runs."""
    try:
        note = RunState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none, or of another version
        return None
    return note if _is_alive(note.pid) else None


def remove(path: Path, pid: int) -> None:
    """Take the note away if it is this process's own."""
    note = read(path)
    if note is not None and note.pid == pid:
        path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
