"""The load programs that pages, scripts and containers start exist. Pages of figures may name older ones."""

from __future__ import annotations

import re

from support.source_tree import ROOT

NAMED = re.compile(r"-m,? (loadtest(?:\.\w+)*)")
FIGURES = ("docs/benchmarks",)


def test_programs_that_are_named_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("scripts/*"), ROOT / "compose.yaml"]
    named = {
        (name, module)
        for path in pages
        if path.is_file() and not (name := str(path.relative_to(ROOT))).startswith(FIGURES)
        for module in NAMED.findall(path.read_text())
    }
    assert len(named) > 5
    assert {(name, module) for name, module in named if not _is_program(module)} == set()


def _is_program(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
