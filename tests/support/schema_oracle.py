"""Schemas over every keyword that is followed, valid instances of each, and their spellings in JSON.

The instances come from this file alone, not from the grammar: `instances(schema)` builds a value keyword by
keyword, and jsonschema-rs judges it before the grammar does. `spelled` writes a value with the white space,
escapes and forms of numbers that the grammar's page promises (docs/reference/api.md): a strategy, so a
failing spelling shrinks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

Schema = Any
Value = Any

LETTERS = st.sampled_from('ab1 "\\/\n\té😀\x00\x1f\x7f\u2028<{}[]:,')
TEXTS = st.text(LETTERS, max_size=6)
NAMES = st.sampled_from(["a", "b", "c d", 'q"', "é", "x/y", "\\"])
BLANKS = st.sampled_from(["", " ", "\n", "\r\n\t", "\n  ", "    "])
PATTERNS = {  # with strategies of texts that hold a match; JSON Schema searches
    r"\S": st.builds(lambda a, b, c: a + b + c, TEXTS, st.sampled_from(["a", '"', "é"]), TEXTS),
    "^[a-c]{2,3}$": st.text("abc", min_size=2, max_size=3),
    r"^\d+-[^x]?$": st.builds(
        lambda a, b: f"{a}-{b}", st.integers(0, 999), st.sampled_from(["", "a", '"', "\n"])
    ),
    r'["\\]': st.builds(lambda a, b, c: a + b + c, TEXTS, st.sampled_from(['"', "\\"]), TEXTS),
    "^a|b$": st.one_of(TEXTS.map(lambda t: "a" + t), TEXTS.map(lambda t: t + "b")),
}
FORMATS = {
    "date": st.dates().map(str),
    "date-time": st.sampled_from(["2024-02-29T23:59:59Z", "1999-12-31T00:00:00.123+05:30"]),
    "time": st.sampled_from(["00:00:00Z", "23:59:59.5-08:00"]),
    "uuid": st.uuids().map(str),
    "ipv4": st.ip_addresses(v=4).map(str),
    "ipv6": st.ip_addresses(v=6).map(str).filter(lambda text: "." not in text),
    "email": st.sampled_from(["a@b.c", "x.y+z@sub.example.org", "o'hara@example.com"]),
    "hostname": st.sampled_from(["localhost", "a.b-c.example", "1.example.com"]),
    "uri": st.sampled_from(
        ["https://example.com/a?b=c#d", "mailto:a@b.c", "http://127.0.0.1:8000/", "urn:x:y"]
    ),
    "duration": st.sampled_from(["P1D", "PT5M", "P1Y2M3DT4H5M6S", "P2W"]),
}
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**53) + 1, 2**53 - 1), st.integers(-9, 9), TEXTS)
Pair = tuple[Schema, st.SearchStrategy[Value]]  # a schema and its valid instances


@st.composite
def strings(draw: Callable[..., Any]) -> Pair:
    kind = draw(st.sampled_from(["plain", "length", "pattern", "format"]))
    if kind == "pattern":
        pattern = draw(st.sampled_from(sorted(PATTERNS)))
        return {"type": "string", "pattern": pattern}, PATTERNS[pattern]
    if kind == "format":
        form = draw(st.sampled_from(sorted(FORMATS)))
        return {"type": "string", "format": form}, FORMATS[form]
    if kind == "plain":
        return {"type": "string"}, TEXTS
    least = draw(st.integers(0, 3))
    most = draw(st.one_of(st.none(), st.integers(least, 8)))
    bounds = {"minLength": least} | ({} if most is None else {"maxLength": most})
    return {"type": "string", **bounds}, st.text(
        LETTERS, min_size=least, max_size=8 if most is None else most
    )


@st.composite
def integers(draw: Callable[..., Any]) -> Pair:
    least, most = (
        draw(st.one_of(st.none(), st.integers(-50, 50))),
        draw(st.one_of(st.none(), st.integers(51, 2**40))),
    )
    schema: Schema = {"type": "integer"}
    low, high = -(2**53) + 1 if least is None else least, 2**53 - 1 if most is None else most
    if least is not None:
        exclusive, fraction = draw(st.booleans()), draw(st.sampled_from([0, 0.5]))
        schema["exclusiveMinimum" if exclusive else "minimum"] = least - fraction
        low += exclusive and not fraction
    if most is not None:
        exclusive = draw(st.booleans())
        schema["exclusiveMaximum" if exclusive else "maximum"] = most
        high -= exclusive
    if draw(st.integers(0, 4)) == 0:
        step = draw(st.sampled_from([n for n in (2, 3, 10) if -(-low // n) <= high // n] or [1]))
        return {**schema, "multipleOf": step}, st.integers(-(-low // step), high // step).map(
            lambda n: n * step
        )
    return schema, st.integers(low, high)


@st.composite
def numbers(draw: Callable[..., Any]) -> Pair:
    if draw(st.booleans()):
        return {"type": "number"}, st.one_of(st.floats(-1e15, 1e15), st.integers())
    least, most = sorted(draw(st.tuples(*[st.floats(-1e9, 1e9).map(lambda x: round(x, 6))] * 2)))
    small = draw(st.sampled_from([1.0, 1e-9]))
    least, most = float(f"{least * small:.12g}"), float(f"{(most + 1) * small:.12g}")
    return {"type": "number", "minimum": least, "maximum": most}, st.floats(least, most)


@st.composite
def arrays(draw: Callable[..., Any], parts: st.SearchStrategy[Pair]) -> Pair:
    items, of = draw(parts)
    least, most = draw(st.integers(0, 2)), draw(st.integers(2, 4))
    schema = {"type": "array", "items": items, "minItems": least, "maxItems": most}
    values = st.lists(of, min_size=least, max_size=most)
    if draw(st.booleans()):
        first, its = draw(parts)
        schema["prefixItems"] = [first]
        values = st.builds(
            lambda a, rest: [a, *rest], its, st.lists(of, min_size=max(0, least - 1), max_size=most - 1)
        )
    return schema, values


@st.composite
def objects(draw: Callable[..., Any], parts: st.SearchStrategy[Pair]) -> Pair:
    names = draw(st.lists(NAMES, unique=True, max_size=3))
    found = {name: draw(parts) for name in names}
    required = [name for name in names if draw(st.booleans())]
    schema: Schema = {
        "type": "object",
        "properties": {name: pair[0] for name, pair in found.items()},
        "required": required,
    }
    values = st.fixed_dictionaries(
        {name: found[name][1] for name in required},
        optional={name: found[name][1] for name in names if name not in required},
    ).map(lambda value: {name: value[name] for name in names if name in value})
    if draw(st.booleans()):
        others, of = draw(parts)
        schema["additionalProperties"] = others
        more = st.dictionaries(st.sampled_from(["z", "yé", 'w"']), of, max_size=2)
        return schema, st.builds(lambda value, rest: {**value, **rest}, values, more)
    return schema, values


@st.composite
def choices(draw: Callable[..., Any], parts: st.SearchStrategy[Pair]) -> Pair:
    kind = draw(st.sampled_from(["enum", "const", "anyOf", "$ref", "nullable", "list of types", "allOf"]))
    if kind in ("enum", "const"):
        values = draw(
            st.lists(st.one_of(SCALARS, st.sampled_from([0.1, 1e-7, -2.5, 1.0])), min_size=1, max_size=3)
        )
        values = values if kind == "enum" else values[:1]
        whole = [int(one) if isinstance(one, float) and one.is_integer() else one for one in values]
        return ({"enum": values} if kind == "enum" else {"const": values[0]}), st.sampled_from(whole)
    (one, ones), (other, others) = draw(parts), draw(parts)
    match kind:
        case "anyOf":
            return {"anyOf": [one, other]}, st.one_of(ones, others)
        case "$ref":
            inner, its = draw(strings())
            return {
                "type": "array",
                "items": {"$ref": "#/$defs/part%20one"},
                "maxItems": 2,
                "x-def": inner,
            }, st.lists(its, max_size=2)
        case "nullable":
            return {"anyOf": [one, {"type": "null"}]}, st.one_of(ones, st.none())
        case "list of types":
            return {"type": ["boolean", "string"], "maxLength": 2}, st.one_of(
                st.booleans(), st.text(LETTERS, max_size=2)
            )
    left, right = draw(st.lists(NAMES, unique=True, min_size=2, max_size=2))
    schema = {
        "allOf": [
            {"properties": {left: one}, "required": [left]},
            {"type": "object", "properties": {right: other}},
        ]
    }
    return schema, st.builds(lambda a, b: {left: a, right: b}, ones, others)


def _pairs() -> st.SearchStrategy[Pair]:
    leaves = st.one_of(
        strings(),
        integers(),
        numbers(),
        st.just(({"type": "boolean"}, st.booleans())),
        st.just(({"type": "null"}, st.none())),
        st.just(({}, SCALARS)),
    )
    return st.recursive(
        leaves, lambda parts: st.one_of(arrays(parts), objects(parts), choices(parts)), max_leaves=5
    )


PAIRS = _pairs()


def with_definitions(schema: Schema) -> Schema:
    """The schema with the definition that its `$ref` names: the last `x-def`."""
    defs: dict[str, Any] = {}

    def visit(part: Any) -> Any:
        if isinstance(part, list):
            return [visit(each) for each in part]
        if not isinstance(part, dict):
            return part
        part = dict(part)
        if "x-def" in part and isinstance(part.get("items"), dict):
            name = f"part one{len(defs)}"
            defs[name] = part.pop("x-def")
            part["items"] = {"$ref": "#/$defs/" + name.replace(" ", "%20")}
        return {key: visit(each) for key, each in part.items()}

    found = visit(schema)
    return {**found, "$defs": defs} if defs else found


def spelled(value: Value) -> st.SearchStrategy[str]:
    """The value as JSON, with white space and escapes that a model may choose."""
    match value:
        case bool() | None:
            return st.just(json.dumps(value))
        case int():
            return st.just(str(value))
        case float():
            return st.just(plain(value))
        case str():
            return st.tuples(*(_letter(letter) for letter in value)).map(lambda parts: f'"{"".join(parts)}"')
        case list():
            return _listed("[", [spelled(each) for each in value], "]")
    pairs = [
        st.tuples(spelled(key), BLANKS, BLANKS, spelled(each)).map(lambda p: f"{p[0]}{p[1]}:{p[2]}{p[3]}")
        for key, each in value.items()
    ]
    return _listed("{", pairs, "}")


def plain(value: float) -> str:
    """A number without an exponent."""
    return "0" if value == 0 else format(Decimal(repr(value)), "f")


def _letter(letter: str) -> st.SearchStrategy[str]:
    code = ord(letter)
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f", '"': '\\"', "\\": "\\\\"}
    if code < 0x20 or code == 0x7F:
        forms = [f"\\u{code:04x}"] + ([short[letter]] if letter in short else [])
        return st.sampled_from(forms)
    return st.just(short.get(letter, letter))


def _listed(first: str, parts: list[st.SearchStrategy[str]], last: str) -> st.SearchStrategy[str]:
    spaced = [st.tuples(BLANKS, part, BLANKS).map("".join) for part in parts]
    if not spaced:
        return BLANKS.map(lambda blank: first + blank + last)
    return st.tuples(*spaced).map(lambda each: first + ",".join(each) + last)
