"""Answers of 24 families, whole and at every split of the stream."""

from __future__ import annotations

import itertools
import json

import pytest
from support.recorded_answers import ANSWERS, FIRST, SECOND, TEXT, THOUGHT, TOOLS, Answer, parts_of, read

from shared.answer_formats.formats import FORMATS, THINKING, Keyed, Python
from shared.answer_formats.parser import AnswerParser, called_functions
from shared.answer_formats.reader import MAX_HEAD, MAX_HELD, Part

NAMES = [f"{i}-{answer.form}" for i, answer in enumerate(ANSWERS)]


@pytest.mark.parametrize("answer", ANSWERS, ids=NAMES)
def test_parser_reads_the_whole_answer(answer: Answer) -> None:
    found = read(answer.form, answer.text, thinking=answer.opened)
    assert found.reasoning == (THOUGHT if answer.thinks else "")
    assert found.content == (TEXT if answer.has_text else "")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
        ("get_weather", FIRST),
        ("get_time", SECOND),
    ]


@pytest.mark.parametrize("answer", ANSWERS, ids=NAMES)
def test_every_split_in_two_and_every_character_alone(answer: Answer) -> None:
    whole = read(answer.form, answer.text, thinking=answer.opened)
    for at in range(1, len(answer.text)):
        assert read(answer.form, answer.text[:at], answer.text[at:], thinking=answer.opened) == whole, at
    assert read(answer.form, *answer.text, thinking=answer.opened) == whole


@pytest.mark.parametrize("answer", ANSWERS, ids=NAMES)
def test_text_has_no_calls_and_loses_nothing_without_functions(answer: Answer) -> None:
    found = read(answer.form, *answer.text, thinking=answer.opened, tools=None)
    assert found.calls == []
    assert found.reasoning.startswith(THOUGHT if answer.thinks else "")
    assert "Europe/Berlin" in found.content + found.reasoning


@pytest.mark.parametrize("answer", ANSWERS, ids=NAMES)
def test_parser_reads_one_call_at_most(answer: Answer) -> None:
    found = read(answer.form, *answer.text, thinking=answer.opened, parallel=False)
    if answer.form == "llama4_pythonic":  # a list of calls in Python is read as a whole
        return
    assert [name for name, _ in found.calls] == ["get_weather"]
    assert "Europe/Berlin" in found.content


@pytest.mark.parametrize("answer", ANSWERS, ids=NAMES)
def test_the_functions_of_an_answer_are_named_once_each_from_its_tokens(answer: Answer) -> None:
    data = f"{answer.text}".encode()
    table = [data[at : at + 5] for at in range(0, len(data), 5)]
    form = answer.form + (THINKING if answer.opened else "")
    ids = [*range(len(table)), len(table) + 7]  # a padded id has no text
    assert called_functions(form, ids, table) == ["get_weather", "get_time"]


def test_an_answer_without_a_format_or_without_calls_names_no_function() -> None:
    twice = f"<tool_call>\n{CALL}\n</tool_call>".encode()
    assert called_functions("", [0], [twice]) == []
    assert called_functions("hermes", [1], [twice, b"I call nothing."]) == []
    assert called_functions("hermes", [0, 0], [twice]) == ["f"]


CALL = '{"name": "f", "arguments": {"a": 1}}'
AFTER_CALLS = [
    *((answer.form, f"{answer.text} and, {{so}}; on", answer.opened) for answer in ANSWERS),
    ("hermes", f"<tool_call>\n{CALL}, then; more", False),
    ("hermes", f"<tool_call>\n{CALL}; {{more}} <tool_call>", False),
    ("llama3", '{"name": "get_time", "parameters": {}}, and more', False),
    ("llama3", CALL, False),
    ("xlam", f"[{CALL}]", False),
    ("llama3", '{"answer": 4, "text": "{}"}\n', False),
    ("xlam", "[1, 2]", False),
]


