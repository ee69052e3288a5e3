"""Structured output on a real engine: does every answer validate, and what does it cost?

    python -m loadtest.structured --runs 200 --seconds 30 --out structured.json

200 answers over 20 schemas, each checked with jsonschema; one that `max_tokens` cuts short is a failure. Then
JSON and free text take turns at the same concurrency: tokens a second of each, and the ratio of each round.
Prompts are the same, and so are lengths: free text is asked for as many tokens as the JSON answers had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from itertools import count, cycle
from pathlib import Path
from typing import Any

import jsonschema

from loadtest.fleet import FLEET, MODEL, Fleet, cpu_name, until_ready
from loadtest.structured_schemas import SCHEMAS
from services.launcher.commands.status import services_of
from services.launcher.session import Target
from shared.client import Client
from shared.nats.bus import NatsBus

MOST_TOKENS = 400
ESSAY = {
    "type": "object",
    "properties": {
        "lines": {
            "type": "array",
            "items": {"type": "string", "minLength": 60, "maxLength": 120},
            "minItems": 2,
            "maxItems": 3,
        }
    },
    "required": ["lines"],
}


def asked(seed: int, schema: Any, *, follow: bool = True, **more: Any) -> dict[str, Any]:
    """A request for an example of something, as text or to `follow` its schema."""
    text = f"Give an example of this: {json.dumps(schema)[:200]}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "seed": seed, **more}
    return {**body, "structured_outputs": {"json": schema}} if follow else body


async def validate(client: Client, runs: int, at_once: int) -> list[str]:
    """Ask `runs` times; what was wrong with those that failed."""
    names = list(SCHEMAS)
    turns = asyncio.Semaphore(at_once)

    async def one(i: int) -> str:
        schema = SCHEMAS[names[i % len(names)]]
        async with turns:
            answer = await client.complete(asked(i, schema, max_tokens=MOST_TOKENS), timeout_s=900)
        (choice,) = answer["choices"]
        try:
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{names[i % len(names)]}, {choice['finish_reason']}: {error!s:.200}"
        return (
            "" if choice["finish_reason"] == "stop" else f"{names[i % len(names)]}: {choice['finish_reason']}"
        )

    return [why for why in await asyncio.gather(*map(one, range(runs))) if why]


async def rate(client: Client, at_once: int, seconds: float, lengths: list[int], *, follow: bool) -> float:
    """Tokens a second of requests that follow each other on `at_once` lines. JSON answers that end add how
    many tokens they have to `lengths`; free text takes its lengths from there, in turn."""
    seeds, ends_s, given = count(1), time.monotonic() + seconds, cycle(lengths)
    total = 0

    async def line() -> None:
        nonlocal total
        while time.monotonic() < ends_s:
            more = {"max_tokens": MOST_TOKENS} if follow else {"max_tokens": next(given), "ignore_eos": True}
            tokens = 0
            async for frame in client.stream(asked(next(seeds), ESSAY, follow=follow, **more), timeout_s=900):
                new = sum(choice.get("count", 0) for choice in frame.get("choices", ()))
                tokens += new
                if time.monotonic() < ends_s:
                    total += new
            if follow:
                lengths.append(tokens)

    await asyncio.gather(*(line() for _ in range(at_once)))
    return total / seconds


async def take_turns(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of JSON, then free text of the same lengths."""
    await rate(client, args.at_once, 2, [], follow=True)
    rounds, asked_for = [], []
    for _ in range(args.rounds):
        lengths: list[int] = []
        structured = await rate(client, args.at_once, args.seconds, lengths, follow=True)
        rounds.append((await rate(client, args.at_once, args.seconds, lengths, follow=False), structured))
        asked_for += lengths
    return {
        "tokens_per_answer": round(statistics.mean(asked_for), 1),
        "free_tokens_per_second": [round(free, 1) for free, _ in rounds],
        "json_tokens_per_second": [round(structured, 1) for _, structured in rounds],
        "ratio": round(statistics.median(structured / free for free, structured in rounds), 3),
    }


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Everything."""
    bus = await NatsBus.connect(url, name="structured")
    client = await Client.open(bus)
    await until_ready(client)
    failures = await validate(client, args.runs, args.at_once)
    rates = await take_turns(client, args)
    services = await services_of(Target(url, MODEL), FLEET)
    steps = next(s for s in services if s["kind"] == "scheduler")["measured"]["steps"]
    await bus.drain()
    return {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "runs": args.runs,
        "schemas": len(SCHEMAS),
        "failures": failures,
        "at_once": args.at_once,
        **rates,
        "steps": {mode: n for mode, n in steps.items() if mode in ("single", "run_ahead", "two_batch")},
    }


def main() -> None:
    """Start a fleet, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30, help="of each kind, a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    fleet = Fleet({"HEADRACE_L1": "off", "HEADRACE_REQUEST_TIMEOUT_S": "900"})
    try:
        figures = asyncio.run(measure(fleet.server.url, args))
    finally:
        fleet.stop()
    print(json.dumps(figures, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
