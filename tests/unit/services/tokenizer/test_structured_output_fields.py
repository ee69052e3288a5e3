"""What a request may ask for as structured output, and what is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.structured_schemas import SCHEMAS
from services.tokenizer.request import read_request
from services.tokenizer.structured_output import (
    MAX_DEPTH,
    MAX_GRAMMAR_CHARS,
    MAX_ITEMS,
    MAX_LENGTH,
    grammar_of,
)
from shared.errors import BadRequest


def schema(value: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": value},
        }
    }


def source(fields: dict[str, Any]) -> Any:
    packed = json.loads(grammar_of(fields))
    return packed["kind"], json.loads(packed["source"]) if packed["kind"] == "json" else packed["source"]


def test_nothing_asked_for() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"grammar": ""}):
        assert grammar_of(fields) == ""
    assert read_request({"prompt": "p"}).grammar == ""


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (
            {"response_format": {"type": "json_object"}},
            "json",
            {"type": "object", "additionalProperties": True},
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "json",
            {"type": "object", "additionalProperties": True},
        ),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json", {"type": "null"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", 'say "b"\n']}}, "ebnf", 'root ::= "a" | "say \\"b\\"\\n"'),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "ebnf", 'root ::= "x"'),
        ({"grammar": 'a ::= "x"\nroot ::= a'}, "ebnf", 'a ::= "x"\nroot ::= a'),
    ],
)
def test_the_one_form(fields: dict[str, Any], kind: str, text: Any) -> None:
    assert source(fields) == (kind, text)
    assert read_request({"prompt": "p", **fields}).grammar == grammar_of(fields)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_that_can_be_followed(name: str) -> None:
    kind, text = source(schema(SCHEMAS[name]))
    assert kind == "json"
    assert "description" not in json.dumps(text)


def test_an_object_with_named_properties_gets_no_others() -> None:
    open_one = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}
    assert source(schema(open_one))[1]["additionalProperties"] is False
    anything = {"type": "object", "additionalProperties": {"type": "null", "title": "t"}}
    assert source(schema(anything))[1] == {"type": "object", "additionalProperties": {"type": "null"}}
    assert source(schema({}))[1] == {}


DEEP: dict[str, Any] = {"type": "null"}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("text", "is a text, and no JSON"),
        ([], "the schema is not a schema"),
        (False, "the schema is not a schema"),
        ({"type": "object", "uniqueItems": True}, "/uniqueItems cannot be followed"),
        ({"properties": {}}, "/properties cannot be followed without a `type`"),
        ({"not": {}}, "/not cannot be followed"),
        ({"type": "integer", "multipleOf": 3}, "/multipleOf cannot be followed"),
        ({"type": "string", "minimum": 3}, "/minimum cannot be followed"),
        ({"type": "text"}, "/type is not one of object"),
        ({"oneOf": []}, "/oneOf cannot be followed"),
        ({"anyOf": [{"type": "null"}], "properties": {}}, "/properties cannot be followed beside `anyOf`"),
        ({"anyOf": []}, "/anyOf is not a list of 1 to 256 schemas"),
        ({"allOf": [{}, {}]}, "/allOf is not a list of 1 to 1 schemas"),
        ({"type": "string", "enum": ["a", 1]}, "/enum has a value of another type"),
        ({"enum": []}, "/enum is not a list of values"),
        ({"$ref": "other.json"}, "/\\$ref is not a reference into this schema"),
        ({"$ref": "#/$defs/x"}, "/\\$ref leads nowhere at '\\$defs'"),
        ({"$ref": "#"}, "/\\$ref refers to itself"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "/required names 'b', which is not"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": 3}}},
            "/properties/a/items is not",
        ),
        ({"type": "array", "prefixItems": []}, "/prefixItems is not a list of 1 to 256 schemas"),
        (
            {"type": "string", "maxLength": MAX_LENGTH + 1},
            f"/maxLength is not a number from 0 to {MAX_LENGTH}",
        ),
        ({"type": "array", "maxItems": MAX_ITEMS + 1}, f"/maxItems is not a number from 0 to {MAX_ITEMS}"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "/minItems is over `maxItems`"),
        ({"type": "integer", "minimum": "0"}, "/minimum is not a number"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "/pattern cannot be followed beside `pattern`"),
        ({"type": "string", "format": "email"}, "/format is not one of date"),
        (DEEP, f"is nested deeper than {MAX_DEPTH}"),
    ],
)
def test_schemas_that_cannot_are_refused_by_the_keyword(value: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        grammar_of(schema(value))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
        ({"grammar": "x ::= y"}, "grammar"),
        ({"grammar": 3}, "grammar"),
        ({"grammar": 'root ::= "x"', "structured_outputs": {"regex": "a"}}, "grammar"),
        ({"grammar": f'root ::= "{"x" * MAX_GRAMMAR_CHARS}"'}, "grammar"),
        ({"grammar": 'root ::= "x"', "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_no_structured_output(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(fields)
    assert caught.value.param == param
