"""Twenty JSON schemas that can be followed: nested, enums, arrays, bounded, with an end for every part."""

from __future__ import annotations

from typing import Any


def _one(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


_PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string", "maxLength": 12, "description": "who"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "zip": {"type": ["string", "null"], "maxLength": 5},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
}
_SHARED = {
    "$defs": {
        "point": {
            "type": "object",
            "properties": {a: {"type": "integer", "minimum": 0, "maximum": 9} for a in ("x", "y")},
            "required": ["x", "y"],
        }
    },
    "type": "object",
    "properties": {
        "start": {"$ref": "#/$defs/point"},
        "rest": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 3},
    },
    "required": ["start", "rest"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _PERSON,
    "shared definitions": _SHARED,
    "people": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 2},
    "small integer": _one(type="integer", minimum=-3, maximum=12),
    "open integer": _one(type="integer", exclusiveMinimum=-5, exclusiveMaximum=7),
    "large integer": _one(type="integer", minimum=-(2**60), maximum=2**60),
    "number": _one(type="number", minimum=0, maximum=1),
    "open number": _one(type="number", exclusiveMinimum=0.5, maximum=2.25),
    "text": _one(type="string", minLength=2, maxLength=20),
    "pattern": _one(type="string", pattern="^[a-z]{3}-\\d{2}$"),
    "quotes in a pattern": _one(type="string", pattern="[^a]{3}"),
    "date and time": _one(type="string", format="date-time"),
    "uuid": _one(type="string", format="uuid"),
    "enum": _one(enum=["x", 1, None, True, {"k": [1]}, 'é\n"']),
    "const": _one(const={"z": "ü"}),
    "choice": _one(
        anyOf=[{"type": "integer", "minimum": 0, "maximum": 3}, {"type": "string", "maxLength": 2}]
    ),
    "tuple": _one(
        type="array",
        prefixItems=[{"type": "boolean"}, {"type": "string", "maxLength": 2}],
        items=False,
        minItems=2,
        maxItems=2,
    ),
    "booleans": _one(type="array", items={"type": "boolean"}, minItems=2, maxItems=4),
    "optional": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}},
    "open object": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": {"type": "string"},
    },
}
assert len(SCHEMAS) == 20
