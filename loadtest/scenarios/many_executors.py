"""Workloads for several executors: shared prefixes, conversations, one hot prefix, and a mix of them; and
more than a fast executor and a slow one can do, with its ideal makespan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, takewhile

from loadtest.scenarios.synthetic import SECOND_US
from loadtest.simulator.engine import Machine
from loadtest.simulator.report import Figures
from loadtest.simulator.requests import TEXT_ID, SimRequest, Workload
from loadtest.simulator.world import FIRST_US, Setup, World
from services.scheduler.state.policies import Policy
from services.scheduler.state.state import Limits
from shared.messages import Ints, ints

MINUTES = 2
OVERLOAD_S = 60
SHARES_PM = (760, 780, 800, 820, 840, 860)  # of the requests, for the fast executor


def shared_prefixes(seed: int, rate: float, prefixes: int = 40, tokens: int = 3_000) -> Iterator[SimRequest]:
    """Questions of 50 to 400 tokens after one of the system prompts, which follow Zipf's law."""
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, prefixes + 1)]
    for number, at_us in enumerate(_arrivals(rng, rate)):
        prefix = rng.choices(range(prefixes), weights)[0]
        prompt = _prompt((1_000 + prefix, tokens), (100_000 * seed + number, rng.randrange(50, 400)))
        yield _asked(f"p{number}", at_us, prompt, rng.randrange(50, 300))


def conversations(seed: int, chats: int, turns: int = 8, system: int = 0) -> Iterator[SimRequest]:
    """Chats that start at random times in the first half; each turn repeats all turns before it, and follows
    10 to 25 s after the last. An answer stands for its tokens in the next prompt. `system`: tokens of a
    prompt that all of them begin with."""
    rng = random.Random(seed)
    for chat in range(chats):
        at_us, parts = rng.randrange(MINUTES * 30 * SECOND_US), [(1, system)] if system else []
        for turn in range(turns):
            parts.append((10**7 + 1_000 * chat + turn, rng.randrange(100, 900)))
            yield _asked(f"c{chat}.{turn}", at_us, _prompt(*parts), rng.randrange(50, 300))
            at_us += rng.randrange(10 * SECOND_US, 25 * SECOND_US)


def documents(seed: int, rate: float) -> Iterator[SimRequest]:
    """Prompts of 4,000 to 12,000 tokens that share nothing, with short answers."""
    rng = random.Random(seed)
    for number, at_us in enumerate(_arrivals(rng, rate)):
        prompt = _prompt((10**8 + number, rng.randrange(4_000, 12_000)))
        yield _asked(f"d{number}", at_us, prompt, rng.randrange(20, 100))


def one_hot(seed: int) -> Iterator[SimRequest]:
    """All requests share one prefix."""
    yield from shared_prefixes(seed, 24.0, prefixes=1, tokens=6_000)


def mixed(seed: int) -> Iterator[SimRequest]:
    """All three at once."""
    yield from shared_prefixes(seed, 12.0)
    yield from conversations(seed + 1, 150)
    yield from documents(seed + 2, 7.0)


def workload(*parts: Iterator[SimRequest]) -> Workload:
    """The requests in order of arrival."""
    return Workload(tuple(sorted((r for part in parts for r in part), key=lambda asked: asked.arrival_us)))


def balance(world: World) -> Figures:
    """The busiest executor's time in steps, as a multiple of the mean."""
    busy = [engine.totals.busy_us for engine in world.engines.values()]
    return {"busiest_to_mean": round(max(busy) * len(busy) / max(sum(busy), 1), 3)}


def overload(seed: int, seconds: int = OVERLOAD_S) -> Workload:
    """A tenth more documents for some seconds than an H200 and one four times slower can do."""
    found = documents(seed, 6.7)
    return Workload(tuple(takewhile(lambda asked: asked.arrival_us < seconds * SECOND_US, found)))


def of_ideal(world: World) -> Figures:
    """The makespan as a multiple of the ideal one of an `overload` for these two executors."""
    records, setup = world.readers.records, world.setup
    seconds = 1 + max(record.asked.arrival_us for record in records) // SECOND_US
    ideal_us = _ideal_us(*setup.machines, replace(setup.limits, policy=Policy()), setup.seed, seconds)
    return {"ideal_s": round(ideal_us / 1e6, 3), "of_ideal": round(_makespan_us(world) / ideal_us, 3)}


@cache
def _ideal_us(fast: Machine, slow: Machine, limits: Limits, seed: int, seconds: int) -> int:
    """The makespan of the best split: each executor alone has its share, evenly in time."""
    requests = overload(seed, seconds).requests
    found = []
    for pm in SHARES_PM:
        to_fast = [(at + 1) * pm // 1_000 > at * pm // 1_000 for at in range(len(requests))]
        parts = [
            tuple(r for r, f in zip(requests, to_fast, strict=True) if f is one) for one in (True, False)
        ]
        worlds = [
            World(Setup((m,), limits, seed), Workload(p)) for m, p in zip((fast, slow), parts, strict=True)
        ]
        for world in worlds:
            world.run()
        found.append(max(_makespan_us(world) for world in worlds))
    return min(found)


def _makespan_us(world: World) -> int:
    return max(record.ended_us for record in world.readers.records) - FIRST_US


def _arrivals(rng: random.Random, rate: float) -> Iterator[int]:
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < MINUTES * 60:
        yield int(at_s * SECOND_US)


def _prompt(*parts: tuple[int, int]) -> Callable[[], Ints]:
    """Parts of (number, tokens): parts of the same number are the same."""

    def make() -> Ints:
        prompt = ints([TEXT_ID]) * sum(tokens for _, tokens in parts)
        starts = accumulate((tokens for _, tokens in parts[:-1]), initial=0)
        for start, (number, _) in zip(starts, parts, strict=True):
            prompt[start] = number
        return prompt

    return make


def _asked(name: str, at_us: int, prompt: Callable[[], Ints], output: int) -> SimRequest:
    return SimRequest(name, at_us, prompt, output, 512)
