"""Random walks through grammars, by the same masks as the engine's: what they spell must be valid."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, time
from ipaddress import IPv4Address
from typing import Any
from uuid import UUID

import jsonschema
import jsonschema_rs
import pytest
import torch
from support.default_model import model_path
from support.json_schemas import SCHEMAS
from support.structured import grammar_of

from services.executor.sampling.grammar_matchers import CompiledGrammars
from shared.answer_formats import grammar
from shared.answer_formats.formats import HERMES
from shared.answer_formats.parser import AnswerParser
from shared.answer_formats.reader import CONTENT
from shared.messages import SlotOpen, ints
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import Vocabulary, load_vocabulary

PROMPT = [1, 2, 3]
MOST_TOKENS = 400
PADDED = 49_160  # a vocabulary as wide as an output layer may be
WALKS = 3
WANDERS = 40  # tokens; then a text without bounds is closed as soon as it may be


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(ModelFiles("m", model_path()))


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> CompiledGrammars:
    return CompiledGrammars(lambda: vocabulary, PADDED)


def opened(fields: dict[str, Any], slot: int, generated: list[int]) -> SlotOpen:
    return SlotOpen(
        slot=slot,
        generation=1,
        seq=1,
        prompt_tokens=len(PROMPT),
        grammar=grammar_of(fields),
        tokens=ints([*PROMPT, *generated]),
    )


def walk(grammars: CompiledGrammars, vocabulary: Vocabulary, fields: dict[str, Any], seed: int) -> bytes:
    """Choose among what may follow until the end is chosen. The slot is opened anew on the way, as after a
    pause."""
    random = torch.Generator().manual_seed(seed)
    generated: list[int] = []
    closing = [i for i, text in enumerate(vocabulary.token_bytes) if text[:1] in (b'"', b"}", b"]")]
    closing += vocabulary.eos_ids
    grammars.open(opened(fields, 0, generated))
    for _ in range(MOST_TOKENS):
        if len(generated) == 3:
            grammars.open(opened(fields, 0, generated))
        logits = torch.rand((1, PADDED), generator=random)
        if len(generated) > WANDERS:
            logits[0, closing] += 1
        assert grammars.mask(logits, [0], [0], lambda _: [*PROMPT, *generated]) == {}
        token = int(logits[0].argmax())
        if token in vocabulary.eos_ids:
            return b"".join(vocabulary.token_bytes[t] for t in generated)
        generated.append(token)
    raise AssertionError(f"no end within {MOST_TOKENS} tokens")


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_valid(grammars: CompiledGrammars, vocabulary: Vocabulary, name: str) -> None:
    fields = {"structured_outputs": {"json": SCHEMAS[name]}}
    for seed in range(WALKS):
        text = walk(grammars, vocabulary, fields, seed)
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("date-time", datetime.fromisoformat),
        ("date", date.fromisoformat),
        ("time", time.fromisoformat),
        ("uuid", UUID),
        ("ipv4", lambda text: IPv4Address(re.sub(r"\b0+(?=\d)", "", text))),
    ],
)
def test_text_under_a_format_is_valid_and_ends(
    grammars: CompiledGrammars, vocabulary: Vocabulary, form: str, read: Callable[[str], object]
) -> None:
    """Read by the standard library, which takes no year 0; longer than 40 characters none gets."""
    fields = {"structured_outputs": {"json": {"type": "string", "format": form}}}
    for seed in range(2 * WALKS):
        text = json.loads(walk(grammars, vocabulary, fields, seed))
        assert read(re.sub("^0000", "0001", text))
        assert len(text) < 40


@pytest.mark.parametrize("form", ["email", "hostname", "uri", "ipv6", "duration"])
def test_a_format_is_what_another_library_takes(
    grammars: CompiledGrammars, vocabulary: Vocabulary, form: str
) -> None:
    schema = {"type": "string", "format": form, "maxLength": 60}
    right = jsonschema_rs.validator_for(schema, validate_formats=True).is_valid
    assert not right("-")
    for seed in range(2 * WALKS):
        text = json.loads(walk(grammars, vocabulary, {"structured_outputs": {"json": schema}}, seed))
        assert right(text), text


def test_regex_choice_and_grammar_are_followed(grammars: CompiledGrammars, vocabulary: Vocabulary) -> None:
    def spelled(**asked: Any) -> str:
        return walk(grammars, vocabulary, {"structured_outputs": asked}, 5).decode()

    assert re.fullmatch(r"(yes|no), \d{3}!", spelled(regex=r"(yes|no), \d{3}!"))
    assert spelled(choice=["Paris", 'R"ome"\n']) in ("Paris", 'R"ome"\n')
    sums = 'root ::= term (" + " term){1,3}\nterm ::= [1-9] | "(" term ")"'
    ast.parse(spelled(grammar=sums), mode="eval")


def test_rows_without_a_grammar_are_left_alone(grammars: CompiledGrammars) -> None:
    grammars.open(opened({"grammar": 'root ::= "no"'}, 4, []))
    logits = torch.zeros((3, PADDED))
    assert grammars.rows_of([3, 4, 5]) == [1]
    assert grammars.mask(logits, [1], [3, 4, 5], lambda _: PROMPT) == {}
    assert logits[0].eq(0).all()
    assert logits[2].eq(0).all()
    assert 0 < int(logits[1].eq(0).sum()) < 10
    grammars.close(4)
    assert grammars.rows_of([3, 4, 5]) == []


def test_a_row_past_its_end_is_left_alone(grammars: CompiledGrammars, vocabulary: Vocabulary) -> None:
    """A plan that was made before the end was known has it once more."""
    (no,) = vocabulary.encode("no")
    done = [no, vocabulary.eos_ids[0]]
    grammars.open(opened({"grammar": 'root ::= "no"'}, 4, done))
    logits = torch.zeros((1, PADDED))
    assert grammars.mask(logits, [0], [4], lambda _: [*PROMPT, *done]) == {}
    assert logits.eq(0).all()


def test_a_grammar_that_does_not_compile_is_the_fault_of_its_request(grammars: CompiledGrammars) -> None:
    wrong = grammar.packed(grammar.whole(None, {"text": "nothing"}, thinking=False), frozenset())
    grammars.open(replace(opened({"grammar": 'root ::= "x"'}, 0, []), grammar=wrong))
    logits = torch.zeros((2, PADDED))
    failures = grammars.mask(logits, [1], [9, 0], lambda _: PROMPT)
    assert failures == {1: 'refused: grammar: at 3(7): unknown name: "nothing"'}


def test_answer_is_calls_or_text_under_the_schema_with_tools_and_a_schema(
    grammars: CompiledGrammars, vocabulary: Vocabulary
) -> None:
    word = {"type": "object", "properties": {"word": {"enum": ["a", "b"]}}, "required": ["word"]}
    text = {"type": "object", "properties": {"name": {"enum": ["f", "g"]}, "n": {"enum": [1, 2]}}}
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": word}}]}
    fields = {**tools, "parallel_tool_calls": False, "guided_json": {**text, "required": ["name", "n"]}}
    kinds = set()
    for seed in range(4 * WALKS):
        answer = walk(grammars, vocabulary, fields, seed).decode()
        parser = AnswerParser(HERMES, tools={"f": word}, parallel=False)
        parts = [*parser.feed(answer), *parser.finish()]
        if parser.calls:
            call, arguments = parts
            assert call.text == "f"
            jsonschema.validate(json.loads(arguments.text), word)
        else:
            assert [part.kind for part in parts] == [CONTENT]
            jsonschema.validate(json.loads(answer), text)
        kinds.add(parser.calls)
    assert kinds == {0, 1}
