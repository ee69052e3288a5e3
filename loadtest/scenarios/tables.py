"""A result as JSON, and as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from loadtest.scenarios.definitions import Scenario
from loadtest.scenarios.run import Row

NOTE = "Simulated on a virtual clock with the real scheduler: figures of a machine's model, not measurements."


def document(name: str, scenario: Scenario, command: str, rows: Iterable[Row]) -> dict[str, Any]:
    """Everything about a run that has no wall time in it: the same seed gives the same document."""
    return {
        "scenario": name,
        "title": scenario.title,
        "note": NOTE,
        "command": command,
        "machine": asdict(scenario.machine),
        "replicas": scenario.replicas,
        "bounds": asdict(scenario.bounds),
        "seeds": scenario.seeds,
        "rows": [
            {"arm": arm.name, "policy": arm.policy, "overlap": arm.overlap, "figures": figures}
            for arm, figures in rows
        ],
    }


def markdown(result: dict[str, Any], scenario: Scenario) -> str:
    """The columns that the scenario is about."""
    rows = result["rows"]
    extra = [name for name in rows[0]["figures"] if name.startswith(("ttft_ms_", "done_s_"))] if rows else []
    by_class = [name for name in extra if name.split("_")[2] in ("interactive", "standard", "batch")]
    columns = [*scenario.columns, *(n for n in by_class if n.endswith("_p99") or n.startswith("done_s"))]
    body = [[r["arm"], *(_text(r["figures"].get(column, "")) for column in columns)] for r in rows]
    return page(scenario.title, f"{scenario.why} {NOTE}", table(["arm", *columns], body), result["command"])


def page(title: str, text: str, lines: Iterable[str], command: str) -> str:
    """A Markdown page with one table and the command that makes it."""
    return "\n".join([f"# {title}", "", text, "", *lines, "", "```", command, "```", ""])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, line by line."""
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:,.10g}"
