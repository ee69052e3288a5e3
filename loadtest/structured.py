"""Measures tokens/s of rows under a JSON schema against the same rows without one, over HTTP, in turn.

    python -m loadtest.structured --rows 8 --pairs 8 --out structured.json
    python -m loadtest.structured --temperature 0 -- --dtype bf16

One `headrace up`, with the flags after `--`. All rows of an arm are asked at once, and each answer has
`--tokens` tokens: without a schema by `ignore_eos`, under it because the array that it asks for is longer.
The prompts and the lengths are the same. The order of the two arms alternates. `ratio`: tokens/s under the
schema divided by tokens/s without, of each pair.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loadtest.bench.machine import circumstances
from loadtest.fleet import MODEL
from loadtest.running_up import running_up
from shared.processes import bind

Body = dict[str, Any]
TIMEOUT_S = 300
WORD = {"type": "string"}
PERSON: Body = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": WORD,
        "role": {"enum": ["engineer", "teacher", "doctor", "student"]},
        "active": {"type": "boolean"},
        "hobbies": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "city", "role", "active", "hobbies"],
}
SCHEMA: Body = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": PERSON, "minItems": 200}},
    "required": ["people"],
}
ASKED = (
    'List the people of village number {} as JSON: {{"people": [{{"name": ..., "age": ..., "city": ..., '
    '"role": ..., "active": ..., "hobbies": [...]}}, ...]}}. Answer with JSON alone.'
)


def body(row: int, tokens: int, temperature: float, *, schema: bool) -> Body:
    """The request of a row."""
    bound: Body = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}}
        if schema
        else {"ignore_eos": True}
    )
    return {
        "model": MODEL, "messages": [{"role": "user", "content": ASKED.format(row)}], "seed": row,
        "max_tokens": tokens, "temperature": temperature, **bound,
    }  # fmt: skip


def ask(port: int, wanted: Body) -> int:
    """The tokens of an answer. Raises SystemExit for one that is not as long as asked."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(wanted), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    if answer.status != 200 or found["usage"]["completion_tokens"] != wanted["max_tokens"]:
        raise SystemExit(f"{answer.status}: {json.dumps(found)[:600]}")
    return int(wanted["max_tokens"])


def tokens_per_s(port: int, asked: argparse.Namespace, *, schema: bool) -> float:
    """The tokens of all rows, asked at once, by the time from the first request to the last answer."""
    bodies = [body(row, asked.tokens, asked.temperature, schema=schema) for row in range(asked.rows)]
    with ThreadPoolExecutor(asked.rows) as pool:
        began = time.perf_counter()
        tokens = sum(pool.map(lambda each: ask(port, each), bodies))
        return tokens / (time.perf_counter() - began)


def measured(asked: argparse.Namespace) -> list[dict[str, float]]:
    """tokens/s of both arms and their ratio, pair by pair."""
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    bound.close()
    pairs = []
    with running_up(["--http", f"127.0.0.1:{port}", *asked.flags]):
        for schema in (False, True) * asked.warm_up:
            tokens_per_s(port, asked, schema=schema)
        for number in range(asked.pairs):
            arms = [("free", False), ("schema", True)]
            pair = {
                name: round(tokens_per_s(port, asked, schema=schema), 1)
                for name, schema in arms[:: -1 if number % 2 else 1]
            }
            pairs.append({**pair, "ratio": round(pair["schema"] / pair["free"], 4)})
            print(json.dumps(pairs[-1]), flush=True)
    return pairs


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2, help="pairs before")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="of `up`")
    asked = parser.parse_args()
    pairs = measured(asked)
    ratios = [pair["ratio"] for pair in pairs]
    found: dict[str, Any] = {
        "arguments": {name: str(value) for name, value in vars(asked).items()},
        "circumstances": circumstances(),
        "ratio": {"median": round(statistics.median(ratios), 4), "least": min(ratios), "most": max(ratios)},
        "pairs": pairs,
    }
    print(json.dumps({"rows": asked.rows, "temperature": asked.temperature, **found["ratio"]}))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
