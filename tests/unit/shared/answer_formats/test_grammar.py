"""The grammar of a family accepts what the family writes, and nothing else; llguidance compiles it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import byte_grammar
from support.recorded_answers import ANSWERS, FIRST, SECOND, TEXT, TOOLS, Answer, read

from shared.answer_formats import grammar
from shared.answer_formats.formats import FORMATS, Xml

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


def accepts(source: str | None, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    assert source is not None
    return byte_grammar.accepts(source, text)


def source_of(answer: Answer, *, required: bool, parallel: bool = True) -> str | None:
    form = FORMATS[answer.form]
    rules = grammar.calls(form, SCHEMAS, required=required, parallel=parallel)
    return None if rules is None else grammar.whole(form, rules, thinking=answer.opened)


@pytest.mark.parametrize("answer", WRITTEN, ids=NAMES)
def test_grammar_accepts_text_with_calls(answer: Answer) -> None:
    rule = source_of(answer, required=False)
    if answer.form == "xlam":  # a list in a text is no call
        assert rule is None
        return
    assert rule is not None
    assert accepts(rule, answer.text)
    assert not accepts(rule, answer.text.replace("get_time", "get_tide"))
    plain = f"hm{FORMATS[answer.form].think[1]}" if answer.opened and FORMATS[answer.form].think else ""
    assert accepts(rule, f"{plain}{TEXT}")


@pytest.mark.parametrize("answer", WRITTEN, ids=NAMES)
def test_grammar_accepts_one_call_at_most(answer: Answer) -> None:
    rule = source_of(answer, required=False, parallel=False)
    assert rule is None or not accepts(rule, answer.text)


NAMED = {
    **CLOSED,
    "properties": {"name": {"type": "string"}, "parameters": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "parameters"],
}


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.writes and not each.bare])
@pytest.mark.parametrize("thinking", [False, True])
def test_calls_or_text_under_a_schema(name: str, thinking: bool) -> None:
    form = FORMATS[name]
    assert form.writes is not None
    thinking &= form.think is not None
    text = grammar.json_rules("text", NAMED)
    rules = grammar.calls(form, SCHEMAS, required=False, parallel=True, text=text)
    assert rules is not None
    rule = grammar.whole(form, rules, thinking=thinking)
    thought = f"hm{form.think[1]}\n\n" if thinking and form.think else ""
    called = form.writes.before.replace("NAME", "get_time") + arguments_in(name, SECOND) + form.writes.after
    called = form.writes.first + called + form.writes.last
    bare_call = '{"name": "Ada", "parameters": [1, 2]}'
    assert accepts(rule, thought + called)
    assert accepts(rule, thought + bare_call)
    for wrong in (TEXT, f"{bare_call} {called}", f"{called}{bare_call}", '{"name": "Ada"}', ""):
        assert not accepts(rule, thought + wrong)
    for pieces in ([thought + bare_call], thought + bare_call):
        found = read(name, *pieces, thinking=thinking)
        assert (found.content, found.calls) == (bare_call, [])
    (call,) = read(name, *thought, called, thinking=thinking).calls
    assert (call[0], json.loads(call[1])) == ("get_time", SECOND)


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.writes])
def test_rule_of_required_calls_accepts_only_calls(name: str) -> None:
    form = FORMATS[name]
    assert form.writes is not None
    rules = grammar.calls(form, SCHEMAS, required=True, parallel=True)
    assert rules is not None
    rule = grammar.whole(None, rules, thinking=False)
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
def test_grammar_accepts_json_after_the_reasoning(thinking: bool) -> None:
    schema = {**CLOSED, "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    rules = grammar.json_rules("text", schema)
    rule = grammar.whole(FORMATS["qwen3"], rules, thinking=thinking)
    start = "" if thinking else "<think>\n"
    assert accepts(rule, f'{start}First {{ then }}.\n</think>\n\n{{"n": 3}}')
    assert accepts(rule, '{"n": 3}') is not thinking
    assert not accepts(rule, f"{start}First.\n</think>\n\nThree.")
    assert grammar.whole(FORMATS["hermes"], rules, thinking=False) == grammar.whole(
        None, rules, thinking=False
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_calls_stand_after_the_reasoning_which_may_quote_them(thinking: bool) -> None:
    form = FORMATS["qwen3"]
    rules = grammar.calls(form, SCHEMAS, required=False, parallel=True)
    assert rules is not None
    rule = grammar.whole(form, rules, thinking=thinking)
    start = "" if thinking else "<think>\n"
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert accepts(rule, f"{start}A <tool_call> has a name.\n</think>\n\n{call}")
    assert accepts(rule, f"{start}Short.\n</think>\n\nNo <think> is needed.")
    assert not accepts(rule, f"{start}Short.\n</think>\n\n<tool_call> is a tag.")
    assert accepts(rule, call) is not thinking


def test_a_schema_binds_the_text_beside_calls() -> None:
    form = FORMATS["hermes"]
    text = grammar.json_rules("text", {**CLOSED, "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    rules = grammar.calls(form, SCHEMAS, required=False, parallel=True, text=text)
    assert rules is not None
    rule = grammar.whole(form, rules, thinking=False)
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert accepts(rule, '{"n": 3}')
    assert accepts(rule, f"{call}\n{call}")
    assert not accepts(rule, "Three.")
    assert not accepts(rule, f'{{"n": 3}}{call}')
