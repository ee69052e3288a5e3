"""docs/design/semantics.md: each of its lines names a test that exists, or is marked as a difference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "design" / "semantics.md").read_text()
LINES = [
    re.split(r"(?<!\\)\|", line)[1:-1]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| What |")
]


def test_the_page_has_its_lines() -> None:
    assert len(LINES) >= 30


@pytest.mark.parametrize("cells", LINES, ids=[cells[0].strip() for cells in LINES])
def test_a_line_has_its_test(cells: list[str]) -> None:
    *facts, named = (cell.strip() for cell in cells)
    assert len(facts) == 4
    if named == "difference":
        assert len(set(facts[1:])) > 1
        return
    file, name = named.strip("`").split("::")
    assert re.search(rf"^(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
