"""Continuous batching against static, and the ways to fill a step, on the real model: the same burst of
requests for each, as its readers see it."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from loadtest.fleet import MODEL
from loadtest.real.report import Report
from loadtest.real.served import Body, Served, env_of, real_env, served

FILLS = ("mixed", "prefill_first", "decode_first", "static")
PROMPT_TOKENS, ANSWER_TOKENS = (30, 200), (8, 60)


@dataclass(frozen=True, slots=True)
class Size:
    """How many requests, and over how long they arrive."""

    requests: int
    seconds: float
    threads: int
    seed: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the burst."""

    at_s: float
    body: Body


@dataclass(slots=True)
class Read:
    """When its reader had the parts of an answer, on the loop's clock."""

    tokens: int
    sent_s: float = 0.0
    parts_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        """Sent to first text."""
        return 1e3 * (self.parts_s[0] - self.sent_s)

    @property
    def tpot_ms(self) -> float:
        """Mean time of a token after the first."""
        return 1e3 * (self.parts_s[-1] - self.parts_s[0]) / (self.tokens - 1)

    @property
    def stall_ms(self) -> float:
        """The longest time between two parts of the text."""
        return 1e3 * max((b - a for a, b in itertools.pairwise(self.parts_s)), default=0.0)


async def run(size: Size, command: str) -> Report:
    """The table of all ways."""
    asked = burst(size)
    report = Report(
        "batching",
        "Ways to fill a step, real model",
        f"SmolLM2-135M-Instruct in float32, {size.threads} threads, five processes and a nats-server. "
        f"{size.requests} requests arrive over {size.seconds:g} s (Poisson, seed {size.seed}): prompts of "
        f"{PROMPT_TOKENS[0]}–{PROMPT_TOKENS[1]} tokens, answers of {ANSWER_TOKENS[0]}–{ANSWER_TOKENS[1]}. "
        "Times as the readers of the streams see them; static batching takes new requests only when its "
        "batch has ended.",
        command,
        ["fill", "output tok/s", "TTFT ms p50", "TTFT ms p99", "TPOT ms p50", "TPOT ms p99",
         "longest stall ms", "all done s"],
    )  # fmt: skip
    for fill in FILLS:
        env = real_env(size.threads) | env_of(policy=f"fill={fill}")
        async with served(env) as fleet:
            reads = await _all(fleet, asked)
        report.add([fill, *_figures(reads)])
        report.data.setdefault("requests", {})[fill] = [asdict(read) for read in reads]
    return report


def burst(size: Size) -> list[Asked]:
    """The requests, the same for each seed."""
    rng = random.Random(size.seed)
    at_s, asked = 0.0, []
    for number in range(size.requests):
        prompt = [rng.randrange(300, 40_000) for _ in range(rng.randint(*PROMPT_TOKENS))]
        tokens = rng.randint(*ANSWER_TOKENS)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        asked.append(Asked(at_s, {**body, "request_id": f"burst-{number}"}))
        at_s += rng.expovariate(size.requests / size.seconds)
    return asked


async def _all(fleet: Served, asked: Sequence[Asked]) -> list[Read]:
    began_s = asyncio.get_running_loop().time()
    return list(await asyncio.gather(*(_one(fleet, one, began_s) for one in asked)))


async def _one(fleet: Served, asked: Asked, began_s: float) -> Read:
    loop, read = asyncio.get_running_loop(), Read(asked.body["max_tokens"])
    await asyncio.sleep(began_s + asked.at_s - loop.time())
    read.sent_s = loop.time()
    async for frame in fleet.client.stream(asked.body):
        if frame["type"] == "delta":
            read.parts_s.append(loop.time())
    return read


def _figures(reads: list[Read]) -> list[float]:
    took_s = max(read.parts_s[-1] for read in reads) - min(read.sent_s for read in reads)
    ttft, tpot = [read.ttft_ms for read in reads], [read.tpot_ms for read in reads]
    stall_ms = max(read.stall_ms for read in reads)
    return [
        round(sum(read.tokens for read in reads) / took_s, 1),
        *(round(statistics.median(of) if q == 50 else _p99(of)) for of in (ttft, tpot) for q in (50, 99)),
        round(stall_ms),
        round(took_s, 1),
    ]


def _p99(values: list[float]) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1]
