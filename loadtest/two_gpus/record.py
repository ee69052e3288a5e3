"""What a stage has found, written after each figure: a stage that is cut off leaves those before."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Record:
    """The figures of a stage, its file, and the end of its time."""

    path: Path
    limit_s: float
    found: dict[str, Any] = field(default_factory=dict)
    _began_s: float = field(default_factory=time.monotonic)

    def add(self, name: str, value: Any) -> None:
        """Keep a figure, print it, and write the file."""
        self.found[name] = value
        self.found["seconds"] = round(time.monotonic() - self._began_s, 1)
        print(f"{self.path.name} {self.found['seconds']:.1f} s, {name}: {_short(value)}", flush=True)
        ahead = self.path.with_suffix(".part")
        ahead.write_text(json.dumps(self.found) + "\n")
        os.replace(ahead, self.path)

    @property
    def left_s(self) -> float:
        """The time left for the stage."""
        return self.limit_s - (time.monotonic() - self._began_s)

    async def tried(self, name: str, part: Awaitable[None]) -> None:
        """Await a part of the stage: an error in it does not end the others."""
        try:
            await part
        except Exception as error:  # noqa: BLE001 - it is in the record
            self.add(f"failed_{name}", f"{type(error).__name__}: {error}"[:600])

    def has(self, seconds: float, what: str) -> bool:
        """Whether so much time is left; if not, it notes what is left out."""
        if self.left_s >= seconds:
            return True
        self.add(f"left_out_{what}", f"{self.left_s:.0f} s are left, it takes {seconds:.0f}")
        return False


def _short(value: Any) -> Any:
    """Without long lists, three digits after the point."""
    if isinstance(value, dict):
        kept = {k: _short(v) for k, v in value.items() if not isinstance(v, list) or len(v) < 9}
        return {k: v for k, v in kept.items() if v is not None}
    return round(value, 3) if isinstance(value, float) else value
