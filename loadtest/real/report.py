"""A measurement as Markdown for readers and JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.fleet import cpu_name
from loadtest.sim.tables import table


@dataclass(slots=True)
class Report:
    """What a measurement found. `checks` are the bounds it was made for, and whether they hold."""

    name: str
    title: str
    text: str
    command: str
    head: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    checks: list[tuple[str, bool]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    kind: str = "real"

    def add(self, row: list[Any]) -> None:
        """One more row, said at once to who waits."""
        self.rows.append(row)
        print(*row, sep=" | ", file=sys.stderr, flush=True)

    def markdown(self) -> str:
        """The page."""
        cells: list[Sequence[str]] = [[str(cell) for cell in row] for row in self.rows]
        return "\n".join(
            [
                f"# {self.title}", "", self.text, "", *table(self.head, cells), "",
                *(f"* {'holds' if holds else '**MISSED**'}: {what}" for what, holds in self.checks),
                "", f"Machine: {_machine()}.", "", "```", self.command, "```", "",
            ]
        )  # fmt: skip

    def document(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "name": self.name,
            "title": self.title,
            "command": self.command,
            "machine": _machine(),
            "rows": [dict(zip(self.head, row, strict=True)) for row in self.rows],
            "checks": [{"what": what, "holds": holds} for what, holds in self.checks],
            **self.data,
        }

    def write(self, folder: Path) -> None:
        """`<kind>_<name>.md` and `.json` in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.kind}_{self.name}.md").write_text(self.markdown())
        text = json.dumps(self.document(), indent=1, ensure_ascii=False)
        (folder / f"{self.kind}_{self.name}.json").write_text(text + "\n")


def _machine() -> str:
    return f"{os.cpu_count()} cores, {cpu_name()}, Python {platform.python_version()}"
