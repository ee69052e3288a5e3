"""Comments, docstrings and messages of the product are plain English: no pattern of another language's order.

Each pattern has the words to write in its place. A name in `backticks` is not prose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import PRODUCT, ROOT, Source, product

BANNED = {
    r"\b(who|whom|whoever|somebody|someone|nobody|anybody|everybody)\b": "name the process or the client",
    r"\b(tells?|told|says?|said|hears?|heard|talks?|talked|talking|speaks?|spoken)\b": "send, receive",
    r"\bbehind\b": "after",
    r"\bquicker\b": "faster",
    r"\b(the|a|an|its|each|their|every) begins?\b": "start",
    r"(?:^|[.:;]\s+)Of (?!f\b)": "a subject first",
    r"\b(knows?|needs?|heeds?|takes?|comes?|goes|gives?|finds?|costs?) not\b": "does not, cannot",
    r"\b(is|are|was|were) no (news|matter|reason|place|such|longer than)\b": "a plain verb",
    r"\bas from\b": "since, from",
    r"\bwhat there is\b": "name it",
    r"\bwhatever\b": "any, each",
}
PATTERNS = {
    re.compile(pattern, re.IGNORECASE if "Of " not in pattern else 0): to for pattern, to in BANNED.items()
}


def prose(source: Source) -> Iterator[tuple[int, str]]:
    """The comments, docstrings and sentences in strings of a file, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield node.lineno, node.value


def flaws(line: int, text: str) -> Iterator[str]:
    bare = re.sub(r"`[^`]*`", "``", text)
    for pattern, instead in PATTERNS.items():
        for found in pattern.finditer(bare):
            around = bare[max(found.start() - 30, 0) : found.end() + 30].replace("\n", " ")
            yield f"{line + bare[: found.start()].count(chr(10))}: {found[0]!r} in '{around}': {instead}"


@pytest.mark.parametrize(
    "source", [s for s in product() if s.name.split("/")[0] in PRODUCT], ids=lambda s: s.name
)
def test_product_is_in_plain_english(source: Source) -> None:
    assert [flaw for line, text in prose(source) for flaw in flaws(line, text)] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_docs_are_in_plain_english(page: Path) -> None:
    text = re.sub(
        r"```.*?```", lambda block: re.sub(r"[^\n]", "", block[0]), page.read_text(), flags=re.DOTALL
    )
    assert list(flaws(1, text)) == []
