"""Reads an argument that stands between tags by the schema of its function. Pure.

The text between two tags does not show its type: `12345` is a number or a text. The schema decides, as in the
grammar, with its references and combinations (`$ref`, `anyOf`, `oneOf`, `allOf`, lists of types):

    strings alone              the text, as it stands
    strings and other types    a JSON value of another type that the schema allows, else the text
    no strings, or no rule     a JSON value, a Python literal or the text, the first that fits

The schema is as the client sent it, valid or not: a part that cannot be followed allows everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shared.answer_formats.notations import dumps, unquoted, value_of

MOST_STEPS = 1_024  # schemas that are visited for one argument; the rest allows everything
MAX_DEPTH = 32
_ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_TYPES = {name: frozenset({name}) for name in _ALL} | {
    "number": frozenset({"number", "integer"}),
    **dict.fromkeys(("str", "text"), frozenset({"string"})),  # as some clients write it
}
_TEXT = _TYPES["string"]
_NO_CHOICE = "\0"  # a text that no list of choices has


class Argument:
    """One argument of a function, by the schema of all of them."""

    def __init__(self, function: object, name: str) -> None:
        self._root, self._steps = function, 0
        self._schema = self._property(function, name, 0)
        self.kinds = self._kinds_of(self._schema, 0)
        # A text that may be shown before its end is known.
        self.streams = self.kinds == _TEXT and self._may_be(_NO_CHOICE)

    def read(self, text: str) -> str:
        """The argument as JSON."""
        if "string" not in self.kinds or self.kinds == _ALL:
            return value_of(text)
        if self.kinds != _TEXT:
            try:
                value = json.loads(text)
                if not isinstance(value, str) and self._may_be(value):
                    return dumps(value, allow_nan=False)
            except (ValueError, RecursionError):
                pass
        readings = (text, text.strip(), unquoted(text))  # a grammar allows white space around a choice
        return dumps(next((each for each in readings if isinstance(each, str) and self._may_be(each)), text))

    def choices(self) -> list[str]:
        """The texts of a closed list of choices; empty if other texts are allowed, too."""
        if self._may_be(_NO_CHOICE):
            return []
        self._steps = 0
        found = dict.fromkeys(each for each in self._listed(self._schema, 0) if isinstance(each, str))
        return [text for text in found if self._may_be(text)]

    def _listed(self, schema: object, depth: int) -> Iterable[object]:
        if not isinstance(schema, Mapping) or self._is_too_far(depth):
            return
        for values in _choices(schema):
            yield from values
        for way in ("allOf", "anyOf", "oneOf"):
            for part in self._parts(schema, way):
                yield from self._listed(part, depth + 1)
        if "$ref" in schema:
            yield from self._listed(self._target(schema["$ref"]), depth + 1)

    def _may_be(self, value: object) -> bool:
        self._steps = 0
        return self._is_valid(self._schema, value, 0)

    def _property(self, schema: object, name: str, depth: int) -> object:
        """The schema of the argument, made of all parts that name it; True: anything."""
        if not isinstance(schema, Mapping) or self._is_too_far(depth):
            return True
        found = [self._property(part, name, depth + 1) for part in self._parts(schema, "allOf")]
        if "$ref" in schema:
            found.append(self._property(self._target(schema["$ref"]), name, depth + 1))
        for way in ("anyOf", "oneOf"):
            ways = [self._property(part, name, depth + 1) for part in self._parts(schema, way)]
            found += [{"anyOf": ways}] if ways else []
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif isinstance(others, Mapping):
            found.append(others)
        return {"allOf": found}

    def _kinds_of(self, schema: object, depth: int) -> frozenset[str]:
        """The types that a value may have."""
        if not isinstance(schema, Mapping) or self._is_too_far(depth):
            return _ALL
        kinds = _ALL & _typed(schema.get("type"))
        for values in _choices(schema):
            kinds &= frozenset(map(_kind_of, values))
        if "$ref" in schema:
            kinds &= self._kinds_of(self._target(schema["$ref"]), depth + 1)
        for part in self._parts(schema, "allOf"):
            kinds &= self._kinds_of(part, depth + 1)
        for way in ("anyOf", "oneOf"):
            if parts := self._parts(schema, way):
                kinds &= frozenset().union(*(self._kinds_of(part, depth + 1) for part in parts))
        return kinds | _TYPES["null"] if schema.get("nullable") is True else kinds

    def _is_valid(self, schema: object, value: object, depth: int) -> bool:
        """Whether a value has a type, and is a choice, that the schema allows."""
        if not isinstance(schema, Mapping) or self._is_too_far(depth):
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True
        kind = _kind_of(value)
        if kind not in _typed(schema.get("type")):
            return False
        for values in _choices(schema):
            if not any(kind == _kind_of(each) and value == each for each in values):
                return False
        if "$ref" in schema and not self._is_valid(self._target(schema["$ref"]), value, depth + 1):
            return False
        if not all(self._is_valid(part, value, depth + 1) for part in self._parts(schema, "allOf")):
            return False
        ways = [parts for way in ("anyOf", "oneOf") if (parts := self._parts(schema, way))]
        return all(any(self._is_valid(part, value, depth + 1) for part in parts) for parts in ways)

    def _is_too_far(self, depth: int) -> bool:
        self._steps += 1
        return depth > MAX_DEPTH or self._steps > MOST_STEPS

    def _target(self, reference: object) -> object:
        """What a reference into the function's schema leads to; True if it leads nowhere."""
        target = self._root
        if not isinstance(reference, str) or reference.partition("/")[0] != "#":
            return True
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                return True
            target = target[name]
        return target

    @staticmethod
    def _parts(schema: Mapping[str, Any], name: str) -> list[object]:
        parts = schema.get(name)
        return parts if isinstance(parts, list) else []


def _typed(types: object) -> frozenset[str]:
    """The types that the keyword `type` allows."""
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not names:
        return _ALL
    return frozenset().union(*(_TYPES.get(name, _ALL) if isinstance(name, str) else _ALL for name in names))


def _choices(schema: Mapping[str, Any]) -> Iterable[list[object]]:
    """The lists of values, of which the value is one."""
    if isinstance(values := schema.get("enum"), list) and values:
        yield values
    if "const" in schema:
        yield [schema["const"]]


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
    return "array" if isinstance(value, list) else "object"
