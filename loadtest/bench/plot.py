"""Pictures of results. matplotlib is an extra (`pip install headrace[bench]`) and is loaded only here.

curve     throughput against latency, a point for each run of a sweep, a line for each result
cdf       the share of requests (of gaps, for ITL) that took at most so long, a line for each run
timeline  one run: requests in flight and tokens a second, over its time
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench.compare import point_name
from loadtest.bench.document import Result
from shared.errors import SetupError

CURVES = (
    ("p99_ttft_ms", "P99 TTFT (ms)"),
    ("median_itl_ms", "Median ITL (ms)"),
    ("p99_e2el_ms", "P99 E2EL (ms)"),
)
CDFS = ("ttft", "itl", "e2el")
Points = list[tuple[float, float]]


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Every picture that the results give; their files. Raises SetupError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise SetupError("plots need matplotlib: pip install 'headrace[bench]'")
    folder.mkdir(parents=True, exist_ok=True)
    made = [_cdfs(results, folder / "cdf.png")]
    if any(len(result["runs"]) > 1 for result in results) or len(results) > 1:
        made.append(_curves(results, folder / "curve.png"))
    for place, result in enumerate(results, 1):
        for number, run in enumerate(result["runs"], 1):
            name = re.sub(r"\W+", "_", f"timeline {place} {result['label']} {number}")
            made.append(_timeline(result, run, folder / f"{name}.png"))
    return made


def curve(result: Result, figure: str) -> Points:
    """(output tokens a second, figure) of each run, by throughput."""
    runs = (run["figures"] for run in result["runs"])
    return sorted((f["output_throughput"], f[figure]) for f in runs if f[figure] is not None)


def samples_ms(run: dict[str, Any], name: str) -> list[float]:
    """TTFT, ITL or E2EL of the whole answers of a run, sorted."""
    requests = run["requests"]
    values: Iterable[float]
    good = [i for i, error in enumerate(requests["error"]) if not error]
    first, began, itls = requests["first_us"], requests["intended_us"], requests["itls_us"]
    if name == "itl":
        values = (itl for i in good for itl in itls[i])
    elif name == "ttft":
        values = (first[i] - began[i] for i in good)
    else:
        values = (first[i] + sum(itls[i]) - began[i] for i in good)
    return sorted(value / 1e3 for value in values)


def in_flight(run: dict[str, Any]) -> Points:
    """(second, requests in flight) whenever that changes."""
    requests = run["requests"]
    steps = sorted([(at, 1) for at in requests["sent_us"]] + [(at, -1) for at in requests["ended_us"]])
    running = np.cumsum([step for _, step in steps])
    return [(at / 1e6, float(count)) for (at, _), count in zip(steps, running, strict=True)]


def tokens_by_second(run: dict[str, Any]) -> Points:
    """(second, output tokens that came within it)."""
    requests = run["requests"]
    tokens: dict[int, float] = {}
    columns = (requests["first_us"], requests["itls_us"], requests["output_tokens"])
    for first, itls, output in zip(*columns, strict=True):
        if first is not None:
            came = np.cumsum([first, *itls]) // 1_000_000
            for second, pieces in Counter(map(int, came)).items():
                tokens[second] = tokens.get(second, 0.0) + pieces * output / len(came)
    return [(float(second), tokens.get(second, 0.0)) for second in range(max(tokens, default=-1) + 1)]


def _cdfs(results: Sequence[Result], path: Path) -> Path:
    picture, axes = _axes(len(CDFS))
    for ax, name in zip(axes, CDFS, strict=True):
        for result in results:
            for run in result["runs"]:
                values = samples_ms(run, name)
                if values:
                    ax.step(values, np.arange(1, len(values) + 1) / len(values), where="post",
                            label=f"{result['label']}: {point_name(run)}")  # fmt: skip
        ax.set_xlabel(f"{name.upper()} (ms)")
        ax.set_ylabel("share")
    axes[0].legend(fontsize=6)
    return _save(picture, path)


def _curves(results: Sequence[Result], path: Path) -> Path:
    picture, axes = _axes(len(CURVES))
    for ax, (figure, words) in zip(axes, CURVES, strict=True):
        for result in results:
            points = curve(result, figure)
            if points:
                ax.plot(*zip(*points, strict=True), marker="o", markersize=4, label=result["label"])
        ax.set_xlabel("output tokens a second")
        ax.set_ylabel(words)
    axes[0].legend(fontsize=7)
    return _save(picture, path)


def _timeline(result: Result, run: dict[str, Any], path: Path) -> Path:
    picture, axes = _axes(2)
    running, tokens = in_flight(run), tokens_by_second(run)
    axes[0].step([x for x, _ in running], [y for _, y in running], where="post")
    axes[0].set_ylabel("requests in flight")
    axes[1].bar([x for x, _ in tokens], [y for _, y in tokens], width=1.0, align="edge")
    axes[1].set_ylabel("output tokens in each second")
    for ax in axes:
        ax.set_xlabel("s")
    picture.suptitle(f"{result['label']}: {point_name(run)}", fontsize=9)
    return _save(picture, path)


def _axes(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(4.2 * count, 3.4), layout="constrained")
    axes = picture.subplots(1, count)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return picture, axes


def _save(picture: Any, path: Path) -> Path:
    picture.savefig(path, dpi=120, metadata={"Software": None})
    return path
