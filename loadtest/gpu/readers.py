"""Requests of random tokens, and what the reader of each answer sees."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.fleet import MODEL
from loadtest.real.served import ANSWER_S, Body, Served
from shared.client.client import request_all
from shared.nats import subjects

PROMPT, ANSWER = 1024, 256
FIRST_ID, LAST_ID = 300, 120_000
LONGEST = 8  # gaps that are told


@dataclass(slots=True)
class Read:
    """When parts of an answer came, in seconds on the loop's clock."""

    sent_s: float = 0.0
    parts_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens in each


async def read(fleet: Served, body: Body) -> Read:
    """Send a request and read its answer."""
    loop = asyncio.get_running_loop()
    seen = Read(loop.time())
    async for frame in fleet.client.stream(body):
        if frame["type"] == "delta":
            seen.parts_s.append(loop.time())
            seen.counts.append(frame["choices"][0]["count"])
    return seen


async def read_all(fleet: Served, bodies: Sequence[Body], in_flight: int) -> list[Read]:
    """All of them, so many at a time, in order."""
    left, seen = iter(bodies), list[Read]()

    async def worker() -> None:
        for body in left:
            seen.append(await read(fleet, body))

    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return seen


def figures(reads: Sequence[Read], took_s: float, answer: float = ANSWER) -> dict[str, Any]:
    """Tokens a second, the quantiles of the times that readers feel, and of the longest gaps ms, part behind
    it and tokens in that part."""
    gaps = sorted(1e3 * (b - a) for seen in reads for a, b in itertools.pairwise(seen.parts_s))
    first = sorted(1e3 * (seen.parts_s[0] - seen.sent_s) for seen in reads)
    cuts = statistics.quantiles(gaps, n=100)
    longest = heapq.nlargest(
        LONGEST,
        (
            (round(1e3 * (r.parts_s[i] - r.parts_s[i - 1]), 1), i, r.counts[i])
            for r in reads
            for i in range(1, len(r.parts_s))
        ),
    )
    return {
        "tok_s": len(reads) * answer / took_s, "seconds": took_s, "parts": sum(len(r.parts_s) for r in reads),
        "ttft_p50_ms": statistics.median(first), "ttft_p99_ms": statistics.quantiles(first, n=100)[98],
        "itl_p50_ms": cuts[49], "itl_p90_ms": cuts[89], "itl_p99_ms": cuts[98], "itl_max_ms": gaps[-1],
        "longest": longest,
    }  # fmt: skip


def some_tokens(rng: random.Random, count: int) -> list[int]:
    """Token ids that nobody has seen."""
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def body_of(request_id: str, prompt: list[int], tokens: int, **more: Any) -> Body:
    """A greedy request for so many tokens."""
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "seed": 1, "request_id": request_id, **more,
    }  # fmt: skip


def bodies(name: str, rows: int, tokens: int, **more: Any) -> list[Body]:
    """Requests with prompts of their own; the same ones for the same name."""
    rng = random.Random(name)
    return [body_of(f"{name}-{i}", some_tokens(rng, PROMPT), tokens, **more) for i in range(rows)]


def unequal(name: str, rows: int) -> list[Body]:
    """The same with prompts of 1 to 2 * PROMPT - 1 tokens and answers of 1 to 2 * ANSWER - 1, evenly."""
    rng = random.Random(name)
    sizes = [(rng.randrange(1, 2 * PROMPT), rng.randrange(1, 2 * ANSWER)) for _ in range(rows)]
    return [body_of(f"{name}-{i}", some_tokens(rng, size), tokens) for i, (size, tokens) in enumerate(sizes)]


async def executor_status(fleet: Served) -> dict[str, Any]:
    """What the only executor says about itself; empty while it does not answer."""
    answers = await request_all(fleet.bus, subjects.STATUS, ANSWER_S)
    return next((dict(a) for a in answers if a["kind"] == "executor"), {})


async def judging(fleet: Served) -> dict[str, Any]:
    """What the scheduler judges copies by, of the only executor."""
    answers = await request_all(fleet.bus, subjects.STATUS, ANSWER_S)
    links = next((a["tiers"] for a in answers if a["kind"] == "scheduler"), {})
    return {name: value for facts in links.values() for name, value in facts.items() if name != "host"}
