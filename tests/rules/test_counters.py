"""A counter is declared once: all that exports, shows or documents one follows from its declaration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import Source, product

from shared.telemetry.counters import DECLARED, RECENT, Counter, declared

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
READERS = (  # of the status of other services
    "services/launcher/commands/status.py", "services/launcher/commands/kv.py", "services/launcher/up.py",
    "services/launcher/background.py", "services/gateway/native_call.py", "services/gateway/page.py",
    "shared/actor/membership.py",
)  # fmt: skip
COUNTERS = [each for service in DECLARED for each in declared(service)]
KEYS = {
    key for each in COUNTERS for key in (each.status.rpartition(".")[2], each.recent, each.load) if key
} - {"open", "loads"}  # words of other facts


def test_a_metric_is_declared_once() -> None:
    names = [each.metric for each in COUNTERS if each.metric]
    assert len(names) == len({*names}) >= 90


def row_of(each: Counter) -> str:
    """The row that the page has for a metric."""
    labels = ", ".join(f"`{label}`" for label in each.attributes)
    vllm = f"`{each.vllm}`" if each.vllm else ""
    return f"| `{each.metric}` | {each.kind}, {each.unit} | {labels} | {each.about} | {vllm} |"


def test_the_page_has_the_row_of_each_metric_and_no_other() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(("| `headrace.", "| `gen_ai."))]
    rows += [line for line in PAGE.read_text().splitlines() if line.startswith(("| `http.", "| `process."))]
    assert sorted(rows) == sorted(row_of(each) for each in COUNTERS if each.metric)


@pytest.mark.parametrize("source", product(), ids=lambda s: s.name)
def test_no_metric_is_made_beside_its_declaration(source: Source) -> None:
    if source.name.startswith(("shared/telemetry/", "tests/", "loadtest/")):
        return
    called = [node.func for node in source.nodes if isinstance(node, ast.Call)]
    names = {ast.unparse(func).rpartition(".")[2] for func in called}
    assert not names & {"MetricPoint", "HistogramPoint"}
    assert RECENT not in {node.value for node in source.nodes if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("name", READERS)
def test_no_counter_is_read_by_a_string(name: str) -> None:
    (source,) = [each for each in product() if each.name == name]
    assert not {*read_keys(source)} & KEYS


def read_keys(source: Source) -> Iterator[object]:
    """The strings with which a file reads a mapping: `facts["key"]`, `facts.get("key")`."""
    for node in source.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield node.slice.value
        is_get = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        )
        if is_get and node.args and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value