@pytest.mark.parametrize("parallel", [True, False], ids=["calls", "one_call"])
@pytest.mark.parametrize(
    ("form", "text", "opened"), AFTER_CALLS, ids=[f"{a[0]}{i}" for i, a in enumerate(AFTER_CALLS)]
)
def test_text_after_calls_is_the_same_at_every_split_and_its_place_is_known(
    form: str, text: str, opened: bool, parallel: bool
) -> None:
    whole = read(form, text, thinking=opened, parallel=parallel)
    for cuts in [*range(1, len(text)), None]:
        pieces = list(text) if cuts is None else [text[:cuts], text[cuts:]]
        assert read(form, *pieces, thinking=opened, parallel=parallel) == whole, cuts
        parser = AnswerParser(FORMATS[form], tools=TOOLS, thinking=opened, parallel=parallel)
        placed, decided, end = "", 0, 0
        for piece in [*pieces, ""]:
            parser.feed(piece, last=not piece)
            for begin, after in parser.content():
                assert max(decided, end) <= begin < after <= parser.decided
                placed, end = placed + text[begin:after], after
            assert decided <= parser.decided
            decided = parser.decided
        assert decided == len(text)
        if parallel or not isinstance(FORMATS[form].notations[0], Python | Keyed):  # else not the raw text
            assert "".join(placed.split()) == "".join(whole.content.split())


def test_the_name_comes_first_and_the_arguments_as_they_arrive() -> None:
    text = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
    steps = [parts for parts in parts_of("hermes", list(text)) if parts]
    assert steps[0] == [Part("call", "get_time", 0), Part("arguments", "{", 0)]
    assert [part.text for parts in steps[1:] for part in parts] == list('"zone": "CET"}')


def test_a_text_argument_in_tags_comes_as_it_arrives() -> None:
    text = (
        '<tool_call>\n<function=get_time>\n<parameter=zone>\na"b\n\n</parameter>\n</function>\n</tool_call>'
    )
    steps = [part.text for parts in parts_of("qwen3_coder", list(text)) for part in parts]
    assert steps == ["get_time", '{"zone": "', "a", '\\"', "b", "\\n", '"', "}"]


def test_plain_text_is_not_held_back() -> None:
    steps = parts_of("qwen3", list("1 < 2, and <b>"))
    shown = list(itertools.accumulate("".join(part.text for part in parts) for parts in steps))
    assert shown[0] == "1"
    assert shown[5] == "1 < 2,"
    assert shown[-1] == "1 < 2, and <b>"


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_markers_is_the_content_of_any_format(name: str) -> None:
    text = "  Two words, {braces}, [a list] and 'quotes'.\n\nA < B > C | D  \n"
    assert read(name, *text).content + read(name, *text).reasoning == text
    assert read(name, text, tools=None).content == text


def test_held_back_text_has_a_bound() -> None:
    head = "[TOOL_CALLS]" + "a" * 2 * MAX_HEAD
    parts = parts_of("mistral_v11", [head])[0]
    assert parts == [Part("content", head)]
    held = '<tool_call>{"arguments": {"a": "' + "b" * 2 * MAX_HELD
    pieces = [held[i : i + 4096] for i in range(0, len(held), 4096)]
    steps = parts_of("hermes", pieces)
    first = next(i for i, parts in enumerate(steps) if parts)
    assert first <= MAX_HELD // 4096 + 1
    assert "".join(part.text for parts in steps for part in parts) == held


def test_reasoning_that_does_not_end_is_reasoning() -> None:
    assert read("qwen3", "<think>\nOn and on").reasoning == "On and on"
    assert read("nemotron", *"On and on", thinking=True).reasoning == "On and on"
    assert read("nemotron", *"On and on").content == "On and on"


def test_a_marker_within_the_answer_opens_no_reasoning() -> None:
    found = read("qwen3", *"The tag <think> opens reasoning.")
    assert (found.reasoning, found.content) == ("", "The tag <think> opens reasoning.")


@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("gemma4", '<|tool_call>call:get_time{zone:<|"|>'),
        ("llama4_pythonic", "<|python_start|>[get_time(zone='"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=unknown>\n{"),
    ],
)
def test_a_call_over_the_bound_is_the_same_at_any_split_and_no_text_is_lost(form: str, start: str) -> None:
    text = start + "b" * MAX_HELD + "c'\"]"
    whole = read(form, text)
    pieces = [text[i : i + 4096] for i in range(0, len(text), 4096)]
    assert read(form, *pieces) == whole
    assert whole.content == text or whole.calls[0][1].endswith("bbbc'\\\"]")
