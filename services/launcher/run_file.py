"""The note that `headrace up` leaves so that a second shell finds its server without a flag."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """One running `headrace up`."""

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
    """Where the note of this fleet lies: the user's runtime folder, else the cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(runtime) / "headrace" if runtime and Path(runtime).is_dir() else settings.cache_dir / "run"
    return home / f"{settings.fleet}.json"


def read(path: Path) -> RunFile | None:
    """The note, if its `up` still runs."""
    try:
        note = RunFile(**json.loads(path.read_text()))
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
