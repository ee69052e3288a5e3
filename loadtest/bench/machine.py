"""The machine, commit and versions with which a result was made, for its JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtest.fleet import cpu_name

PACKAGES = ("headrace", "nats-py", "httptools", "uvloop", "numpy", "torch")
TREE = Path(__file__).resolve().parents[2]


def circumstances() -> dict[str, Any]:
    """Everything that is no figure and no flag."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions()},
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "load_average": [round(each, 2) for each in os.getloadavg()],
        },
    }


def versions() -> dict[str, str]:
    """The packages that matter here and are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The source tree's commit, with a `+` where files have changed; None outside of a tree."""
    try:
        named = _git("rev-parse", "--short=12", "HEAD")
        return named + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(TREE), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
