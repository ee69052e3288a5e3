"""Measures what structured output takes of a decode step: rows under a JSON schema against the same rows
without one, in turn. The vocabulary is made up: words, digits, the marks of JSON.

one, two              no grammar; one step in flight, and two
schema_one, _two      every row with a matcher of its own; a step's masks are made while its forward runs
bounded_two           the same where the length of each string is bounded: some masks take milliseconds

Beside the time of a step: `masks_us`, the host's work for its masks; `forward_us`, to queue the next forward,
with those masks if two are in flight; `sampling_us`, the device's time for head, choice and copy of the ids.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from loadtest.driver import Driver
from loadtest.gpu.timing import eager_ms
from services.executor.engine import Backend
from services.executor.sampling.grammar import build_grammars
from services.tokenizer.structured_output import followed
from shared.answer_formats import grammar
from shared.messages import Sampling
from shared.vocab.vocabulary import Vocabulary

ROWS = (8, 32, 128)
CONTEXT, STEPS, WARM_STEPS, PAIRS = 1024, 48, 8, 4
GOAL = 0.02  # of a step of 32 rows
ARMS = {  # the grammar, and steps in flight
    "one": ("", 1), "schema_one": ("plain", 1), "two": ("", 2), "schema_two": ("plain", 2),
    "bounded_two": ("bounded", 2),
}  # fmt: skip
FIGURES = ("ms", "masks_us", "forward_us", "sampling_us")
REPEATS = 10  # of sampling, one after the other
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
    """Medians of `pairs` rounds for each arm, and the shares of a step that the schema takes. `backend` is an
    engine with host rows, in this process."""
    engine: Any = backend
    engine._host_rows._grammars = build_grammars(lambda: vocabulary(backend.info.vocab), backend.info.vocab)
    sources = {"": ""}
    for name, word in WORDS.items():
        rules = grammar.json_rules("text", followed(schema(word), "schema"))
        sources[name] = grammar.packed(grammar.whole(None, rules, thinking=False))
    found = []
    for count in rows:
        rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for number in range(pairs + 1):
            for arm in [*ARMS][:: -1 if number % 2 else 1]:
                bound, in_flight = ARMS[arm]
                taken = _step(backend, count, sources[bound], in_flight)
                if number:  # the first round compiles kernels and grammars
                    rounds[arm].append(taken)
        row: dict[str, Any] = {"rows": count}
        for arm, its in rounds.items():
            row |= {f"{arm}_{name}": round(statistics.median(of[name] for of in its), 4) for name in its[0]}
        for base in ("one", "two"):
            pair = zip(rounds[base], rounds[f"schema_{base}"], strict=True)
            row[f"share_{base}"] = round(
                statistics.median(of["ms"] / alone["ms"] - 1 for alone, of in pair), 4
            )
        print(f"structured, {count} rows, ms of a step and of it us of masks, forward, sampling:", flush=True)
        for arm in ARMS:
            print(
                "  {:12} {:8.4f} {:8.0f} {:8.0f} {:8.0f}".format(arm, *(row[f"{arm}_{n}"] for n in FIGURES))
            )
        for base in ("one", "two"):
            share, over = row[f"share_{base}"], count == 32 and row[f"share_{base}"] > GOAL
            print(f"  share, {base} in flight: {share:.2%}" + f"  <-- over {GOAL:.0%}" * over, flush=True)
        row["rounds"] = {arm: [of["ms"] for of in its] for arm, its in rounds.items()}
        found.append(row)
    return found


def _step(backend: Backend, count: int, source: str, in_flight: int) -> dict[str, float]:
    """The mean time of a step, and its parts: see FIGURES. Raises AssertionError where a row has ended
    early."""
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
    sampling_us = _sampling_us(engine, count)
    driver.close()
    assert not short, f"rows with too few tokens: {short}"
    return {
        "ms": 1e3 * (ends_s[-2] - ends_s[WARM_STEPS - 1]) / (STEPS - 1),
        "masks_us": statistics.mean(driver.host_us[WARM_STEPS:]),
        "forward_us": statistics.mean(driver.forward_us[WARM_STEPS:]),
        "sampling_us": sampling_us,
    }


def _sampling_us(engine: Any, count: int) -> float:
    """The device's time to sample the step queued last, which has been sampled: again with its masks."""

    @torch.inference_mode()
    def again() -> None:
        for _ in range(REPEATS):
            engine._runner.sample(count, *engine._runner.answer(count))

    return 1e3 * eager_ms(again, 3) / REPEATS
