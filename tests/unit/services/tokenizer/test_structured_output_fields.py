"""What a request may ask for as structured output, and what is refused by its name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from support.hostile_values import as_response_format, deep, schemas
from support.json_schemas import SCHEMAS
from support.structured import grammar_of

from services.tokenizer import prepare
from services.tokenizer.structured_output import MAX_DEPTH, MAX_GRAMMAR_CHARS
from shared.answer_formats import grammar
from shared.errors import BadRequest


def schema(value: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": value},
        }
    }


def source(fields: dict[str, Any]) -> str:
    """The rule of the answer's text."""
    text, _ = grammar.unpacked(grammar_of(fields))
    lark = json.loads(text)["grammars"][0]["lark_grammar"]
    return str(lark.partition("\ntext: ")[2])


def followed(value: Any) -> Any:
    """The schema that the engine gets."""
    found = json.loads(source(schema(value)).removeprefix("%json "))
    del found["x-guidance"]
    return found


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
    text, param = "%json", "response_format"
    try:
        text = source({"response_format": as_response_format(value)})
    except BadRequest as error:
        param = error.param
    assert (text[:5], param) == ("%json", "response_format")


SWAP = "".join(f"[^{chr(97 + (i + 1) % 26)}]{{0,900}}{chr(97 + (i + 1) % 26)}" for i in range(26))


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "x" * 30_000}},
        {"structured_outputs": {"regex": SWAP}},
        {"structured_outputs": {"regex": "((a[0-9]{0,50}){0,50}|b){1,50}"}},
        {"structured_outputs": {"regex": r"\Aa(b|c)*\z"}},
        {"grammar": 'root ::= ("a" | [b-c] "]{9999}"){1,4} word{0,9} # {9999}\nword ::= "x"{0,99999}'},
        {"grammar": 'root ::= ([^a]{0,100} "x"){0,100}'},
        schema({"type": "string", "maxLength": 65_536}),
        schema({"type": "array", "maxItems": 65_536}),
        schema({"type": "string", "pattern": r"^(\n|a)\\?\w(|\t)$"}),
        schema({"type": "string", "pattern": r"^\p{Lu}{9999}$"}),
        schema({"type": "string", "pattern": f"^{SWAP}$"}),
    ],
)
def test_a_large_automaton_is_followed_within_a_second(fields: dict[str, Any]) -> None:
    began_s = time.process_time()
    assert grammar_of(fields)
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize("pattern", [r"a\Z", "(?=a)b", r"(a)\1", r"\bfoo", "a^b"])
def test_a_regex_that_the_engine_cannot_follow_is_refused(pattern: str) -> None:
    with pytest.raises(BadRequest, match=r"`structured_outputs`: the grammar engine refuses it: .*regex"):
        grammar_of({"structured_outputs": {"regex": pattern}})


@pytest.mark.parametrize("pattern", ["(?i)" + r"[\x00-\uffff]" * 2000, "[" * 30_000, "(" * 30_000])
def test_a_hostile_pattern_is_refused_at_once(pattern: str) -> None:
    """Compiled, the first one takes 2 s."""
    began_s = time.process_time()
    for fields in (
        {"structured_outputs": {"regex": pattern}},
        schema({"type": "string", "pattern": pattern}),
    ):
        with pytest.raises(BadRequest):
            grammar_of(fields)
    assert time.process_time() - began_s < 1


def test_request_without_structured_output_has_none() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"grammar": ""}):
        assert grammar_of(fields) == ""


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"structured_outputs": {"regex": "a+/"}}, r"/a+\//"),
        ({"structured_outputs": {"choice": ["a", 'see "b"\n']}}, r'"a" | "see \"b\"\n"'),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "@nested"),
        ({"grammar": 'a ::= "x"\nroot ::= a'}, "@nested"),
    ],
)
def test_fields_have_one_form(fields: dict[str, Any], text: str) -> None:
    assert source(fields) == text


def test_a_schema_is_given_as_an_object_or_a_text() -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"json": '{"type": "object"}'}},
        schema({"type": "object"}),
    ):
        assert json.loads(source(fields).removeprefix("%json "))["type"] == "object"


