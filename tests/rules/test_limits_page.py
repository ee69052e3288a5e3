"""docs/reference/limits.md states what the code holds: each constant it names has the number it gives."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"
ROWS = [
    (most.strip(), held.strip().strip("`"))
    for _, most, held, _ in re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\|$", PAGE.read_text(), re.M)
    if re.search(r"\.[A-Z_]+`", held)
]


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) >= 35


@pytest.mark.parametrize(("most", "held"), ROWS, ids=[held for _, held in ROWS])
def test_limit_equals_the_one_on_the_page(most: str, held: str) -> None:
    module, _, name = held.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    number = re.match(r"([\d,]+)( s)?", most)
    assert number is not None
    written = int(number[1].replace(",", ""))
    assert value == (written * 1_000_000 if name.endswith("_US") and number[2] else written)
