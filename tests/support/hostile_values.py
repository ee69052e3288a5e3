"""Values that clients send where others are expected: halves of characters, what cannot be hashed, values
that lead back to themselves or go very deep. For the fuzzers of requests and of schemas."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

DEEP = 400  # levels, below what a JSON parser takes and above what a schema may have
HALVES = ("\ud800", "a\udfffb")
KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const"),
    *("anyOf", "allOf", "$ref", "$defs", "definitions", "pattern", "format", "minLength", "maxLength"),
    *("minItems", "maxItems", "minimum", "exclusiveMaximum", "title", "not"),
)
WORDS = ("object", "array", "string", "integer", "null", "date", "#", "#/$defs/a", "#/properties/a", "a", "(")

texts = st.text(max_size=30) | st.sampled_from(HALVES)


def deep(levels: int = DEEP) -> Any:
    """Lists within lists."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def any_json() -> st.SearchStrategy[Any]:
    """Any value that JSON can carry, a half of a character and a deep one among them."""
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts | st.builds(deep),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    )


def schemas() -> st.SearchStrategy[Any]:
    """What has the look of a schema: known keywords, with values that are mostly of another one."""
    names, words = st.sampled_from(["a", "b", *KEYWORDS]), st.sampled_from(WORDS)
    return st.recursive(
        st.booleans() | st.integers(-1, 2000) | words | any_json(),
        lambda inner: (
            st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
            | st.dictionaries(names, inner, max_size=3)
            | st.lists(inner, max_size=3)
        ),
        max_leaves=12,
    )


def as_response_format(schema: Any) -> dict[str, Any]:
    """The field that asks for answers by a schema."""
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def as_tool(parameters: Any) -> dict[str, Any]:
    """A function with these parameters."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}
