"""The answers to a newcomer's questions are where tests/support/questions.py says, in few enough files."""

from __future__ import annotations

import ast

import pytest
from support.questions import QUESTIONS, Question
from support.source_tree import ROOT


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text)
def test_an_answer_is_in_few_files(question: Question) -> None:
    assert len({part.split(":")[0] for part in question.answer}) <= question.limit
    for part in question.answer:
        path, name = part.split(":")
        tree = ast.parse((ROOT / path).read_text())
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, kinds)}, part
