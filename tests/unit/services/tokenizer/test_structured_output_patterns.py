"""Patterns of schemas: what the grammar engine accepts of them is what `re` accepts."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from services.tokenizer.structured_output import resolved, without_optional_groups

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("ab1", repeat=length)]
PATTERNS, EACH = 150, 40
QUANTIFIERS = ("", "", "", "?", "*", "+", "{1,2}", "{0,1}", "{2}")


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^a(b1+)?Z$", "^a(|b1+)Z$"),
        ("(?:a|b)??c?", "(?:|a|b)c?"),
        ("(?P<x>a)?(?<y>b)?", "(?P<x>|a)(?<y>|b)"),
        (r"\(a\)?[(]?[)]?[]()]?[\])]?", r"\(a\)?[(]?[)]?[]()]?[\])]?"),
        ("((a)?b)?", "(|(|a)b)"),
        ("(a)+(b){0,1}(c)*?", "(a)+(b){0,1}(c)*?"),
        ("(?=a)?", "(?=a)?"),
        ("a)?(", "a)?("),
    ],
)
def test_optional_groups_are_written_as_choices(pattern: str, written: str) -> None:
    assert without_optional_groups(pattern) == written


def some_pattern(chance: random.Random, depth: int) -> str:
    def part() -> str:
        if depth == 0 or chance.random() < 0.5:
            return chance.choice(("a", "b", "[ab]", "1"))
        return "(" + "|".join(some_pattern(chance, depth - 1) for _ in range(chance.choice((1, 1, 2)))) + ")"

    return "".join(part() + chance.choice(QUANTIFIERS) for _ in range(chance.randint(1, 3)))


def test_the_engine_accepts_what_re_accepts() -> None:
    """Without the rewriting some of these are followed wrongly."""
    chance = random.Random(1)
    wrong = []
    for _ in range(PATTERNS):
        pattern = f"^{some_pattern(chance, 2)}$"
        schema = resolved({"type": "string", "pattern": pattern}, "p")
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
        for text in chance.sample(TEXTS, EACH):
            accepted = _is_grammar_accept_string(grammar, json.dumps(text))
            if accepted != bool(re.fullmatch(pattern, text)):
                wrong.append((pattern, text))
    assert wrong == []
