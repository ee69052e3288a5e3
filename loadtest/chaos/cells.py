"""One cell of the chaos matrix: a fleet, 24 clients, a fault under load, and the count of its violations.

A fleet has two tokenizers and two detokenizers of each model, and one of every other service, or as many
schedulers and executors of each model as its `Shape` has.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from loadtest import faults
from loadtest.clients import Ask, Clients, Ended, mixed, oracle_key
from loadtest.fleet import MODEL, connected, running_up
from loadtest.leaks import settle
from shared.config import load
from shared.processes import bind
from shared.vocab.files import resolve

KINDS = ("gateway", "tokenizer", "scheduler", "executor", "kv_offload", "detokenizer")
BROKER = "nats-server"
VICTIMS = tuple((kind,) for kind in (*KINDS, BROKER))
PAIRS = (("scheduler", "detokenizer"), ("tokenizer", "scheduler"), (BROKER, "detokenizer"))
FAULTS = {"kill": 0.0, "stop10": 10.0, "stop40": 40.0}  # seconds

HTTP_CLIENTS, NATS_CLIENTS = 12, 12
REQUESTS = 600
KINDS_OF_REQUEST = 150  # distinct; each one's answer is known from an undisturbed fleet
AFTER_S = 10.0  # requests go on for so long after a stop, at least
LIMIT_S = 90.0
SETTLE_S = 120.0  # of an executor that loads a model beside much else
SOON_S = 5.0  # a 503 comes by then; what a broker took along ends so long after its return
REFUSALS = (503, 429, 408)
MOST_REFUSED = 0.05  # of the requests

Answers = Mapping[str, tuple[dict[int, str], int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many of what. `models`: names, GGUF files or folders."""

    models: tuple[str, ...] = (MODEL,)
    schedulers: int = 1
    executors: int = 1

    @property
    def names(self) -> list[str]:
        """Under which its models are served."""
        return [resolve(model, load().settings.cache_dir).name for model in self.models]

    @property
    def of_each(self) -> dict[str, int]:
        """Processes of each kind that serves one model."""
        return {"tokenizer": 2, "scheduler": self.schedulers, "executor": self.executors, "detokenizer": 2}

    @property
    def counts(self) -> dict[str, int]:
        """Processes of each kind."""
        several = {kind: count * len(self.models) for kind, count in self.of_each.items()}
        return {"gateway": 1, "kv_offload": 1, **several}

    @property
    def flags(self) -> list[str]:
        """Of `headrace up`."""
        counts = [f"--{kind}s={count}" for kind, count in self.of_each.items()]
        return [*counts, *(f"--model={model}" for model in self.models)]


@dataclass(frozen=True, slots=True)
class Target:
    """A running `headrace up`."""

    pid: int
    nats_url: str
    http_url: str
    limit_s: float  # of its clients' patience
    shape: Shape = Shape()


