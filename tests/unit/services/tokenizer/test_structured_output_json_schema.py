"""The grammar of a schema against the schema itself: all that is valid is accepted, nothing that is not."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import byte_grammar
from support.schema_oracle import PAIRS, spelled, with_definitions

from services.tokenizer.structured_output import followed
from shared.answer_formats import grammar

EXAMPLES = 150


def source_of(schema: Any) -> str:
    return grammar.whole(None, grammar.json_rules("text", followed(schema, "p")), thinking=False)


def accepts(schema: Any, text: str) -> bool:
    return byte_grammar.accepts(source_of(schema), text)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_grammar_accepts_every_valid_instance(data: st.DataObject) -> None:
    schema, instances = data.draw(PAIRS)
    schema = with_definitions(schema)
    value = data.draw(instances)
    judge = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert judge.is_valid(value)
    text = data.draw(spelled(value))
    assert json.loads(text) == value
    assert accepts(schema, text), text


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_grammar_refuses_every_instance_that_is_not_valid(data: st.DataObject) -> None:
    """The instance of one schema, tried on another."""
    (schema, _), (_, instances) = data.draw(PAIRS), data.draw(PAIRS)
    schema = with_definitions(schema)
    value = data.draw(instances)
    if not jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value):
        assert not accepts(schema, data.draw(spelled(value)))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "minLength": 1}, [r'"He said \"hi\"\n"', r'"\\"', '"é"'], ['""']),
        (
            {"type": "string", "maxLength": 3},
            [r'"\n\n\n"', '"😀😀😀"', r'"\u0000ab"'],
            ['"abcd"', r'"\n\n\n\n"'],
        ),
        ({"type": "string", "pattern": r"\S"}, ['" not blank "', r'"\n.\n"'], ['""', '"  "']),
        ({"type": "string", "pattern": "^[^a]$"}, [r'"\""', r'"\\"', r'"\n"', '"b"'], ['"a"', '"bb"']),
        (
            {"type": "number", "minimum": 1e-7, "maximum": 2e-7},
            ["0.00000015", "0.0000002"],
            ["0", "", "1", "0.0000003"],
        ),
        (
            {"type": "number", "minimum": -3.141, "exclusiveMaximum": 2.557},
            ["2.5", "2.55", "2.556", "-3.1", "-3.14", "-3.141", "0.0"],
            ["2.557", "2.6", "-3.15", "-3.142"],
        ),
        ({"type": "number", "minimum": 8.53, "maximum": 9.367}, ["9.3", "9.36"], ["8.5", "8.52", "9.37"]),
        (
            {"type": "number", "minimum": 0.97, "maximum": 1.000000001},
            ["1", "1.0"],
            ["1.1", "1.5", "0.9", "0.6"],
        ),
        ({"type": "number", "minimum": -0.05, "maximum": 0.05}, ["0", "0.0", "0.05"], ["0.1", "0.4", "0.5"]),
        ({"type": ["number", "null"], "maximum": 2.55, "multipleOf": 0.25}, ["2.5", "null"], ["2.55", "2.4"]),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1},
            ["0.1", "0.05", "0.0001"],
            ["0", "0.0", "0.2"],
        ),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.01"], ["-0", "-0.0", "0"]),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5, "multipleOf": 0.25}, ["2.25"], ["2", "2.0", "2.5"]),
        ({"type": "number", "exclusiveMinimum": 999999, "maximum": 999999.5}, ["999999.25"], ["999999"]),
        ({"type": "number", "minimum": 2.5, "exclusiveMaximum": 3}, ["2.5", "2.9", "2.99"], ["3", "3.0"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "1", "1.0"]),
        ({"type": "integer", "allOf": [{"maximum": 2.55}, {"minimum": 0.5}]}, ["1", "2"], ["2.5", "0", "3"]),
        ({"nullable": True, "type": "number", "minimum": 0, "maximum": 0.25}, ["0.2", "null"], ["0.26"]),
        ({"enum": [0.2, 0.3], "maximum": 0.25}, ["0.2"], ["0.3"]),
        (
            {"type": "integer", "minimum": 1.5, "maximum": 2**64 - 1},
            ["2", "9223372036854774784"],
            ["1", "18446744073709551616"],
        ),
        ({"type": "integer", "minimum": -(10**400), "maximum": 10**400}, ["-2", "2"], ["1.5"]),
        ({"enum": [0.1, 1234567890123]}, ["0.1", "1234567890123"], ["0.10000000000000001", "0.2"]),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"'],
        ),
        ({"pattern": r"^\s[^\s]$"}, ['"\ufeffa"', '" \x85"'], ['"\x85a"', '"a\ufeff"', '"  "']),
        ({"pattern": r"^\S$"}, ['"a"', '"\x85"'], ['"\ufeff"', '" "']),
        (
            {"patternProperties": {r"^\S$": {"type": "null"}}},
            ['{"a": null}', '{"\x85": null}'],
            ['{"\ufeff": null}'],
        ),
        (
            {"format": "hostname"},
            ['"a.b-c"', '"a-b--c"', f'"{"a" * 63}.b"', '"a-1--b"'],
            ['"xn--X"', '"aa--b"', '"-a"', '"a-"', f'"{"a" * 64}"', f'"{".".join(["ab" * 30] * 5)}"'],
        ),
        ({"type": "integer"}, ["-0", "12345678901234567890"], ["01", "1.5", "+1"]),
        ({"type": "number"}, ["1e5", "-1.5E-7", "0.10"], [".5", "1.", "NaN"]),
        (
            {"const": {"a": [1, "b"]}},
            ['{"a": [1, "b"]}', '{\n  "a": [\n    1,\n    "b"\n  ]\n}'],
            ['{"a": [1]}'],
        ),
        (
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            ['{"a": 1, "b": "x"}', '{"b": "x"}'],
            ['{"a": "x"}', '{"b": 1}', '{"a": 1, "a": "x"}'],
        ),
        ({"type": "object", "minProperties": 1}, ['{"x": 1}'], ["{}"]),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
            ['{"x1": 1}'],
            ['{"x1": "a"}', '{"y": 1}'],
        ),
    ],
)
def test_values_that_were_lost_or_let_through(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(schema, text)] == []
    assert [text for text in wrong if accepts(schema, text)] == []
