"""Measures the grammars of JSON schemas: are they right, and what do they cost?

    export PYTHONPATH=.:tests
    python -m loadtest.grammars --oracle 5000 --suite tests/draft2020-12 --out conformance.json
    python -m loadtest.grammars --bench maskbench/data --hostile --out llguidance.json

`--oracle` draws schemas and instances as the tests do. `--suite` takes a folder of the JSON Schema Test
Suite (npm: @json-schema-org/tests), `--bench` the files of JSONSchemaBench with their tests (MaskBench). The
engine has the default model's vocabulary. Each schema runs in a fork of its own, for at most 20 s.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.bench.machine import circumstances
from loadtest.command_line import parser_of, report
from loadtest.grammar_engine import LIMIT_S, Engine, RefusedError, engine
from loadtest.grammar_suite import oracle, suite, text_of

STEPS = 40  # of many rows
ROWS = (1, 32, 128)
MOST_MS = 1_000  # to compile a grammar of many rows
HOSTILE_STEPS = 30


def hostile() -> dict[str, Any]:
    """Schemas that are made to cost much."""
    nested: Any = {"type": "string"}
    for _ in range(30):
        nested = {"type": "object", "properties": {"a": nested, "b": {"type": "integer"}}}
    either = [{"properties": {f"k{i}_{j}": {"type": "integer"} for j in range(3)}} for i in range(8)]
    text = {"type": "string"}
    return {
        "60 sets without regard to case": {**text, "pattern": "(?i)" + "[\\x00-\\uffff]" * 60},
        "nested repetitions": {**text, "pattern": "^(([a-z]{0,60} ){0,60}x){0,60}$"},
        "26 gaps of 900": {
            **text,
            "pattern": "".join(f"[^{chr(97 + i)}]{{0,900}}{chr(97 + i)}" for i in range(26)),
        },
        "many states": {**text, "pattern": "^(a|b)*a(a|b){16}$"},
        "search with a gap": {**text, "pattern": "a.{18}b"},
        "3,000 values": {"enum": [f"value number {i}" for i in range(3_000)]},
        "300 patterns": {
            "properties": {f"p{i}": {**text, "pattern": f"^[a-z]{{{i},}}x{i}$"} for i in range(300)}
        },
        "300 optional properties": {"properties": {f"p{i}": text for i in range(300)}},
        "30 deep": nested,
        "allOf of 6 anyOf of 8": {"type": "object", "allOf": [{"anyOf": either} for _ in range(6)]},
        "maxLength 65,536": {**text, "maxLength": 65_536},
        "maxItems 10,000": {"type": "array", "items": text, "maxItems": 10_000},
        "40 lengths in a row": {"properties": {f"p{i}": {**text, "maxLength": 900 + i} for i in range(40)}},
    }


def ordered(value: Any, schema: Any, root: Any, depth: int = 0) -> Any:
    """The value with its properties in the order in which the schema names them."""
    if depth > 32:
        return value
    if isinstance(value, list):
        items = schema.get("items", {}) if isinstance(schema, dict) else {}
        first = schema.get("prefixItems", []) if isinstance(schema, dict) else []
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", {})
        return [
            ordered(one, first[i] if i < len(first) else items, root, depth + 1)
            for i, one in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    named: dict[str, Any] = {}
    _names(schema, root, named, 0)
    names = [name for name in named if name in value] + [name for name in value if name not in named]
    return {name: ordered(value[name], named.get(name, {}), root, depth + 1) for name in names}


def _names(schema: Any, root: Any, found: dict[str, Any], depth: int) -> None:
    if not isinstance(schema, dict) or depth > 16:
        return
    for name, part in schema.items():
        match name, part:
            case "properties", dict():
                for key, of in part.items():
                    found.setdefault(key, of)
            case "$ref", str() if part.startswith("#"):
                target: Any = root
                for step in part.split("/")[1:]:
                    name = step.replace("~1", "/").replace("~0", "~")
                    target = target.get(name) if isinstance(target, dict) else None
                _names(target, root, found, depth + 1)
            case "allOf" | "anyOf" | "oneOf", list():
                for one in part:
                    _names(one, root, found, depth + 1)
    for name in schema["required"] if isinstance(schema.get("required"), list) else ():
        if isinstance(name, str):
            found.setdefault(name, {})


def bench(engine: Engine, folder: Path, most: int, seed: int) -> dict[str, Any]:
    """Compile and walk a random sample of schemas; then many rows of them beside each other."""
    paths = sorted(folder.glob("*.json"))
    paths = random.Random(seed).sample(paths, min(most, len(paths)))
    each = {
        path.name: in_fork(functools.partial(_one_file, engine, json.loads(path.read_text())))
        for path in paths
    }
    long = [
        (json.loads((folder / name).read_text())["schema"], one["long_text"])
        for name, one in each.items()
        if one.get("long_text") and one["compile_ms"] < MOST_MS
    ]
    rows = {n: in_fork(functools.partial(_rows, engine, [*long, *long][:n]), 6 * LIMIT_S) for n in ROWS}
    return {"total": _total(list(each.values())), "rows": rows, "files": each}


def _one_file(engine: Engine, file: dict[str, Any]) -> dict[str, Any]:
    schema, found = file["schema"], Counter[str]()
    began = time.perf_counter()
    source = engine.prepared(schema)
    prepared = time.perf_counter()
    compiled = engine.compiled(source)
    compile_ms = (time.perf_counter() - began) * 1e3
    masks: list[float] = []
    texts: list[str] = []
    for test in file["tests"]:
        spellings = {text_of(one) for one in (ordered(test["data"], schema, schema), test["data"])}
        accepted = [text for text in spellings if engine.walk(compiled, text, masks)]
        texts += [text for text in accepted if test["valid"] and len(engine.vocabulary.encode(text)) > STEPS]
        found[("valid" if test["valid"] else "invalid") + (" accepted" if accepted else " refused")] += 1
    return {
        **found,
        "prepare_ms": (prepared - began) * 1e3,
        "compile_ms": compile_ms,
        "mask_us": [round(us, 1) for us in masks],
        "long_text": min(texts, default=""),
    }


def _rows(engine: Engine, cases: list[tuple[Any, str]]) -> dict[str, Any]:
    """ms of a step of rows, each with a grammar of its own, one after another on one thread."""
    rows = [
        (engine.compiled(engine.prepared(schema)), engine.vocabulary.encode(text)) for schema, text in cases
    ]
    steps = []
    for k in range(STEPS):
        began = time.perf_counter()
        for matcher, _ in rows:
            engine.mask(matcher)
        steps.append((time.perf_counter() - began) * 1e3)
        for matcher, tokens in rows:
            engine.accept(matcher, tokens[k])
    return {"rows": len(rows), "ms": percentiles(steps)}


def in_fork(work: Callable[[], dict[str, Any]], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The result of `work`, done in a fork, with the memory that it took there; or why there is none."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        try:
            found = work()
        except RefusedError as error:
            found = {"refused": str(error)[:300]}
        except Exception as error:  # noqa: BLE001 - an engine raises many types
            found = {"failed": f"{type(error).__name__}: {error!s:.300}"}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        theirs.send({**found, "memory_mb": round((peak - base) / 1e6, 1)})
        os._exit(0)
    theirs.close()
    found = {"refused": f"over {limit_s:g} s"}
    try:
        if ours.poll(limit_s):
            found = ours.recv()
    except EOFError:
        found = {"failed": "the process died"}
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return found


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    values = sorted(values)
    last = len(values) - 1
    found = {"p50": values[last // 2], "p99": values[round(last * 0.99)], "max": values[-1]}
    return {name: round(value, 3) for name, value in {**found, "mean": statistics.fmean(values)}.items()}


def _total(each: list[dict[str, Any]]) -> dict[str, Any]:
    done = [one for one in each if "compile_ms" in one]
    names = ("valid accepted", "valid refused", "invalid accepted", "invalid refused")
    return {
        "schemas": len(each),
        "followed": len(done),
        "refused": sum("refused" in one for one in each),
        "failed": sum("failed" in one for one in each),
        **{name: sum(one.get(name, 0) for one in done) for name in names},
        "compile_ms": percentiles([one["compile_ms"] for one in done]),
        "mask_us": percentiles([us for one in done for us in one["mask_us"]]),
        "memory_mb": percentiles([one["memory_mb"] for one in each if "memory_mb" in one]),
    }


def _one_hostile(engine: Engine, schema: Any) -> dict[str, Any]:
    began = time.perf_counter()
    compiled = engine.compiled(engine.prepared(schema))
    compile_ms = (time.perf_counter() - began) * 1e3
    masks = engine.random_walk(compiled, HOSTILE_STEPS)
    return {
        "compile_ms": round(compile_ms, 1),
        "mask_ms": round(max(masks, default=0) / 1e3, 2),
        "steps": len(masks),
    }


def main() -> None:
    """Measure what the arguments ask for."""
    parser = parser_of("grammars", __doc__)
    parser.add_argument("--oracle", type=int, default=0, metavar="N", help="examples")
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--most", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "arguments": {name: str(value) for name, value in vars(given).items()},
        "engine": f"llguidance {importlib.metadata.version('llguidance')}",
        "circumstances": circumstances(),
    }
    if given.oracle:
        found["oracle"] = oracle(given.oracle, given.seed)
    if given.suite:
        found["suite"] = suite(given.suite)
    if given.bench:
        found["bench"] = bench(engine(), given.bench, given.most, given.seed)
    if given.hostile:
        found["hostile"] = {
            name: in_fork(functools.partial(_one_hostile, engine(), schema), 2 * LIMIT_S)
            for name, schema in hostile().items()
        }
    shown = {
        part: {name: of for name, of in found[part].items() if name not in ("files", "cases")}
        for part in ("oracle", "suite", "bench", "hostile")
        if part in found
    }
    report(found, given.out, shown=shown)


if __name__ == "__main__":
    main()
