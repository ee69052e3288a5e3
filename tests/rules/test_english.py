"""Comments, docstrings, messages and names are plain English: no pattern of another language's order.

Each pattern has the words to write in its place. A name in `backticks` is not prose. Tests are prose, too,
named `test_<subject>_<does>_<when>`, the subject first.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import ROOT, Source, product

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
# without a word that a pattern needs a file has no flaw, and is not parsed
SUSPECT = re.compile("|".join(p if "Of " not in p else r"(?-i:\bOf )" for p in BANNED), re.IGNORECASE)

# words that no name holds; the patterns above have the words in their place
VAGUE = re.compile(
    "who|whom|whoever|somebody|someone|nobodys?|anybody|anyone|everybody|everyone|whatever|"
    "tells?|told|says?|said|hears?|heard|talks?|talked|speaks?|spoken|behind|quicker"
)
VAGUE_PART = re.compile(rf"(?<![A-Za-z])(?i:{VAGUE.pattern})(?![a-z])|(?:{VAGUE.pattern.title()})(?![a-z])")
# tests: a subject first, the thing itself, and the field's verbs
NAMED_LATE = re.compile(
    "test_(?:(?:what|which|where|when|while|if|its?|they|that|those|this|there|here|nothing|everything|"
    "anything|too|after|before|beside|between|during|from|with|without|in|under|on|at|of|for|by|to|as)_|"
    rf"(?:\w*_)?(?:{VAGUE.pattern}|asks?|asked|knows?|knew|those)(?:_|$))"
)
# this file's own patterns; questions to a model, whose answers are recorded
NOT_PROSE = ("tests/rules/test_english.py", "loadtest/eval/greedy.py")
TREE = (*product(), *(Source(path, path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))))
SOURCES = [source for source in TREE if source.name not in NOT_PROSE]


def prose(source: Source) -> Iterator[tuple[int, str]]:
    """The comments, docstrings, sentences in strings and reasons of asserts of a file, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield node.lineno, node.value
        elif isinstance(node, ast.Assert) and isinstance(node.msg, ast.Constant):
            yield node.msg.lineno, str(node.msg.value)


def flaws(line: int, text: str) -> Iterator[str]:
    bare = re.sub(r"`[^`]*`", "``", text)
    for pattern, instead in PATTERNS.items():
        for found in pattern.finditer(bare):
            around = bare[max(found.start() - 30, 0) : found.end() + 30].replace("\n", " ")
            yield f"{line + bare[: found.start()].count(chr(10))}: {found[0]!r} in '{around}': {instead}"


def names(source: Source) -> Iterator[tuple[int, str]]:
    """The functions, classes, parameters, variables and attributes that a file defines, with their lines."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def test_source_is_in_plain_english() -> None:
    suspects = [source for source in SOURCES if SUSPECT.search(source.text)]
    found = [(s.name, flaw) for s in suspects for line, text in prose(s) for flaw in flaws(line, text)]
    assert found == []


def test_names_hold_no_vague_word() -> None:
    """Machine code is built again for each change of the text of kernels/cpu_jit."""
    found = [
        f"{source.name}:{line} {name}"
        for source in SOURCES
        if not source.name.startswith("kernels/cpu_jit/") and VAGUE_PART.search(source.text)
        for line, name in names(source)
        if not name.startswith("test_") and any(map(VAGUE.fullmatch, words(name)))
    ]
    assert found == []


def test_tests_are_named_by_their_subject() -> None:
    tests = [(source.name, name) for source in SOURCES for name in re.findall(r"def (test_\w+)", source.text)]
    assert len(tests) > 3_000
    assert [test for test in tests if NAMED_LATE.match(test[1]) or test[1].count("_") < 3] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_docs_are_in_plain_english(page: Path) -> None:
    text = re.sub(
        r"```.*?```", lambda block: re.sub(r"[^\n]", "", block[0]), page.read_text(), flags=re.DOTALL
    )
    assert list(flaws(1, text)) == []
