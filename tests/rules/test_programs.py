"""The load programs that pages, scripts and containers start exist, and the tests that scripts run. Pages of
figures may name older ones."""

from __future__ import annotations

import re

from support.source_tree import ROOT

NAMED = re.compile(r"-m,? (loadtest(?:\.\w+)*)")
TEST = re.compile(r"\btests/[\w/.]+\.py\b")
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


def test_tests_that_scripts_run_exist() -> None:
    scripts = [path for path in ROOT.glob("scripts/*") if path.is_file()]
    named = {(path.name, test) for path in scripts for test in TEST.findall(path.read_text())}
    assert len(named) > 5
    assert {(name, test) for name, test in named if not (ROOT / test).is_file()} == set()


def _is_program(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
