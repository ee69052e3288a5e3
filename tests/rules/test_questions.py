"""The answers to a newcomer's questions are where tests/support/questions.py puts them, in few enough
files."""

from __future__ import annotations

import ast

import pytest
from support.questions import QUESTIONS, Question
from support.source_tree import ROOT

READING = [q for q in QUESTIONS if not q.text.startswith("add ")]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text)
def test_an_answer_is_in_few_files(question: Question) -> None:
    assert len({part.split(":")[0] for part in question.answer}) <= question.limit
    for part in question.answer:
        path, name = part.split(":")
        tree = ast.parse((ROOT / path).read_text())
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, kinds)}, part


@pytest.mark.parametrize("question", READING, ids=lambda q: q.text)
def test_the_page_for_readers_names_the_same_places(question: Question) -> None:
    page = (ROOT / "docs/guides/where.md").read_text()
    section = page.partition(f"## {question.text}\n")[2].partition("\n## ")[0]
    places = [part.split(":") for part in question.answer]
    assert [(path, name) for path, name in places if f"`{path}`" not in section or name not in section] == []
