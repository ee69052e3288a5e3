"""Arguments between tags: their text is read by the schema that the grammar follows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.recorded_answers import read

from shared.answer_formats.arguments import Argument

FAMILIES = ["qwen3_coder", "glm45"]
DEFS = {
    "Zip": {"type": "string"},
    "Same": {"$ref": "#/$defs/Zip"},
    "Size": {"anyOf": [{"type": "integer"}, {"const": "auto"}]},
    "Loop": {"$ref": "#/$defs/Loop"},
}


def written(family: str, name: str, text: str) -> str:
    """A call of `f` as the family writes it, with one argument."""
    if family == "glm45":
        return f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    return f"<tool_call>\n<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n</tool_call>"


def argument(family: str, schema: Any, text: str, root: dict[str, Any] | None = None) -> Any:
    """The value that a call has for an argument of this schema."""
    root = {"type": "object", "properties": {"a": schema}, "$defs": DEFS} if root is None else root
    found = read(family, *written(family, "a", text), tools={"f": root})
    assert found == read(family, written(family, "a", text), tools={"f": root})
    ((name, arguments),) = found.calls
    assert name == "f"
    return json.loads(arguments)["a"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "None"),
        ({"oneOf": [{"$ref": "#/$defs/Same"}, {"type": "null"}]}, "true", "true"),
        ({"type": ["string", "null"]}, "1.5", "1.5"),
        ({"type": "string", "nullable": True}, "5", "5"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"$ref": "#/$defs/Same"}, "12345", "12345"),
        ({"allOf": [{"$ref": "#/$defs/Zip"}], "description": "d"}, "[1]", "[1]"),
        ({"const": "7"}, "7", "7"),
        ({"const": 7}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", "2"]}, " 1 ", "1"),
        ({"enum": ["a", "b"]}, '"a"', "a"),
        ({"enum": ["1", 2, None]}, "1", "1"),
        ({"enum": ["1", 2, None]}, "2", 2),
        ({"enum": ["true", 1]}, "true", "true"),
        ({"enum": ["", 1]}, "true", "true"),
        ({"$ref": "#/$defs/Size"}, "12", 12),
        ({"$ref": "#/$defs/Size"}, "auto", "auto"),
        ({"$ref": "#/$defs/Size"}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "12345", 12345),
        ({"type": ["string", "number"]}, "1e999", "1e999"),
        ({"type": ["string", "number"]}, "1_000", "1_000"),
        ({"type": ["string", "array"]}, '["a"]', ["a"]),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "str"}, "5", "5"),
        ({}, "5", 5),
        ({"description": "d"}, "True", True),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"$ref": "#/$defs/Nowhere"}, "5", 5),
        ({"type": 5, "enum": {}, "anyOf": "x", "$ref": 3}, "5", 5),
        (True, "5", 5),
        (None, "5", 5),
    ],
    ids=str,
)
def test_an_argument_is_read_by_its_schema(family: str, schema: Any, text: str, value: Any) -> None:
    found = argument(family, schema, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "root",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "string"}}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"a": {"const": "1"}}}, {"properties": {"a": {"type": "string"}}}]},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ],
    ids=str,
)
def test_schema_of_an_argument_is_found_through_references_and_combinations(
    family: str, root: dict[str, Any]
) -> None:
    assert argument(family, None, "12345", root) == "12345"


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_as_json_between_the_tags_of_a_call_are_kept(family: str) -> None:
    head = "<tool_call>f\n" if family == "glm45" else "<tool_call>\n<function=f>\n"
    found = read(family, *(head + '{"a": "1"}\n</tool_call>'), tools={"f": {}})
    assert found.calls == [("f", '{"a": "1"}')]


def test_a_schema_with_many_ways_is_read_in_bounded_time() -> None:
    wide = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(31)}
    root = {"properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**wide, "D31": {"type": "string"}}}
    assert Argument(root, "a").read("5") == "5"  # a number: the way to the type is too long


VALUES = {
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["5", "true", "null", "None", "[1]", '"', "1e3", " 5", "{}", "a\n"]),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.text(max_size=3), max_size=2),
    "object": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
}


@st.composite
def schemas(draw: st.DrawFn, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """A schema, and a value that is valid under it."""
    kind = draw(
        st.sampled_from(["type", "types", "const", "enum"] + ["anyOf", "allOf", "oneOf"] * (depth < 3))
    )
    if kind in ("type", "types"):
        types = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3, unique=True))
        value = draw(VALUES[types[0]])
        return ({"type": types[0]} if kind == "type" else {"type": sorted(types)}), value
    if kind in ("const", "enum"):
        values = draw(st.lists(st.one_of(*VALUES.values()), min_size=1, max_size=4))
        return ({"const": values[0]} if kind == "const" else {"enum": values}), values[0]
    inner, value = draw(schemas(depth + 1))
    if kind == "allOf":
        return {"allOf": [inner]}, value
    others = [draw(schemas(depth + 1))[0] for _ in range(draw(st.integers(0, 2)))]
    at = draw(st.integers(0, len(others)))
    return {"anyOf": [*others[:at], inner, *others[at:]]}, value


@given(schemas(), st.sampled_from(FAMILIES), st.booleans())
def test_a_value_that_is_written_is_read_back(
    drawn: tuple[dict[str, Any], Any], family: str, referred: bool
) -> None:
    schema, value = drawn
    root: dict[str, Any] = {"type": "object", "properties": {"a": schema}}
    if referred:
        root = {"properties": {"a": {"$ref": "#/$defs/A~1b"}}, "$defs": {"A/b": schema}}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assume("</" not in text)  # the families cannot write their end tag
    valid = jsonschema_rs.validator_for(schema).is_valid
    assert valid(value)
    if isinstance(value, str):  # with another meaning under the same schema, the text means that
        try:
            other = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            assume(isinstance(other, str) or not valid(other))
    found = argument(family, None, text, root)
    assert found == value
    assert isinstance(found, bool) is isinstance(value, bool)
