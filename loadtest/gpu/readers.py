"""Requests of random tokens, and the answers as their readers see them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.fleet import MODEL, Body
from shared.client.client import Client
from shared.errors import HeadraceError

PROMPT, ANSWER = 1024, 256
FIRST_ID, LAST_ID = 300, 120_000
LONGEST = 8  # gaps that are reported
LIMIT_S = 600.0


@dataclass(slots=True)
class Answer:
    """One answer; times in seconds on this machine's monotonic clock."""

    name: str = ""
    prompt_tokens: int = 0
    turn: int = 0
    sent_s: float = 0.0
    ended_s: float = 0.0
    parts_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens in each part
    text: str = ""
    starts: int = 0  # how often it began
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.parts_s)), default=0.0)


async def read(client: Client, body: Body, turn: int = 0) -> Answer:
    """One answer, also one that ends with an error."""
    answer = Answer(str(body["request_id"]), len(body["prompt"]), turn, time.monotonic())
    try:
        async for frame in client.stream(body, timeout_s=LIMIT_S):
            if frame["type"] == "accepted":
                answer.text, answer.starts = "", answer.starts + 1
            elif frame["type"] == "delta":
                answer.parts_s.append(time.monotonic())
                answer.counts.append(frame["choices"][0]["count"])
                answer.text += frame["choices"][0]["text"]
    except HeadraceError as error:
        answer.error = f"{error.code} {error.message}"
    answer.ended_s = time.monotonic()
    return answer


async def read_all(client: Client, bodies: Sequence[Body], in_flight: int) -> list[Answer]:
    """All of them, `in_flight` at a time, in the order in which they end."""
    left, found = iter(bodies), list[Answer]()

    async def worker() -> None:
        for body in left:
            found.append(await read(client, body))

    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return found


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens a second from the first request to the last answer, quantiles of the times that readers feel,
    and of the longest gaps ms, the part after the gap and its tokens."""
    whole = [answer for answer in answers if not answer.error and answer.parts_s]
    took_s = max(a.ended_s for a in whole) - min(a.sent_s for a in whole)
    gaps = sorted(1e3 * (b - a) for answer in whole for a, b in itertools.pairwise(answer.parts_s))
    first = sorted(1e3 * (answer.parts_s[0] - answer.sent_s) for answer in whole)
    cuts = statistics.quantiles(gaps, n=100)
    longest = heapq.nlargest(
        LONGEST,
        (
            (round(1e3 * (a.parts_s[i] - a.parts_s[i - 1]), 1), i, a.counts[i])
            for a in whole
            for i in range(1, len(a.parts_s))
        ),
    )
    return {
        "requests": len(answers), "errors": len(answers) - len(whole), "seconds": took_s,
        "tok_s": sum(a.tokens for a in whole) / took_s, "parts": sum(len(a.parts_s) for a in whole),
        "ttft_p50_ms": statistics.median(first), "ttft_p99_ms": statistics.quantiles(first, n=100)[98],
        "itl_p50_ms": cuts[49], "itl_p90_ms": cuts[89], "itl_p99_ms": cuts[98], "itl_max_ms": gaps[-1],
        "longest": longest,
    }  # fmt: skip


def some_tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids, which no cache has."""
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def body_of(request_id: str, prompt: list[int], tokens: int, **more: Any) -> Body:
    """A greedy request for `tokens` tokens."""
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "seed": 1, "request_id": request_id, **more,
    }  # fmt: skip


def bodies(name: str, rows: int, tokens: int = ANSWER, **more: Any) -> list[Body]:
    """Requests with prompts of their own; the same ones for the same name."""
    rng = random.Random(name)
    return [body_of(f"{name}-{i}", some_tokens(rng, PROMPT), tokens, **more) for i in range(rows)]


def unequal(name: str, rows: int) -> list[Body]:
    """The same with prompts of 1 to 2 * PROMPT - 1 tokens and answers of 1 to 2 * ANSWER - 1, evenly."""
    rng = random.Random(name)
    sizes = [(rng.randrange(1, 2 * PROMPT), rng.randrange(1, 2 * ANSWER)) for _ in range(rows)]
    return [body_of(f"{name}-{i}", some_tokens(rng, size), tokens) for i, (size, tokens) in enumerate(sizes)]
