"""What a request may ask for as structured output, and what is refused by its name."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from support.hostile_values import as_response_format, deep, schemas
from support.json_schemas import SCHEMAS
from support.structured import grammar_of

from services.tokenizer.structured_output import (
    MAX_DEPTH,
    MAX_GRAMMAR_CHARS,
    MAX_ITEMS,
    MAX_LENGTH,
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


def circle(length: int) -> dict[str, Any]:
    defs = {str(i): {"$ref": f"#/$defs/{(i + 1) % length}"} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": defs}


@given(schemas())
@example({"$ref": []})
@example({"$ref": {}})
@example({"anyOf": [{"$ref": "#/anyOf"}]})
@example({"$ref": "#", "$defs": {"$ref": ["#"]}})
@example({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": [[]]}}})
@example({"type": [[]]})
@example({"type": "string", "format": {}})
@example({"type": "object", "properties": {"a": True}, "required": [[]]})
@example({"enum": [deep()]})
@example({"const": deep(), "type": "array"})
@example(deep())
@example(circle(100))
@example(circle(5000))
def test_any_schema_is_followed_or_refused_by_its_name(value: Any) -> None:
    """By the root alone, with its own name for the place; nothing else leaves."""
    text, param = json.dumps({"kind": "json"}), "response_format"
    try:
        text = grammar_of({"response_format": as_response_format(value)})
    except BadRequest as error:
        param = error.param
    assert (json.loads(text)["kind"], param) == ("json", "response_format")


SWAP = "".join(f"[^{chr(97 + (i + 1) % 26)}]{{0,900}}{chr(97 + (i + 1) % 26)}" for i in range(26))


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        ({"structured_outputs": {"regex": SWAP}}, 23_400),
        ({"structured_outputs": {"regex": "((a[0-9]{0,50}){0,50}|b){1,50}"}}, 125_000),
        ({"structured_outputs": {"regex": "[a-z]" * 5000}}, 5_000),
        ({"structured_outputs": {"regex": "(?:.{65}){64,}"}}, 4_225),
        ({"structured_outputs": {"regex": r"(\w{0,200}(?=a)){0,40}"}}, 8_000),
        ({"grammar": 'root ::= ([^a]{0,100} "x"){0,100}'}, 10_100),
        ({"grammar": "root ::= part{1,90000} \npart ::= [a-z]"}, 90_000),
        ({"structured_outputs": {"grammar": "root ::= [a-z]{4097}"}}, 4_097),
        (schema({"type": "string", "pattern": f"^{SWAP}$"}), 23_400),
        (schema({"anyOf": [{"type": "string", "maxLength": 1000 + i} for i in range(5)]}), 5_010),
    ],
)
def test_what_would_be_a_large_automaton_is_refused(fields: dict[str, Any], states: int) -> None:
    with pytest.raises(BadRequest, match=f"has {states} states with its repetitions, over 4096") as caught:
        grammar_of(fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "x" * 30_000}},
        {"structured_outputs": {"regex": "(abc){0,4000}[a-z]*.+(?>.)(?!a)(?P<n>b)(?P=n)"}},
        {"structured_outputs": {"regex": r"[^a]{4096}"}},
        {"grammar": 'root ::= ("a" | [b-c] "]{9999}"){1,4} word{0,9} # {9999}\nword ::= "x"{0,99999}'},
        schema({"anyOf": [{"type": "string", "maxLength": 1024}, {"type": "string", "maxLength": 1024}] * 9}),
        schema({"type": "string", "pattern": r"^(\n|a)\cA?\\?[\n-a][\b|][^\x00]\w(|\t)\b$"}),
        schema({"type": "string", "pattern": r"^\p{Lu}{9999}$"}),  # of another dialect than Python's
    ],
)
def test_what_is_small_or_free_is_not(fields: dict[str, Any]) -> None:
    assert grammar_of(fields)


def test_a_regex_whose_end_would_be_a_letter_is_refused() -> None:
    assert grammar_of({"structured_outputs": {"regex": r"[\\A]\\A"}})
    with pytest.raises(BadRequest, match=r"the regex cannot be followed with \\Z"):
        grammar_of({"structured_outputs": {"regex": r"a\Z"}})


@pytest.mark.parametrize("pattern", ["(?i)" + r"[\x00-\uffff]" * 2000, "[" * 30_000, "(" * 30_000])
def test_a_pattern_is_judged_without_a_search(pattern: str) -> None:
    """Compiled by Python the first one takes 45 s; read set by set the second one 50 s."""
    began_s = time.process_time()
    for fields in (
        {"structured_outputs": {"regex": pattern}},
        schema({"type": "string", "pattern": pattern}),
    ):
        with contextlib.suppress(BadRequest):
            grammar_of(fields)
    assert time.process_time() - began_s < 5


def test_nothing_asked_for() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"grammar": ""}):
        assert grammar_of(fields) == ""


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


@pytest.mark.parametrize(
    ("rule", "value"),
    [("json", {"type": "null"}), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'root ::= "x"')],
)
def test_the_old_names_of_vllm(rule: str, value: Any) -> None:
    assert source({f"guided_{rule}": value}) == source({"structured_outputs": {rule: value}})


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
        ("text", "is a text that is not JSON"),
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
        ({"type": "string", "enum": ["a", 1]}, "/enum has a value of a type"),
        ({"enum": []}, "/enum is not a list of values"),
        ({"$ref": "other.json"}, "/\\$ref is not a reference into this schema"),
        ({"$ref": "#/$defs/x"}, "/\\$ref leads nowhere at '\\$defs'"),
        ({"$ref": "#"}, "/\\$ref refers to itself"),
        ({"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#"}]}]}, "refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself"),
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
        ({"type": "string", "pattern": r"^(?=.*\p{Lu}).*$"}, r"/pattern cannot be followed with \(\?="),
        ({"type": "string", "pattern": "^x(?!a)[ab]"}, r"/pattern cannot be followed with \(\?!"),
        ({"type": "string", "pattern": r"\Aa\Z"}, r"/pattern cannot be followed with \\A"),
        *(
            ({"type": "string", "pattern": pattern}, "/pattern allows no text without a quote")
            for pattern in (r"^\cA$", r"^[\b]$", r"^a(\n|\x00){2}$", r"^[\cA-\cZ]+$", '^["]$', r"^a(?:\\)+$")
        ),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "/pattern cannot be followed beside `pattern`"),
        ({"type": "string", "format": "iri"}, "/format is not one of date, time, date-time, duration"),
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
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice"),
        ({"grammar": 'root ::= "x"', "structured_outputs": {"regex": "a"}}, "grammar"),
        ({"grammar": f'root ::= "{"x" * MAX_GRAMMAR_CHARS}"'}, "grammar"),
        ({"grammar": 'root ::= "x"', "ignore_eos": True}, "ignore_eos"),
        ({"grammar": 'root ::= "x"', "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_is_no_structured_output(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(fields)
    assert caught.value.param == param
