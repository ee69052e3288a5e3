"""What a grammar hardly leaves open is drafted: the names in an object, and the usual text between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.default_model import model_path
from support.executor.plan_maker import GREEDY
from support.structured import grammar_of

from services.executor.sampling.grammar_matchers import CompiledGrammars
from shared.messages import SlotOpen, ints
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"const": "river"},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
ANSWER = '{"name": "Old, alias: \\"a\\"", "age": 23, "kind": "river"}'
STEPS = [  # what is drafted, what of it is kept and the token after that
    ([], ['{"']),
    (["name", '":', ' "'], ["name", '":', ' "', "Old"]),
    *[([], [token]) for token in (",", " alias", ":", ' \\"', "a", '\\"', '",')],
    ([' "', "age", '":', " "], [' "', "age", '":', " ", "2"]),
    ([], ["3"]),
    ([], [","]),
    ([' "', "kind", '":', ' "', "river", '"'], [' "', "kind", '":', ' "', "river", '"}']),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(ModelFiles("m", model_path()))


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Iterator[CompiledGrammars]:
    found = CompiledGrammars(lambda: vocabulary, len(vocabulary.token_bytes))
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    opened = SlotOpen(
        slot=3, generation=1, seq=1, prompt_tokens=1, sampling=GREEDY, tokens=ints([5]),
        grammar=grammar_of(form),
    )  # fmt: skip
    found.open(opened)
    found._rows[3].compilation.result.result(60)
    yield found
    found.end()


def test_names_of_an_object_are_drafted(grammars: CompiledGrammars, vocabulary: Vocabulary) -> None:
    assert steps_of(ANSWER, grammars, vocabulary) == STEPS


def test_names_are_drafted_with_the_white_space_of_the_answer(
    grammars: CompiledGrammars, vocabulary: Vocabulary
) -> None:
    text = '{\n  "name": "Po",\n  "age": 2,\n  "kind": "river"\n}'
    assert steps_of(text, grammars, vocabulary) == [
        ([], ["{"]),
        ([' "', "name", '":', ' "'], ["\n "]),
        ([' "', "name", '":', ' "'], [' "', "name", '":', ' "', "Po"]),
        ([], ['",']),
        (["\n ", ' "', "age", '":', " "], ["\n ", ' "', "age", '":', " ", "2"]),
        ([], [","]),
        (
            ["\n ", ' "', "kind", '":', ' "', "river", '"'],
            ["\n ", ' "', "kind", '":', ' "', "river", '"', "\n"],
        ),
        ([], ["}"]),
    ]


def steps_of(
    text: str, grammars: CompiledGrammars, vocabulary: Vocabulary
) -> list[tuple[list[str], list[str]]]:
    known, answer, steps = [5], vocabulary.encode(text), []
    tokens = {3: known}.__getitem__
    while answer:
        drafts = [*grammars.forced(tokens, 3, 8)]
        assert [*grammars.forced(tokens, 3, 2)] == drafts[:2]  # asking leaves the matcher as it was
        kept = 0
        while kept < min(len(drafts), len(answer)) and drafts[kept] == answer[kept]:
            kept += 1
        run, answer = answer[: kept + 1], answer[kept + 1 :]
        known += run
        steps.append(([*map(vocabulary.token_text, drafts)], [*map(vocabulary.token_text, run)]))
    return [([shown(t) for t in drafts], [shown(t) for t in run]) for drafts, run in steps]


def shown(token: str) -> str:
    return token.replace("Ġ", " ").replace("Ċ", "\n")


def test_a_slot_without_a_grammar_or_at_its_end_has_no_drafts(
    grammars: CompiledGrammars, vocabulary: Vocabulary
) -> None:
    known = [5, *vocabulary.encode(ANSWER), vocabulary.eos_ids[0]]
    assert grammars.forced(lambda _: known, 2, 8) == ()
    assert grammars.forced(lambda _: known, 3, 8) == ()


def test_tokens_that_the_weights_lack_are_no_drafts(
    vocabulary: Vocabulary, grammars: CompiledGrammars
) -> None:
    known = [5, *vocabulary.encode('{"')]
    assert grammars.forced(lambda _: known, 3, 1) == vocabulary.encode("name")
    grammars._vocab = vocabulary.encode("name")[0]
    assert grammars.forced(lambda _: known, 3, 1) == ()


def test_a_sequence_that_breaks_its_grammar_has_no_drafts(grammars: CompiledGrammars) -> None:
    assert grammars.forced(lambda _: [5, 7, 7], 3, 8) == ()