@pytest.mark.parametrize(
    ("rule", "value"),
    [("json", {"type": "null"}), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'root ::= "x"')],
)
def test_the_old_names_of_vllm(rule: str, value: Any) -> None:
    assert source({f"guided_{rule}": value}) == source({"structured_outputs": {rule: value}})


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_followed_without_its_annotations(name: str) -> None:
    assert "description" not in json.dumps(followed(SCHEMAS[name]))


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({}, {}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
        (
            {"properties": {"a": {}}, "additionalProperties": True},
            {"properties": {"a": {}}, "additionalProperties": True},
        ),
        ({"properties": {}, "required": ["b"]}, {"properties": {}, "required": ["b"]}),
        (
            {"properties": {"a": True}, "required": ["b"]},
            {"properties": {"a": True, "b": True}, "required": ["b"], "additionalProperties": False},
        ),
        (  # a schema that another one adds to stays open
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}],
                "$defs": {"a": {"properties": {"a": {}}}},
            },
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}],
                "$defs": {"a": {"properties": {"a": {}}}},
            },
        ),
        (
            {"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]},
            {"anyOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"type": "null"}]},
        ),
        ({"type": "integer", "format": "int64", "x-order": 3, "example": 1}, {"type": "integer"}),
        ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        (
            {"items": [{"type": "null"}], "additionalItems": False},
            {"prefixItems": [{"type": "null"}], "items": False},
        ),
        (
            {"type": "integer", "minimum": 1.5, "maximum": 3.5},
            {"type": "integer", "minimum": 2, "maximum": 3},
        ),
        ({"type": "integer", "exclusiveMinimum": 1, "minimum": 0}, {"type": "integer", "minimum": 2}),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, {"type": "integer", "minimum": 4}),
        (
            {"type": "number", "maximum": 3, "exclusiveMaximum": True},
            {"type": "number", "exclusiveMaximum": 3},
        ),
        ({"type": "number", "maximum": 3, "exclusiveMaximum": False}, {"type": "number", "maximum": 3}),
        ({"type": "integer", "maximum": 2**64 - 1}, {"type": "integer", "maximum": 2**63 - 1024}),
        ({"type": "integer", "minimum": 2**53 + 1}, {"type": "integer", "minimum": 2**53 + 2}),
        ({"type": "string", "minLength": 2.0}, {"type": "string", "minLength": 2}),
        ({"enum": [1.0, -0.0, "a"]}, {"enum": [1, 0, "a"]}),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {}}}, {"$ref": "#/$defs/a%20b", "$defs": {"a b": {}}}),
    ],
)
def test_the_schema_that_the_engine_gets(value: Any, kept: Any) -> None:
    assert followed(value) == kept


DEEP: dict[str, Any] = {"type": "null"}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("text", "is a text that is not JSON"),
        ([], "the schema is not a schema"),
        (False, "the schema is not a schema"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems cannot be followed"),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, "/propertyNames cannot be followed"),
        ({"not": {}}, "/not cannot be followed"),
        ({"if": {}}, "/if cannot be followed"),
        ({"type": "string", "minlength": 3}, "/minlength cannot be followed"),
        ({"type": "text"}, "/type is not one of object"),
        ({"oneOf": []}, "/oneOf is not a list of schemas"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "oneOf constraints are not supported"),
        ({"anyOf": []}, "/anyOf is not a list of schemas"),
        ({"type": "string", "enum": ["a", 1]}, "/enum has a value of a type"),
        ({"enum": []}, "/enum is not a list of values"),
        (
            {"enum": [2**53]},
            r"/enum has the number 9007199254740992: over 2\^53 - 1 JSON numbers lose digits",
        ),
        ({"const": {"a": [-(2.0**60)]}}, "/const has the number"),
        ({"const": "\ud800"}, "/const has half of a surrogate pair"),
        ({"$ref": "other.json"}, "/\\$ref is not a reference into this schema"),
        ({"$ref": "#/$defs/x"}, "/\\$ref leads to no schema"),
        ({"$ref": "#"}, "/\\$ref refers to itself"),
        ({"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#"}]}]}, "refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": 3}}},
            "/properties/a/items is not",
        ),
        ({"type": "object", "properties": None}, "/properties is not an object of schemas"),
        ({"type": "object", "required": None}, "/required is not a list of names"),
        ({"type": "array", "prefixItems": []}, "/prefixItems is not a list of schemas"),
        ({"type": "string", "maxLength": -1}, "/maxLength is not a number from 0"),
        ({"type": "string", "maxLength": 1.5}, "/maxLength is not a number from 0"),
        ({"type": "string", "maxLength": float("inf")}, "/maxLength is not a number from 0"),
        ({"type": "array", "minItems": float("nan")}, "/minItems is not a number from 0"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "/minItems is over `maxItems`"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "/minimum is over `maximum`"),
        ({"type": "integer", "minimum": "0"}, "/minimum is not a number"),
        ({"type": "number", "minimum": 1e20}, r"/minimum is not below 2\^63"),
        ({"type": "number", "maximum": 10**400}, r"/maximum is not below 2\^63"),
        ({"type": "number", "multipleOf": 0}, "/multipleOf is not over 0"),
        ({"type": "string", "pattern": 3}, "/pattern is not a text"),
        ({"type": "string", "pattern": r"^(?=.*\p{Lu}).*$"}, "/pattern cannot be followed: regex"),
        ({"type": "string", "format": "iri"}, "/format is not one of date, time, date-time, duration"),
        ({"type": "string", "format": "int32"}, "/format is not one of date"),
        (
            {"properties": {"a\nb": {}}, "additionalProperties": True},
            "/properties names 'a.nb' in an object with other",
        ),
        (DEEP, f"is nested deeper than {MAX_DEPTH}"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_keyword(value: Any, why: str) -> None:
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
def test_invalid_structured_output_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(fields)
    assert caught.value.param == param


def test_request_with_a_form_is_refused_when_forms_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "FORMS", ())
    with pytest.raises(BadRequest, match="`guided_regex`: answers have no form here: leave it out"):
        prepare.answer_form_of(prepare.read_request({"prompt": "p", "guided_regex": "a+"}))
    assert prepare.answer_form_of(prepare.read_request({"prompt": "p"})) is None
