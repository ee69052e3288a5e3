"""Which JSON schemas can be followed to the letter: the others are refused, and the keyword is named. Pure.

The grammar engine ignores what it does not know, and an answer would then look right and not be. What it does
know was tried out (tests/unit/test_grammar_walks.py): random walks through the grammar of each keyword here
must validate. A schema is also made tighter where that is allowed: an object with named properties gets no
others, which any schema that allows others accepts; a time ends after nine digits of a second, where the
engine's own form would go on for as long as the model likes, and a date is one that there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.tokenizer.patterns import without_optional_groups
from shared.errors import BadRequest

Schema = dict[str, Any]

MAX_DEPTH = 32
MAX_LENGTH, MAX_ITEMS = 1_024, 256  # of what is written out in a grammar: more would take seconds to compile
FORMATS = ("date", "date-time", "time", "uuid", "ipv4")  # those that end by themselves
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR})"
_SPELLED = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}  # RFC 3339

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
    | {"readOnly", "writeOnly"}
)
_PLACES = frozenset({"$defs", "definitions"})
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_ALONE = ("$ref", "anyOf", "allOf", "const", "enum")  # nothing but annotations and `type` beside these
_PYTHON: dict[str, Callable[[object], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: type(v) is int,
    "number": lambda v: type(v) in (int, float),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}


def followed(schema: Any, param: str) -> Schema | bool:
    """The schema as the grammar engine gets it. Raises BadRequest for what it cannot follow; `param` is
    the field of the request."""
    return _Reader(schema, param).read(schema, "", 0)


class _Reader:
    """One schema, its references resolved against itself."""

    def __init__(self, root: Any, param: str) -> None:
        self._root = root
        self._param = param

    def read(self, schema: Any, path: str, depth: int) -> Schema | bool:
        """The part at `path`."""
        if depth > MAX_DEPTH:
            raise self._refused(path, f"is nested deeper than {MAX_DEPTH}")
        if schema is True:
            return True
        if not isinstance(schema, dict):
            raise self._refused(path, "is not a schema: an object is expected")
        alone = [name for name in _ALONE if name in schema]
        types = self._types(schema, path)
        beside = set().union(*(_BY_TYPE[kind] for kind in types)) if not alone else set[str]()
        known = beside | _ANNOTATIONS | _PLACES | {"type", *alone[:1]}
        for name in schema:
            if name not in known:
                why = f"cannot be followed beside `{alone[0]}`" if alone else "cannot be followed"
                raise self._refused(f"{path}/{name}", why if types or alone else f"{why} without a `type`")
        kept = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        for place in _PLACES & kept.keys():
            kept[place] = self._each(kept[place], f"{path}/{place}", depth)
        if alone:
            kept[alone[0]] = self._alone(alone[0], schema, path, depth)
        return self._inside(kept, path, depth)

    def _alone(self, name: str, schema: Schema, path: str, depth: int) -> Any:
        value, where = schema[name], f"{path}/{name}"
        if name == "$ref":
            self._follow(value, where)
        elif name in ("anyOf", "allOf"):
            return self._list(value, where, depth, most=1 if name == "allOf" else MAX_ITEMS)
        else:
            values = value if name == "enum" else [value]
            if not isinstance(values, list) or not values:
                raise self._refused(where, "is not a list of values")
            types = self._types(schema, path)
            if types and not all(any(_PYTHON[kind](v) for kind in types) for v in values):
                raise self._refused(where, "has a value of another type than `type` says")
        return value

    def _inside(self, kept: Schema, path: str, depth: int) -> Schema:
        if "properties" in kept:
            kept["properties"] = self._each(kept["properties"], f"{path}/properties", depth)
        named = kept.get("properties", {})
        missing = [name for name in self._names(kept, path) if name not in named]
        if missing:
            raise self._refused(f"{path}/required", f"names {missing[0]!r:.40}, which is not in `properties`")
        for name in ("additionalProperties", "items"):
            if name in kept and not isinstance(kept[name], bool):
                kept[name] = self.read(kept[name], f"{path}/{name}", depth + 1)
        if named:
            kept["additionalProperties"] = False
        elif "object" in self._types(kept, path):
            kept.setdefault("additionalProperties", True)
        if "prefixItems" in kept:
            kept["prefixItems"] = self._list(kept["prefixItems"], f"{path}/prefixItems", depth)
        self._check_limits(kept, path)
        if kept.get("format") in _SPELLED:
            kept["pattern"] = _SPELLED[kept.pop("format")]
        if "pattern" in kept:
            kept["pattern"] = without_optional_groups(kept["pattern"])
        return kept

    def _check_limits(self, kept: Schema, path: str) -> None:
        for least, most, limit in (
            ("minLength", "maxLength", MAX_LENGTH),
            ("minItems", "maxItems", MAX_ITEMS),
        ):
            for name in (least, most):
                value = kept.get(name, 0)
                if type(value) is not int or not 0 <= value <= limit:
                    raise self._refused(f"{path}/{name}", f"is not a number from 0 to {limit}")
            if least in kept and most in kept and kept[least] > kept[most]:
                raise self._refused(f"{path}/{least}", f"is over `{most}`")
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if type(kept.get(name, 0)) not in (int, float):
                raise self._refused(f"{path}/{name}", "is not a number")
        lengths = [name for name in ("minLength", "maxLength") if name in kept]
        shaped = [name for name in ("pattern", "format") if name in kept]
        if len(shaped) > 1 or (shaped and lengths):
            raise self._refused(
                f"{path}/{shaped[0]}", f"cannot be followed beside `{[*lengths, *shaped][-1]}`"
            )
        if "pattern" in kept and not isinstance(kept["pattern"], str):
            raise self._refused(f"{path}/pattern", "is not a text")
        if "format" in kept and kept["format"] not in FORMATS:
            raise self._refused(f"{path}/format", f"is not one of {', '.join(FORMATS)}")

    def _list(self, parts: Any, path: str, depth: int, *, most: int = MAX_ITEMS) -> list[Any]:
        if not isinstance(parts, list) or not 0 < len(parts) <= most:
            raise self._refused(path, f"is not a list of 1 to {most} schemas")
        return [self.read(part, f"{path}/{i}", depth + 1) for i, part in enumerate(parts)]

    def _each(self, parts: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(parts, dict):
            raise self._refused(path, "is not an object of schemas")
        return {name: self.read(part, f"{path}/{name}", depth + 1) for name, part in parts.items()}

    def _names(self, kept: Schema, path: str) -> list[str]:
        names = kept.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refused(f"{path}/required", "is not a list of names")
        return names

    def _types(self, schema: Schema, path: str) -> list[str]:
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not all(isinstance(k, str) and k in _BY_TYPE for k in kinds):
            raise self._refused(f"{path}/type", f"is not one of {', '.join(_BY_TYPE)}")
        return kinds

    def _follow(self, reference: Any, path: str, seen: frozenset[Any] = frozenset()) -> None:
        """Check that a reference leads to a schema, and not round in a circle of references."""
        if reference in seen:
            raise self._refused(path, "refers to itself")
        target: Any = self._root
        steps = reference.split("/") if isinstance(reference, str) else [""]
        if steps[0] != "#":
            raise self._refused(path, "is not a reference into this schema, like #/$defs/name")
        for step in steps[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise self._refused(path, f"leads nowhere at {step!r:.40}")
            target = target[name]
        if isinstance(target, dict) and "$ref" in target:
            self._follow(target["$ref"], path, seen | {reference})

    def _refused(self, path: str, why: str) -> BadRequest:
        where = f"the schema's {path:.160}" if path else "the schema"
        return BadRequest(f"`{self._param}`: {where} {why}", param=self._param)