@contextmanager
def target(
    up: Sequence[str] = ("--backend", "sim"),
    log: str = "/dev/null",
    limit_s: float = LIMIT_S,
    shape: Shape = Shape(),
    env: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    """A fleet of this shape, for the length of a block; `env` is added to its environment."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with running_up([f"--http=127.0.0.1:{port}", *shape.flags, *up], env, log) as (pid, url):
        yield Target(pid, url, f"http://127.0.0.1:{port}", limit_s, shape)


@dataclass(frozen=True, slots=True)
class Cell:
    """The kinds that a fault meets, one process of each, and the fault."""

    victims: tuple[str, ...]
    fault: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.fault} {'+'.join(self.victims)}"


@dataclass(slots=True)
class Span:
    """When the broker was away, seconds of `time.monotonic`."""

    down_s: float = float("inf")
    back_s: float = float("inf")


# The fields of Counts that add up.
COUNTED = (
    "requests", "right", "wrong", "doubled", "lost", "silent", "refused", "late", "odd", "reset", "broker",
)  # fmt: skip


@dataclass(slots=True)
class Counts:
    """What became of a cell's requests. `reset` and `broker` are those that a fault ends by its nature."""

    cell: str
    requests: int = 0
    right: int = 0
    wrong: int = 0
    doubled: int = 0
    lost: int = 0  # accepted, and ended without their answer
    silent: int = 0
    refused: int = 0
    late: int = 0  # refusals that took longer than SOON_S
    odd: int = 0  # other errors
    reset: int = 0  # connections of a gateway that is gone
    broker: int = 0  # what was under way while the broker was down, and ended soon after
    longest_s: float = 0.0
    held: str = ""  # what was not free at the end
    messages: dict[str, int] = field(default_factory=dict)

    @property
    def refused_pct(self) -> float:
        """Of all requests."""
        return round(100 * self.refused / max(self.requests, 1), 1)

    @property
    def flaws(self) -> list[str]:
        """What must not be."""
        names = ("wrong", "doubled", "lost", "silent", "late", "odd")
        found = [f"{name} {count}" for name in names if (count := getattr(self, name))]
        if self.refused > MOST_REFUSED * self.requests:
            found.append(f"refused {self.refused_pct} %")
        return [*found, self.held] if self.held else found

    def row(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "refused_pct": self.refused_pct, "flaws": self.flaws}


def known(requests: int, models: Sequence[str] = (MODEL,)) -> list[Ask]:
    """`requests` requests of a cell, to the models in turn; greedy: a real engine repeats its answer."""
    asks = mixed(random.Random(1), min(requests, KINDS_OF_REQUEST), MODEL, temperature=0)
    for ask, model in zip(asks, itertools.cycle(models), strict=False):
        ask.body["model"] = model
    return asks


async def answers(fleet: Target, requests: int = REQUESTS) -> Answers:
    """What each known request answers in a fleet without a fault, over NATS. Raises AssertionError."""
    clients = Clients(fleet.nats_url, fleet.http_url, fleet.limit_s)
    asks = known(requests, fleet.shape.names)
    await settled(fleet)
    await clients.run(asks, 0, NATS_CLIENTS)
    ends = Counter(ended.outcome.end for ended in clients.ended)
    assert ends == {"answer": len(asks)}, ends
    return {oracle_key(each.outcome.ask): each.outcome.answer for each in clients.ended}


async def run(cell: Cell, fleet: Target, right: Answers, requests: int = REQUESTS) -> Counts:
    """Do it to a fleet that nothing has happened to yet, and count."""
    fault_s, rng = FAULTS[cell.fault], random.Random(cell.name)
    clients, middle = Clients(fleet.nats_url, fleet.http_url, fleet.limit_s), asyncio.Event()
    begin = min(requests // 4, 2 * (HTTP_CLIENTS + NATS_CLIENTS))
    clients.on_end = lambda _: middle.set() if len(clients.ended) >= begin else None
    await settled(fleet)
    asks = rng.choices(known(requests, fleet.shape.names), k=requests)
    running = asyncio.create_task(clients.run(asks, HTTP_CLIENTS, NATS_CLIENTS))
    await middle.wait()
    if fault_s:
        clients.pace(fault_s + AFTER_S, requests)
    away = await _do(cell, fleet, fault_s, rng)
    await running
    counts = judged(cell, clients, right, away)
    try:
        await settled(fleet)
    except AssertionError as error:
        counts.held = str(error)
    return counts


async def _do(cell: Cell, fleet: Target, fault_s: float, rng: random.Random) -> Span:
    """Kill or stop one process of each kind, all at once."""
    pids = [rng.choice(faults.pids_of(fleet.pid, victim)) for victim in cell.victims]
    span = Span()
    if BROKER in cell.victims:
        span.down_s = time.monotonic()
    if cell.fault == "kill":
        for pid in pids:
            faults.kill(pid)
    async with asyncio.TaskGroup() as group:
        for pid in pids if fault_s else ():
            group.create_task(faults.stop(pid, fault_s))
        if BROKER in cell.victims:
            group.create_task(_returned(fleet, span))
    return span


async def _returned(fleet: Target, span: Span) -> None:
    """Note when the broker answers again."""
    async with connected(fleet.nats_url, SETTLE_S):
        span.back_s = time.monotonic()


def judged(cell: Cell, clients: Clients, right: Answers, away: Span) -> Counts:
    """Count what became of the requests."""
    counts = Counts(cell.name, len(clients.ended))
    if BROKER not in cell.victims:  # after its return answers come again, for readers it may have cut off
        counts.doubled = clients.repeated
    for each in clients.ended:
        verdict = verdict_of(each, right, away, gateway_fell="gateway" in cell.victims)
        setattr(counts, verdict, getattr(counts, verdict) + 1)
        outcome = each.outcome
        counts.longest_s = max(counts.longest_s, round(outcome.seconds, 1))
        counts.late += verdict == "refused" and outcome.seconds > SOON_S
        if verdict != "right":
            cause = re.sub(r"\b[0-9a-f]{8,}\b|\d+", "…", outcome.message)[:160]
            key = f"{verdict} over {each.over}: {outcome.code or outcome.end} {cause}"
            counts.messages[key] = counts.messages.get(key, 0) + 1
    return counts


def verdict_of(each: Ended, right: Answers, away: Span, *, gateway_fell: bool) -> str:
    """The field of Counts that a request counts in."""
    outcome = each.outcome
    if outcome.end == "answer":
        texts, _ = wanted = right[oracle_key(outcome.ask)]
        if outcome.answer == wanted:
            return "right"
        longer = any(len(text) > len(texts.get(i, "")) for i, text in outcome.texts.items())
        return "doubled" if longer else "wrong"
    if gateway_fell and each.over == "http" and outcome.end == "reset":
        return "reset"
    under_way = each.began_s <= away.back_s and each.ended_s >= away.down_s
    if under_way and not outcome.accepted and each.ended_s <= away.back_s + SOON_S:
        return "broker"
    if outcome.accepted:
        return "lost"
    if outcome.end == "silence":
        return "silent"
    if outcome.end == "reset":
        return "odd"
    return "refused" if outcome.code in REFUSALS else "odd"


async def settled(fleet: Target) -> None:
    """Return when every service is there and nothing is held. Raises AssertionError."""
    async with connected(fleet.nats_url, SETTLE_S) as client:
        await settle(client.bus, fleet.shape.counts, SETTLE_S)
        for model in fleet.shape.names:
            await client.complete({**known(1, [model])[0].body, "stream": False}, timeout_s=fleet.limit_s)


def resume(fleet: Target) -> None:
    """Wake every process that still sleeps, so that the fleet can end."""
    for pid in faults.children(fleet.pid):
        faults.send(pid, signal.SIGCONT)
