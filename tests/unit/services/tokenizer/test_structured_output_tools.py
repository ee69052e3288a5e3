"""Functions that a model may call: what a request may contain, what the model gets, what its text means."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from support.loose_tools import FOLLOWED, LOOSE, tool_with
from support.structured import grammar_of, tools_of

from services.tokenizer import structured_output
from services.tokenizer.chat_template import parsed
from services.tokenizer.structured_output import engine_refuses
from shared.answer_formats import grammar
from shared.errors import BadRequest

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": CITY},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "clock"}}
JSON = {"response_format": {"type": "json_object"}}
CLOSED = {**CITY, "additionalProperties": False}
ANY = {"type": "object"}


def rules_of(fields: dict[str, Any]) -> dict[str, str]:
    """The rules of a request's grammar by their names."""
    source, _ = grammar.unpacked(grammar_of(fields))
    lines = json.loads(source)["grammars"][0]["lark_grammar"].splitlines()[1:]
    return {name: body for name, _, body in (line.partition(": ") for line in lines)}


def schemas_of(rules: dict[str, str]) -> list[Any]:
    """The schemas of the arguments, in the order of the functions."""
    found = [
        json.loads(body.removeprefix("%json "))
        for name, body in rules.items()
        if name[0] == "a" and name[1:].isdigit()
    ]
    for each in found:
        del each["x-guidance"]
    return found


def begin(name: str) -> str:
    return json.dumps(f'<tool_call>\n{{"name": "{name}", "arguments": ')


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_grammar_of_calls_has_this_text(choice: Any) -> None:
    rules = rules_of({"tools": [WEATHER, CLOCK], "tool_choice": choice})
    assert schemas_of(rules) == ([ANY] if choice is NAMED else [CLOSED, ANY])
    if choice == "auto":
        assert rules["opened[lazy]"] == 'OPENING "<tool_call>"'
        assert rules["answer"] == "OPENING | opened calls (head calls)* TEXT"
    else:
        assert begin("clock") in rules["calls"]
        assert (begin("weather") in rules["calls"]) is (choice == "required")
        assert rules["calls"].endswith("*") is (choice == "required")
        assert rules["answer"] == "calls"


@pytest.mark.parametrize("name", LOOSE)
def test_a_tool_that_is_not_strict_is_followed_as_far_as_it_can_be(name: str) -> None:
    tools = tools_of({"tools": [tool_with(LOOSE[name])]})
    assert tools is not None
    assert list(tools.loosened) == ["f"]
    kept = tools.schemas["f"]
    assert isinstance(kept, dict)
    assert kept["properties"]["q"] == {"type": "integer"}  # the rest is followed
    assert grammar_of({"tools": [tool_with(LOOSE[name])]})
    for strict in (
        {"tools": [tool_with(LOOSE[name], strict=True)]},
        {"tools": [tool_with(LOOSE[name])], "tool_choice": "required"},
    ):
        with pytest.raises(BadRequest, match="`tools`: "):
            grammar_of(strict)


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_tool_is_followed_to_the_letter(name: str) -> None:
    tools = tools_of({"tools": [tool_with(FOLLOWED[name], strict=True)], "tool_choice": "required"})
    assert tools is not None
    assert tools.loosened == {}


def test_a_tool_that_the_engine_refuses_as_a_whole_is_free() -> None:
    clash = {"allOf": [{"type": "array", "minItems": 3}, {"maxItems": 2}]}
    tools = [tool_with({"required": ["x"], "properties": {"x": clash}}), CLOCK]
    parameters = tools[0]["function"]["parameters"]
    parameters["required"] = ["p"]
    parameters["properties"]["p"]["type"] = "object"
    assert schemas_of(rules_of({"tools": tools})) == [ANY, ANY]
    with pytest.raises(BadRequest, match="`tools`: the grammar engine refuses it: "):
        grammar_of({"tools": [{**tools[0], "function": {**tools[0]["function"], "strict": True}}]})


