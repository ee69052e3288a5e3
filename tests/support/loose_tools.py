"""Schemas of tools as real clients have them: such that no grammar follows, and such that one does."""

from __future__ import annotations

from typing import Any

# What tools of real clients have, and no grammar follows; each is a schema of one property.
LOOSE: dict[str, Any] = {
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^x"}},
    "oneOf that overlap": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "required null": {"type": "object", "required": None},
    "properties null": {"type": "object", "properties": None},
    "items null": {"type": "array", "items": None},
    "enum null": {"type": "string", "enum": None},
    "enum empty": {"type": "string", "enum": []},
    "enum of another type": {"type": "string", "enum": [1]},
    "enum of large numbers": {"enum": [2**60 + 1]},
    "type any": {"type": "any"},
    "type of Python": {"type": "dict"},
    "type null": {"type": None},
    "type missing in a list": {"type": ["string", "file"]},
    "format int32": {"type": "string", "format": "int32"},
    "format uri-reference": {"type": "string", "format": "uri-reference"},
    "pattern with a lookahead": {"type": "string", "pattern": "^(?!-)[a-z]+$"},
    "pattern of Python": {"type": "string", "pattern": r"\Aa\Z"},
    "not": {"not": {"type": "null"}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "contains": {"type": "array", "contains": {"type": "null"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "reference elsewhere": {"$ref": "https://example.com/schema.json"},
    "reference to nothing": {"$ref": "#/$defs/none"},
    "reference to itself": {"$ref": "#/properties/p"},
    "a schema that is a text": "string",
    "minimum as a text": {"type": "integer", "minimum": "0"},
    "minimum over maximum": {"type": "integer", "minimum": 3, "maximum": 2},
    "minimum beyond 64 bits": {"type": "number", "minimum": 1e300},
    "a misspelt keyword": {"type": "string", "maxlength": 3},
    "optional": {"type": "string", "required": True},
    "a definition": {"$defs": {"x": {"not": {}}}, "type": "string"},
    "multipleOf 0": {"type": "integer", "multipleOf": 0},
    "additionalItems beside items": {"type": "array", "items": {"type": "string"}, "minContains": 1},
}
FOLLOWED: dict[str, Any] = {
    "multipleOf": {"type": "integer", "multipleOf": 5},
    "nullable": {"type": "string", "nullable": True},
    "maxLength 65536": {"type": "string", "maxLength": 65_536},
    "allOf of two": {"allOf": [{"type": "object", "properties": {"a": {}}}, {"required": ["a"]}]},
    "x-order": {"type": "string", "x-order": 1},
    "an unused odd definition": {"type": "string", "$comment": {"not": 3}},
    "draft 4": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
    "uint64": {"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1},
    "no type": {"properties": {"a": {"minLength": 1}}},
}


def tool_with(schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"p": schema, "q": {"type": "integer"}}, "required": ["q"]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}
