"""The grammar of a family accepts what the family writes, and nothing else; XGrammar compiles it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from support.recorded_answers import ANSWERS, FIRST, SECOND, TEXT, TOOLS, Answer, read

from shared.answer_formats import grammar
from shared.answer_formats.formats import FORMATS, Xml

STOP = 255
BYTES = [*(bytes([i]) for i in range(STOP)), b""]  # a token for each byte of UTF-8, and the end
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        BYTES, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(BYTES), stop_token_ids=[STOP]
    )
)
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        **CLOSED,
        "properties": {**TOOLS["get_weather"]["properties"], "options": {"type": "object"}},
        "required": ["city", "options"],
    },
    "get_time": {**CLOSED, "properties": TOOLS["get_time"]["properties"], "required": ["zone"]},
}
WRITTEN = [a for a in ANSWERS if FORMATS[a.form].writes]
NAMES = [f"{i}-{answer.form}" for i, answer in enumerate(WRITTEN)]


def accepts(rule: dict[str, Any], text: str) -> bool:
    """Whether the whole text follows the rule."""
    tag = {"type": "structural_tag", "format": rule}
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(tag))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(STOP)


def rule_of(answer: Answer, *, required: bool, parallel: bool = True) -> dict[str, Any] | None:
    form = FORMATS[answer.form]
    rule = grammar.calls(form, SCHEMAS, required=required, parallel=parallel)
    return None if rule is None else grammar.after_reasoning(form, rule, thinking=answer.opened)


@pytest.mark.parametrize("answer", WRITTEN, ids=NAMES)
def test_text_with_calls(answer: Answer) -> None:
    rule = rule_of(answer, required=False)
    if answer.form == "xlam":  # a list in a text is no call
        assert rule is None
        return
    assert rule is not None
    assert accepts(rule, answer.text)
    assert not accepts(rule, answer.text.replace("get_time", "get_tide"))
    plain = f"hm{FORMATS[answer.form].think[1]}" if answer.opened and FORMATS[answer.form].think else ""
    assert accepts(rule, f"{plain}{TEXT}")


@pytest.mark.parametrize("answer", WRITTEN, ids=NAMES)
def test_one_call_at_most(answer: Answer) -> None:
    rule = rule_of(answer, required=False, parallel=False)
    assert rule is None or not accepts(rule, answer.text)


NAMED = {
    **CLOSED,
    "properties": {"name": {"type": "string"}, "parameters": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "parameters"],
}


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.writes])
@pytest.mark.parametrize("thinking", [False, True])
def test_calls_or_text_under_a_schema(name: str, thinking: bool) -> None:
    form = FORMATS[name]
    assert form.writes is not None
    thinking &= form.think is not None
    calls = grammar.calls(form, SCHEMAS, required=True, parallel=True)
    assert calls is not None
    schema = {"type": "json_schema", "json_schema": NAMED, "max_whitespace_cnt": 1}
    rule = grammar.after_reasoning(form, grammar.either(calls, schema), thinking=thinking)
    thought = f"hm{form.think[1]}\n\n" if thinking and form.think else ""
    called = form.writes.before.replace("NAME", "get_time") + arguments_in(name, SECOND) + form.writes.after
    called = form.writes.first + called + form.writes.last
    said = '{"name": "Ada", "parameters": [1, 2]}'
    assert accepts(rule, thought + called)
    assert accepts(rule, thought + said)
    for wrong in (TEXT, f"{said} {called}", f"{called}{said}", '{"name": "Ada"}', ""):
        assert not accepts(rule, thought + wrong)
    for pieces in ([thought + said], thought + said):
        found = read(name, *pieces, thinking=thinking)
        assert (found.content, found.calls) == (said, [])
    (call,) = read(name, *thought, called, thinking=thinking).calls
    assert (call[0], json.loads(call[1])) == ("get_time", SECOND)


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.writes])
def test_nothing_but_calls(name: str) -> None:
    form = FORMATS[name]
    assert form.writes is not None
    rule = grammar.calls(form, SCHEMAS, required=True, parallel=True)
    assert rule is not None
    assert not accepts(rule, TEXT)
    text = form.writes.first + form.writes.between.join(
        form.writes.before.replace("NAME", function) + arguments_in(name, of) + form.writes.after
        for function, of in (("get_weather", FIRST), ("get_time", SECOND))
    )
    text += form.writes.last
    assert accepts(rule, text)
    assert [function for function, _ in read(name, text).calls] == ["get_weather", "get_time"]


def arguments_in(name: str, arguments: dict[str, Any]) -> str:
    """The arguments as the family writes them."""
    first = FORMATS[name].notations[0]
    if not isinstance(first, Xml):
        return json.dumps(arguments, ensure_ascii=False)
    parts = []
    for key, value in arguments.items():
        string = isinstance(value, str)
        text = value if string else json.dumps(value, ensure_ascii=False)
        opening = {
            "qwen_xml": f"<parameter={key}>\n",
            "glm_xml": f"<arg_key>{key}</arg_key><arg_value>",
        }[first.style]
        ending = "\n" if first.style == "qwen_xml" else ""
        parts.append(f"{opening}{text}{ending}{first.value_ends}")
    return "\n".join(parts)


@pytest.mark.parametrize("thinking", [True, False])
def test_json_after_the_reasoning(thinking: bool) -> None:
    schema = {**CLOSED, "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    rule = grammar.after_reasoning(
        FORMATS["qwen3"], {"type": "json_schema", "json_schema": schema}, thinking=thinking
    )
    start = "" if thinking else "<think>\n"
    assert accepts(rule, f'{start}First {{ then }}.\n</think>\n\n{{"n": 3}}')
    assert accepts(rule, '{"n": 3}') is not thinking
    assert not accepts(rule, f"{start}First.\n</think>\n\nThree.")
    plain = {"type": "json_schema", "json_schema": schema}
    assert grammar.after_reasoning(FORMATS["hermes"], plain, thinking=False) is plain
