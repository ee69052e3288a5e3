"""Functions that a model may call: what a request may say, what the model is told, what its text means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.structured import grammar_of, tools_of

from services.tokenizer.structured_output import parsed
from shared.errors import BadRequest

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": CITY},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "clock"}}
CLOSED = {**CITY, "additionalProperties": False}
ANY = {"type": "object", "additionalProperties": True}


def calls_of(rule: Any) -> dict[str, Any]:
    """The schemas in a rule's tags, by the text before the arguments."""
    tags = rule["content"]["tags"] if rule["type"] == "tag" else rule["tags"]
    assert {tag["content"]["style"] for tag in tags} == {"json"}
    return {tag["begin"]: tag["content"]["json_schema"] for tag in tags}


def begin(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": '


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "kind", "schemas"),
    [
        ("required", "tags_with_separator", {begin("weather"): CLOSED, begin("clock"): ANY}),
        (NAMED, "tags_with_separator", {begin("clock"): ANY}),
        ("auto", "triggered_tags", {begin("weather"): CLOSED, begin("clock"): ANY}),
    ],
)
def test_the_grammar_of_calls(choice: Any, kind: str, schemas: Any) -> None:
    packed = json.loads(grammar_of({"tools": [WEATHER, CLOCK], "tool_choice": choice}))
    rule = json.loads(packed["source"])["format"]
    assert (packed["kind"], rule["type"], calls_of(rule)) == ("structural_tag", kind, schemas)
    assert rule["stop_after_first"] is (choice is NAMED)
    if choice == "auto":
        assert rule["triggers"] == ["<tool_call>"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_as_if_they_were_the_only_ones(mode: str) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": allowed(mode, NAMED)}
    alone = {"tools": [CLOCK], "tool_choice": mode}
    assert (tools_of(fields), grammar_of(fields)) == (tools_of(alone), grammar_of(alone))


def test_one_call_at_most() -> None:
    for choice in ("auto", "required"):
        fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
        assert json.loads(json.loads(grammar_of(fields))["source"])["format"]["stop_after_first"] is True


def test_no_tools_no_grammar() -> None:
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "auto"}):
        assert grammar_of(fields) == ""
        assert tools_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", NAMED)}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("none", WEATHER)}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(fields)
    assert caught.value.param == param


def test_earlier_calls_have_objects_for_arguments() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    function = {"name": "weather", "arguments": {"city": "Ulm"}}
    assert parsed(turn)["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    assert parsed(parsed(turn)) == parsed(turn)
    plain = {"role": "user", "content": "x"}
    assert parsed(plain) == plain
    with pytest.raises(BadRequest, match="a tool call is"):
        parsed({**turn, "tool_calls": [{"function": {}}]})
