"""The result of an evaluation as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench.machine import circumstances
from loadtest.eval.divergence import Figures

HEADS = (
    ("perplexity", 15), ("ratio", 17), ("mean KL", 19), ("median", 8), ("99 %", 8), ("max", 8),
    ("same top, %", 13),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One engine."""

    name: str
    about: dict[str, Any]
    figures: Figures


def about_engine(info: Any) -> dict[str, Any]:
    """What identifies an engine: from its BackendInfo."""
    return {name: getattr(info, name) for name in ("backend", "model", "dtype", "fingerprint")}


def table(question: dict[str, Any], found: list[Evaluated]) -> str:
    """The figures, a line for each engine."""
    heads = HEADS if any("kl_mean" in each.figures for each in found) else HEADS[:1]
    wide = max(len(each.name) for each in found)
    lines = [" ".join([" " * wide, *(f"{head:>{width}}" for head, width in heads)])]
    for each in found:
        cells = zip(_cells(each.figures), heads, strict=False)
        lines.append(" ".join([f"{each.name:<{wide}}", *(f"{cell:>{width}}" for cell, (_, width) in cells)]))
    shown = (
        f"{question['text']}: {question['windows']} windows of {question['context']} tokens, "
        f"{found[0].figures['tokens']} scored, by {question['path']}"
    )
    return "\n".join([shown, *lines])


def document(question: dict[str, Any], found: list[Evaluated]) -> dict[str, Any]:
    """The result with all that made it what it is."""
    engines = [{"name": each.name, **each.about, **each.figures} for each in found]
    return {"headrace_eval": 1, **circumstances(), **question, "engines": engines}


def write(result: dict[str, Any], path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def _cells(f: Figures) -> Iterator[str]:
    yield f"{f['ppl']:.3f} ± {f['ppl_error']:.3f}"
    if "kl_mean" not in f:
        return
    yield f"{f['ppl_ratio']:.5f} ± {f['ppl_ratio_error']:.5f}"
    yield f"{f['kl_mean']:.6f} ± {f['kl_error']:.6f}"
    yield from (f"{f[name]:.5f}" for name in ("kl_median", "kl_p99", "kl_max"))
    yield f"{f['top1_pct']:.2f} ± {f['top1_error']:.2f}"
