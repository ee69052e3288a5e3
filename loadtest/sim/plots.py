"""Pictures of results. matplotlib is an extra (`pip install headrace[bench]`) and is loaded only here."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

BAR = "#4c78a8"
Series = dict[str, list[tuple[float, float]]]


def bars(result: dict[str, Any], figure: str, path: Path) -> None:
    """One bar for each arm."""
    from matplotlib.figure import Figure

    names = [row["arm"] for row in result["rows"]]
    values = [row["figures"][figure] for row in result["rows"]]
    picture = Figure(figsize=(6, 0.8 + 0.5 * len(names)), layout="constrained")
    axes = picture.subplots()
    axes.bar_label(axes.barh(names, values, color=BAR), fmt="{:,.4g}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(figure)
    picture.suptitle("\n".join(wrap(result["title"] + " (simulated)", 72)), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=120, metadata={"Software": None})


def lines(title: str, series: Series, labels: tuple[str, str], path: Path) -> None:
    """One line for each series of (x, y); `labels` of the axes."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.5, 4), layout="constrained")
    axes = picture.subplots()
    for name, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=120, metadata={"Software": None})
