"""Are the grammars of JSON schemas right? The oracle of the tests, and the JSON Schema Test Suite."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.grammar_engine import RefusedError, engine

ORDERS = 120  # orders of properties that are tried for one instance
_CLOSERS = ("properties", "patternProperties")
# Leap seconds, small letters, over nine decimals; quoted addresses, hosts in brackets; `::1.2.3.4`; punycode.
UNLISTED = re.compile(r":60|[tz]|\.[0-9]{10}|^\"|@\[|:[0-9.]*\.|^..--|\...--")


def orders(value: Any) -> list[Any]:
    """The value with its properties in every order, up to ORDERS."""

    def each(part: Any) -> Iterator[Any]:
        if isinstance(part, list):
            yield from (list(found) for found in itertools.product(*(orders(one) for one in part)))
        elif isinstance(part, dict):
            for names in itertools.permutations(part):
                for found in itertools.product(*(orders(part[name]) for name in names)):
                    yield dict(zip(names, found, strict=True))
        else:
            yield part

    return list(itertools.islice(each(value), ORDERS))


def text_of(value: Any) -> str:
    """The value as JSON: whole numbers and those with an exponent written out."""
    match value:
        case float() if math.isfinite(value):
            from support.schema_oracle import plain

            return str(int(value)) if value.is_integer() else plain(value)
        case list():
            return f"[{', '.join(map(text_of, value))}]"
        case dict():
            pairs = (f"{json.dumps(key, ensure_ascii=False)}: {text_of(of)}" for key, of in value.items())
            return f"{{{', '.join(pairs)}}}"
    return json.dumps(value, ensure_ascii=False)


def oracle(examples: int, chosen: int) -> dict[str, Any]:
    """The property tests of test_json_schema.py, counted."""
    import jsonschema_rs
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st
    from support import byte_grammar
    from support.schema_oracle import PAIRS, spelled, with_definitions

    found: Counter[str] = Counter()
    keywords: Counter[str] = Counter()
    wrong: list[Any] = []

    @seed(chosen)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        schema, instances = data.draw(PAIRS)
        schema = with_definitions(schema)
        source = engine().prepared(schema)
        judge = jsonschema_rs.validator_for(schema, validate_formats=True)
        found["schemas"] += 1
        keywords.update(set(_keywords(schema)))
        for values in (instances, instances, data.draw(PAIRS)[1]):
            value = data.draw(values)
            valid = judge.is_valid(value)
            if not valid or values is instances:
                text = data.draw(spelled(value))
                found["valid" if valid else "invalid"] += 1
                if byte_grammar.accepts(source, text) != valid:
                    wrong.append([schema, text, valid])

    draw()
    return {**found, "wrong": len(wrong), "schemas_with": dict(sorted(keywords.items())), "cases": wrong[:20]}


def _keywords(schema: Any) -> Iterator[str]:
    for name, part in schema.items() if isinstance(schema, dict) else ():
        yield f"format {part}" if name == "format" else name
        match name:
            case "properties" | "$defs":
                yield from (word for one in part.values() for word in _keywords(one))
            case "anyOf" | "allOf" | "prefixItems":
                yield from (word for one in part for word in _keywords(one))
            case "items" | "additionalProperties":
                yield from _keywords(part)


def closed(schema: Any) -> Any:
    """The schema without properties that an object with named ones does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part if name in ("enum", "const") else closed(part) for name, part in schema.items()}
    if any(isinstance(schema.get(name), dict) for name in _CLOSERS):
        kept.setdefault("additionalProperties", False)
    return kept


def suite(folder: Path) -> dict[str, Any]:
    """Each file of the test suite: schemas followed and refused; tests that are right, stricter as in
    docs/reference/api.md, or wrong."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.json")):
        counts: Counter[str] = Counter()
        cases: list[Any] = []
        for group in json.loads(path.read_text()):
            _one_group(group, counts, cases)
        found[str(path.relative_to(folder).with_suffix(""))] = {**counts, "cases": cases}
    total: Counter[str] = Counter()
    for each in found.values():
        total.update({name: n for name, n in each.items() if name != "cases"})
    return {"total": dict(total), "files": found}


def _one_group(group: dict[str, Any], counts: Counter[str], cases: list[Any]) -> None:
    from support import byte_grammar

    schema, tests = group["schema"], group["tests"]
    counts["schemas"] += 1
    try:
        source = engine().prepared(schema)
    except RefusedError as error:
        counts["refused"] += 1
        cases.append(["refused", group["description"], str(error)])
        return
    counts["followed"] += 1
    for test in tests:
        value, valid = test["data"], test["valid"]
        accepted = any(byte_grammar.accepts(source, text_of(one)) for one in orders(value))
        kind = "right" if accepted == valid else "wrong"
        if valid and not accepted:
            kind = _excuse(schema, value)
        if kind != "right":
            cases.append([kind, group["description"], test["description"], value, valid])
        counts[kind] += 1


def _excuse(schema: Any, value: Any) -> str:
    """Which line of docs/reference/api.md leaves out a valid instance; "wrong" if none does."""
    import jsonschema_rs

    whole = {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}
    if not jsonschema_rs.validator_for(whole).is_valid(value):
        return "stricter: $schema is ignored"
    if not jsonschema_rs.validator_for(closed(whole)).is_valid(value):
        return "stricter: named properties only"
    if not jsonschema_rs.validator_for(whole, validate_formats=True).is_valid(value):
        return "stricter: a format is more than an annotation"
    if "format" in schema and isinstance(value, str) and UNLISTED.search(value):
        return "stricter: spelling of a format"
    return "wrong"