def test_schemas_that_are_too_long_together_are_free() -> None:
    letters = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(1_000)]
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "parameters": {"properties": {"p": {"enum": letters[i::2]}}}},
        }
        for i in range(2)
    ]
    assert schemas_of(rules_of({"tools": tools})) == [ANY, ANY]
    assert schemas_of(rules_of({"tools": tools[:1]})) != [ANY]
    with pytest.raises(BadRequest, match="characters, over 32768; shorten it"):
        grammar_of({"tools": tools, "tool_choice": "required"})


def test_400_tools_that_are_too_long_together_are_not_tried_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def refuses(source: str) -> str:
        tried.append(source)
        return engine_refuses(source)

    monkeypatch.setattr(structured_output, "engine_refuses", refuses)
    about = {"properties": {f"p{i}": {"const": "x" * 64} for i in range(10)}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": about, "strict": i == 7}}
        for i in range(400)
    ]
    schemas = schemas_of(rules_of({"tools": tools}))
    assert [schema for schema in schemas if schema != ANY] == schemas[7:8]
    assert len(schemas) == 400
    assert len(tried) == 2  # the strict one alone, and all together


@pytest.mark.parametrize("parameters", [[None], "x", 3, True])
def test_parameters_that_are_no_schema_are_free_or_refused(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tools = tools_of({"tools": [tool]})
    assert tools is not None
    assert tools.loosened == {"f": ["/"]}
    with pytest.raises(BadRequest, match="the parameters of 'f': is not a schema"):
        grammar_of({"tools": [tool], "tool_choice": "required"})


def test_a_refused_parameter_is_named_with_its_function() -> None:
    with pytest.raises(BadRequest, match="the parameters of 'f': /properties/p/not cannot be followed"):
        grammar_of({"tools": [tool_with({"not": {}}, strict=True)]})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_as_if_they_were_the_only_ones(mode: str) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": allowed(mode, NAMED)}
    alone = {"tools": [CLOCK], "tool_choice": mode}
    assert (tools_of(fields), grammar_of(fields)) == (tools_of(alone), grammar_of(alone))


def test_grammar_allows_one_call_at_most() -> None:
    fields = {"tools": [WEATHER], "parallel_tool_calls": False}
    assert rules_of({**fields, "tool_choice": "auto"})["answer"] == "OPENING | opened calls"
    assert "*" not in rules_of({**fields, "tool_choice": "required"})["calls"]


TEXTS: list[tuple[dict[str, Any], str]] = [
    (JSON, "%json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}}}, "%json"),
    ({"structured_outputs": {"json": CITY}}, "%json"),
    ({"guided_json": CITY}, "%json"),
    ({"guided_regex": "a|b"}, "/a|b/"),
    ({"guided_choice": ["a"]}, '"a"'),
    ({"grammar": 'root ::= "a"'}, "@nested"),
]


@pytest.mark.parametrize(("fields", "text"), TEXTS, ids=lambda value: str(value)[:30])
def test_calls_are_free_and_the_form_binds_the_text(fields: dict[str, Any], text: str) -> None:
    tools = {"tools": [WEATHER, CLOCK]}
    rules = rules_of({**tools, **fields})
    assert rules["answer"] == "text | calls"
    assert rules["text"].startswith(text)
    assert rules["calls"] == rules_of({**tools, "tool_choice": "required"})["calls"]
    for choice in ("required", NAMED):
        chosen = {**tools, "tool_choice": choice}
        assert grammar_of({**chosen, **fields}) == grammar_of(chosen)
    assert grammar_of({**tools, "tool_choice": "none", **fields}) == grammar_of(fields)


def test_request_without_tools_has_no_grammar() -> None:
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "auto"}):
        assert grammar_of(fields) == ""
        assert tools_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [CLOCK] * 513}, "tools"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", NAMED)}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("none", WEATHER)}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], **JSON, "grammar": "root ::= nothing"}, "grammar"),
        ({"tools": [WEATHER], **JSON, "min_tokens": 2}, "min_tokens"),
        ({"tools": [WEATHER], "guided_regex": "("}, "guided_regex"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "("}, "guided_regex"),
    ],
)
def test_invalid_tools_are_refused(fields: dict[str, Any], param: str) -> None:
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
