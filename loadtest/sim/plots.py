"""Pictures of results. matplotlib is an extra (`pip install headrace[bench]`) and is loaded only here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

from shared.errors import SetupError

BAR = "#4c78a8"
WIDE = 20  # times the least: then the axis is logarithmic
Series = dict[str, list[tuple[float, float]]]


def need_matplotlib() -> None:
    """Raise SetupError where it is missing: before a long run, not behind it."""
    if find_spec("matplotlib") is None:
        raise SetupError("plots need matplotlib: pip install 'headrace[bench]'")


def bars(result: dict[str, Any], figure: str, path: Path) -> None:
    """One bar for each arm; on a logarithmic axis where they are far apart."""
    from matplotlib.figure import Figure

    names = [row["arm"] for row in result["rows"]]
    values = [row["figures"][figure] for row in result["rows"]]
    picture = Figure(figsize=(6, 0.8 + 0.5 * len(names)), layout="constrained")
    axes = picture.subplots()
    labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
    axes.bar_label(axes.barh(names, values, color=BAR), labels, padding=3)
    if min(values) > 0 and max(values) > WIDE * min(values):
        axes.set_xscale("log")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(figure)
    picture.suptitle("\n".join(wrap(result["title"] + " (simulated)", 72)), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=120, metadata={"Software": None})


def scatter(title: str, series: Series, labels: tuple[str, str], path: Path) -> None:
    """Points (x, y) of each series; `labels` of the axes."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.5, 4), layout="constrained")
    axes = picture.subplots()
    marks = iter("so^x+")
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), linestyle="", marker=next(marks), markersize=5, label=name)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=120, metadata={"Software": None})


def curves(title: str, series: Series, labels: tuple[str, str], path: Path) -> None:
    """Lines through the points (x, y) of each series, both axes logarithmic."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.5, 4), layout="constrained")
    axes = picture.subplots()
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=120, metadata={"Software": None})
