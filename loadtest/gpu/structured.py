"""Measures what structured output takes of a decode step: rows under a JSON schema against the same rows
without one, in turn. The vocabulary is made up: words, digits, the marks of JSON.

free     two steps in flight, tokens chosen in the graph
one      the same with one step in flight: what is left of `schema - one` is the masks' work
schema   every row with a matcher of its own; a step's masks are made while its forward runs
bounded  the same where the length of each string is bounded: some masks take milliseconds
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from loadtest.driver import Driver
from services.executor.engine import Backend
from services.executor.sampling.grammar import Grammars
from services.tokenizer.json_schema import followed
from shared.answer_formats import grammar
from shared.messages import Sampling
from shared.vocab.vocabulary import Vocabulary

ROWS = (8, 32, 128)
CONTEXT, STEPS, WARM_STEPS, PAIRS = 1024, 64, 8, 8
GOAL = 0.02  # of a step of 32 rows
ARMS = {"free": ("", 2), "one": ("", 1), "schema": ("plain", 1), "bounded": ("bounded", 1)}  # steps in flight
MARKS = ('"', '":', '", "', '"}', '"},', "{", '{"', "[", '["', "]", '"]', "},", ",", ":", ": ", "\n", "\n  ")
WORDS: dict[str, Any] = {"plain": {"type": "string"}, "bounded": {"type": "string", "maxLength": 24}}


def schema(word: dict[str, Any]) -> dict[str, Any]:
    """A list that is longer than the answers."""
    properties = {
        "name": word,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["engineer", "teacher", "doctor", "student"]},
        "active": {"type": "boolean"},
        "hobbies": {"type": "array", "items": word, "minItems": 1, "maxItems": 4},
    }
    item = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "array", "items": item, "minItems": 200}


def vocabulary(size: int) -> Vocabulary:
    """A stand-in with the parts that grammars read; its last token ends an answer."""
    chance = random.Random(0)
    texts = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in MARKS)])
    texts |= dict.fromkeys(str(number).encode() for number in range(1000))
    while len(texts) < size:
        letters = "".join(chance.choices("etaoinshrdlucmfwygpbvk", k=chance.randint(2, 9)))
        texts[(chance.choice(("", " ", " ")) + chance.choice((letters, letters.title()))).encode()] = None
    found = [*[*texts][: size - 1], b""]
    return cast("Vocabulary", SimpleNamespace(bytes_with=lambda markers: list(found), eos_ids=[size - 1]))


def structured(backend: Backend, rows: Sequence[int] = ROWS, pairs: int = PAIRS) -> list[dict[str, Any]]:
    """ms of a step of each arm, the medians of `pairs` rounds, and the share of a step that the schema
    takes. `backend` is an engine with host rows, in this process."""
    engine: Any = backend
    engine._host_rows._grammars = Grammars(lambda: vocabulary(backend.info.vocab), backend.info.vocab)
    sources = {"": ""}
    for name, word in WORDS.items():
        rules = grammar.json_rules("text", followed(schema(word), "schema"))
        sources[name] = grammar.packed(grammar.whole(None, rules, thinking=False))
    found = []
    for count in rows:
        taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(pairs + 1):
            for arm in [*ARMS][:: -1 if number % 2 else 1]:
                bound, in_flight = ARMS[arm]
                ms = _step_ms(backend, count, sources[bound], in_flight)
                if number:  # the first round compiles kernels and grammars
                    taken[arm].append(round(ms, 4))
        row: dict[str, Any] = {
            "rows": count,
            **{f"{arm}_ms": round(statistics.median(of), 4) for arm, of in taken.items()},
        }
        for base in ("free", "one"):
            over = [with_it / alone - 1 for alone, with_it in zip(taken[base], taken["schema"], strict=True)]
            row[f"share_over_{base}"] = round(statistics.median(over), 4)
        row["rounds"] = taken
        found.append(row)
        reached = "" if row["share_over_one"] <= GOAL or count != 32 else f"  <-- over {GOAL:.0%}"
        print("structured", {k: v for k, v in row.items() if k != "rounds"}, reached, flush=True)
    return found


def _step_ms(backend: Backend, count: int, source: str, in_flight: int) -> float:
    """The mean time of a step. Raises AssertionError where a row has ended early."""
    driver = Driver(backend)
    length, tables = CONTEXT + WARM_STEPS + STEPS, {}
    for slot in range(count):
        tokens = [(slot * 7919 + i * 31) % 1000 + 300 for i in range(CONTEXT)]
        of, blocks = driver.open_with(slot, tokens, length + 1, Sampling(temperature=1.0), grammar=source)
        tables[of] = blocks
    plans = [
        driver.plan([(slot, CONTEXT - 1 + step, 1, step > 0) for slot in tables], {} if step else tables)
        for step in range(WARM_STEPS + STEPS)
    ]
    ends_s = driver.run(plans, in_flight)
    engine: Any = backend
    short = {slot: n for slot in tables if (n := len(engine._slots.tokens(slot))) != length}
    driver.close()
    assert not short, f"rows with too few tokens: {short}"
    return 1e3 * (ends_s[-2] - ends_s[WARM_STEPS - 1]) / (STEPS - 1)
