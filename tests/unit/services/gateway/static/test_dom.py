"""A list that is refreshed keeps its elements: the focus, and what a person has selected, stay."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from support.page_modules import run

SCRIPT = """
import { bytes, keep, make, ms, put } from "./dom.js";
let moves = 0;
const list = make("ul");
const insert = list.insertBefore.bind(list);
list.insertBefore = (child, next) => {
  moves += child.parent === list;
  insert(child, next);
};
const refresh = (keys) => keep(list, keys, (key) => key, () => make("li", "new"), put);
const elements = () => new Map(list.children.map((child) => [child.dataset.key, child]));
"""


def test_any_list_becomes_any_other_with_the_same_elements(tmp_path: Path) -> None:
    lists = ["", *map("".join, (p for n in (1, 2, 3, 4) for p in permutations("abcd", n)))]
    script = f"""
    const lists = {lists};
    const wrong = [];
    for (const from of lists) for (const to of lists) {{
      refresh([...from]);
      const before = elements();
      refresh([...to]);
      const shown = list.children.map((child) => child.textContent).join("");
      const same = [...elements()].every(([key, child]) => (before.get(key) ?? child) === child);
      if (shown !== to || !same) wrong.push([from, to, shown]);
    }}
    report([lists.length, wrong]);
    """
    assert run(tmp_path, SCRIPT + script) == [65, []]


@pytest.mark.parametrize(
    ("before", "after"), [("abc", "xyabc"), ("abcd", "xab"), ("abcd", "ad"), ("ab", "ab")]
)
def test_elements_are_not_moved_when_others_come_before_them_or_go(
    tmp_path: Path, before: str, after: str
) -> None:
    """A browser drops the focus and the selection of an element that is moved."""
    script = f"""
    refresh([..."{before}"]);
    const set = [];
    for (const child of list.children) {{
      const text = {{ get: () => child.dataset.key, set: (text) => set.push(text) }};
      Object.defineProperty(child, "textContent", text);
    }}
    refresh([..."{after}"]);
    report([moves, set]);
    """
    assert run(tmp_path, SCRIPT + script) == [0, []], "an equal text is not set again"


def test_figures_have_units(tmp_path: Path) -> None:
    script = """
    report([[0, 999, 1000, 2_100_000_000].map(bytes), [undefined, 0, 12.4, 1234.5].map(ms)]);
    """
    assert run(tmp_path, SCRIPT + script) == [
        ["0 B", "999 B", "1.0 KB", "2.1 GB"],
        ["", "0 ms", "12 ms", "1.23 s"],
    ]
