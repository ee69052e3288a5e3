"""Two executors of one fleet: throughput, routing, prefill and decode apart, a move of a long sequence."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest import faults
from loadtest.bench.arrivals import arrivals_us
from loadtest.fleet import Fleet
from loadtest.gpu.readers import Answer, bodies, body_of, read, some_tokens
from loadtest.two_gpus.fleets import up
from loadtest.two_gpus.load import Chats, Due, Load
from loadtest.two_gpus.record import Record
from loadtest.two_gpus.served import closed

FLAGS = ("--dtype", "bf16", "--max-context", "40960", "--slots", "256", "--kv-blocks", "20480")
NEEDS_S = {"throughput": 0, "routing": 45, "apart": 45, "move": 30, "more_ways": 60}
ROUNDS = 4
GPUS, L1_MIB, ONE_L1_MIB = "0,1", 10_240, 2_048
SETTLED_S = 40.0  # an executor that has ended is there again
CHATS = Chats(count=96, turns=5, shared=1024, first=(1500, 3500), added=256, answer=128, think_s=0.5,
              spread_s=8.0)  # fmt: skip
DOCUMENT, DOCUMENTS_S = 6_000, 1.5  # beside the chats, of which nothing is cached
ARMS = ("ttft", "loadtest.policies:prefix")

CHAT_RATE, CHAT_PROMPT, CHAT_ANSWER = 16.0, (50, 400), (200, 600)
LONG = ((8_000, 1.0), (32_000, 0.2))  # tokens, a second
WINDOW_S, SETTLE_S, ROLE_S = 18.0, 3.0, 20.0
LONG_ANSWER = 32
PREFILL_1 = "loadtest.policies:prefill_1"

MOVED, MOVED_ANSWER, MOVE_AFTER_S = 32_000, 1_200, 0.5
KILLED_ROWS, KILLED_ANSWER = 64, 400


async def throughput(one: Fleet, two: Fleet, load: Load, record: Record) -> None:
    """Closed loops of one executor and of two."""
    cells = {"one_64": (one, 64), "two_128": (two, 128), "one_128": (one, 128)}
    for fleet in (one, two):
        await closed(fleet, load, f"warm-{fleet.executors}", 128, 1)
    for number in range(ROUNDS):
        for name, (fleet, in_flight) in cells.items():
            record.add(f"{name}_{number}", await closed(fleet, load, f"{name}-{number}", in_flight))
    rates = {
        name: statistics.mean(record.found[f"{name}_{number}"]["tok_s"] for number in range(ROUNDS))
        for name in cells
    }
    record.add("two_to_one", {
        **rates, "to_one_64": rates["two_128"] / rates["one_64"],
        "to_one_128": rates["two_128"] / rates["one_128"],
    })  # fmt: skip


async def routing(fleet: Fleet, load: Load, record: Record) -> None:
    """Chats that come back, with long prompts beside them, by two ways to choose an executor."""
    chats = CHATS
    for number, arm in itertools.product(range(ROUNDS), ARMS):
        await fleet.policy(f"routing={arm}")
        name, before = f"routing-{arm.rpartition(':')[2]}-{number}", await fleet.scheduler()
        rng = random.Random(name)
        spans = chats.spread_s + chats.turns * 1.6
        others = [
            (at_s, body_of(f"{name}-long-{i}", some_tokens(rng, DOCUMENT), 16, slo_class="standard"))
            for i, at_s in enumerate(_times(name, DOCUMENTS_S, spans))
        ]
        beside = asyncio.create_task(load_documents(fleet, others))
        answers = await load.chat(fleet.url, name, chats)
        documents = await beside
        after = await fleet.scheduler()
        later = [answer for answer in answers if answer.turn]
        record.add(name.replace("-", "_"), {
            "later_turns": _first(later), "first_turns": _first([a for a in answers if not a.turn]),
            "documents": _first(documents), "errors": sum(bool(a.error) for a in (*answers, *documents)),
            "said": _errors((*answers, *documents)),
            **_counted(before, after, "prefix_hits", "prefilled"),
            "restored": after["measured"]["tiers"]["restored_tokens"]
                        - before["measured"]["tiers"]["restored_tokens"],
            "chat_seconds": max(a.ended_s for a in answers) - min(a.sent_s for a in answers),
            "prompt_tokens_later": sum(a.prompt_tokens for a in later),
        })  # fmt: skip
    await fleet.policy("routing=ttft")


async def load_documents(fleet: Fleet, asked: Sequence[Due]) -> list[Answer]:
    """Long prompts, sent from this process: few frames come back."""
    begins_s = time.monotonic()

    async def one(due_s: float, body: dict[str, Any]) -> Answer:
        await asyncio.sleep(max(0.0, begins_s + due_s - time.monotonic()))
        return await read(fleet.client, body)

    return list(await asyncio.gather(*(one(*each) for each in asked)))


WAYS = {  # name: roles, whether long prompts come
    "together_alone": ("colocated", False), "together": ("colocated", True), "apart": (PREFILL_1, True),
}  # fmt: skip
MORE_WAYS = {"apart_alone": (PREFILL_1, False), "adaptive": ("adaptive", True)}


async def apart(fleet: Fleet, load: Load, record: Record, ways: Mapping[str, tuple[str, bool]]) -> None:
    """Chats alone and beside long prompts: both executors do both, one of them only prefills, by the rule."""
    for name, (roles, has_documents) in ways.items():
        if not record.has(WINDOW_S + 14 + 12 * (roles != "colocated"), name):
            break
        await fleet.policy(f"roles={roles}")
        if roles == "colocated":
            await _beside(fleet, load, f"{name}-warm", 3.0, has_documents)
        else:
            await _roles_taken(fleet, load, name, has_documents)
        before = await fleet.scheduler()
        found = await _beside(fleet, load, name, WINDOW_S, has_documents)
        after = await fleet.scheduler()
        found["roles"] = sorted(each["role"] for each in after["executors"].values())
        found |= _counted(before, after, "moves", "recomputed")
        record.add(f"roles_{name}", found)
    await fleet.policy("roles=colocated")
    rows = {name: record.found.get(f"roles_{name}") for name in ("together_alone", "together", "apart")}
    if all(rows.values()):
        alone, together, split = (rows[name] or {} for name in rows)
        record.add("apart_to_alone", {
            "itl_p99": split["itl_p99_ms"] / alone["itl_p99_ms"],
            "together_itl_p99": together["itl_p99_ms"] / alone["itl_p99_ms"],
            "tokens_s_to_together": split["tokens_s"] / together["tokens_s"],
        })  # fmt: skip


async def _roles_taken(fleet: Fleet, load: Load, name: str, has_documents: bool) -> None:
    """Return once one executor only prefills, or after ROLE_S; load goes on, by which the rule chooses."""
    until_s, number = time.monotonic() + ROLE_S, 0
    while time.monotonic() < until_s:
        await _beside(fleet, load, f"{name}-{number}-warm", 4.0, has_documents)
        executors = (await fleet.scheduler())["executors"].values()
        if any(each["role"] == "prefill" for each in executors):
            return
        number += 1


async def _beside(fleet: Fleet, load: Load, name: str, seconds: float, has_documents: bool) -> dict[str, Any]:
    """Chats at a fixed rate, and long prompts beside them: what the readers of both feel."""
    rng, fresh = random.Random(f"apart {seconds}"), random.Random(name)
    chats = [
        (at_s, body_of(f"{name}-{i}", some_tokens(fresh, rng.randrange(*CHAT_PROMPT)),
                       rng.randrange(*CHAT_ANSWER), slo_class="interactive"))
        for i, at_s in enumerate(_times(f"apart {seconds}", CHAT_RATE, seconds))
    ]  # fmt: skip
    documents = [
        (at_s, body_of(f"{name}-{length}-{i}", some_tokens(fresh, length), LONG_ANSWER, slo_class="standard"))
        for length, rate in LONG if has_documents
        for i, at_s in enumerate((at + 0.5) / rate for at in range(int(seconds * rate)))
    ]  # fmt: skip
    beside = asyncio.create_task(load_documents(fleet, documents))
    answers = await load.run(fleet.url, chats)
    long = await beside
    began_s = min(answer.sent_s for answer in answers)
    span = (began_s + min(SETTLE_S, seconds / 3), began_s + seconds)
    gaps = sorted(
        1e3 * (b - a)
        for answer in answers
        for a, b in itertools.pairwise(answer.parts_s)
        if span[0] < b < span[1]
    )
    whole = [answer for answer in (*answers, *long) if not answer.error]
    tokens = sum(answer.tokens + answer.prompt_tokens for answer in whole)
    took_s = max(answer.ended_s for answer in whole) - began_s
    in_window = sum(
        count for answer in answers for at_s, count in zip(answer.parts_s, answer.counts, strict=True)
        if span[0] < at_s < span[1]
    )  # fmt: skip
    cuts = statistics.quantiles(gaps, n=100)
    return {
        "itl_p50_ms": cuts[49], "itl_p90_ms": cuts[89], "itl_p99_ms": cuts[98], "itl_max_ms": gaps[-1],
        "chats": len(answers), **{f"chat_{k}": v for k, v in _first(answers).items()},
        **({f"document_{k}": v for k, v in _first(long).items()} if long else {}),
        "documents": len(long), "tokens_s": tokens / took_s, "took_s": took_s,
        "chat_tokens_s_in_window": in_window / (span[1] - span[0]),
        "errors": len(answers) + len(long) - len(whole), "said": _errors((*answers, *long)),
    }  # fmt: skip


async def move(fleet: Fleet, record: Record) -> None:
    """A long sequence whose executor gets SIGTERM: it goes on at the other one."""
    prompt = some_tokens(random.Random("move"), MOVED)
    for i in range(4):  # both executors know their steps and their links
        warm = [some_tokens(random.Random(f"{i} {j}"), 2_000) for j in range(2)]
        bodies_of = [body_of(f"move-warm-{i}-{j}", each, 32) for j, each in enumerate(warm)]
        await load_documents(fleet, [(0.0, body) for body in bodies_of])
    (calm,) = await load_documents(fleet, [(0.0, body_of("move-calm", prompt, MOVED_ANSWER))])
    before = await fleet.scheduler()
    reading = asyncio.create_task(load_documents(fleet, [(0.0, body_of("move-moved", prompt, MOVED_ANSWER))]))
    await asyncio.sleep(MOVE_AFTER_S)  # its prompt is cached: it decodes by then
    pid = await fleet.busiest_executor()
    signalled_s = time.monotonic()
    faults.send(pid, signal.SIGTERM)
    (moved,) = await reading
    after = await fleet.scheduler()
    after_s = [at_s - signalled_s for at_s in moved.parts_s]
    gaps = sorted((1e3 * (b - a), a) for a, b in itertools.pairwise(after_s) if b > 0)
    record.add("move", {
        "context": MOVED, "answer": moved.tokens, "same_ids": moved.text == calm.text,
        "error": moved.error, "starts": moved.starts,
        "first_difference": _differs(calm.text, moved.text),
        "longest_ms_at_s": [(round(gap, 1), round(at, 2)) for gap, at in gaps[:-4:-1]],
        "calm_gap_ms": 1e3 * calm.longest_gap_s, "calm_ttft_s": calm.parts_s[0] - calm.sent_s,
        "calm_itl_ms": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(calm.parts_s)),
        **_counted(before, after, "moves", "recomputed"),
        "restored": after["measured"]["tiers"]["restored_tokens"]
                    - before["measured"]["tiers"]["restored_tokens"],
        "links": {k: [facts["down_bytes_per_s"], facts["up_bytes_per_s"]]
                  for k, facts in after["tiers"].items()},
    })  # fmt: skip


async def killed(fleet: Fleet, load: Load, record: Record) -> None:
    """SIGKILL for one executor while both answer; each answer against the same request undisturbed."""

    def asked(name: str) -> list[Due]:
        rng = random.Random("killed")
        return [
            (0.0, body_of(f"{name}-{i}", some_tokens(rng, rng.randrange(100, 1_500)), KILLED_ANSWER))
            for i in range(KILLED_ROWS)
        ]

    calm = await load.run(fleet.url, asked("calm"))
    again = await load.run(fleet.url, asked("again"))
    took_s = max(a.ended_s for a in again) - min(a.sent_s for a in again)
    running = asyncio.create_task(load.run(fleet.url, asked("killed")))
    await asyncio.sleep(0.7 + took_s * 0.4)
    pid, came = fleet.executor_pids()[0], time.monotonic()
    faults.kill(pid)
    answers = await running
    texts = {answer.name.rpartition("-")[2]: answer.text for answer in calm}

    def equal(found: Sequence[Answer]) -> int:
        return sum(a.text == texts[a.name.rpartition("-")[2]] and not a.error for a in found)

    gaps = sorted(answer.longest_gap_s for answer in answers)
    record.add("killed", {
        "streams": KILLED_ROWS, "lost": sum(bool(a.error) for a in answers), "same": equal(answers),
        "undisturbed_same": equal(again), "tokens": sum(a.tokens for a in calm),
        "open_at_kill": sum(a.ended_s > came for a in answers), "took_s": took_s,
        "paused": sum(gap > 0.5 for gap in gaps), "pause_most_s": gaps[-1],
        "pause_p50_s": statistics.median([gap for gap in gaps if gap > 0.5] or [0.0]),
        "calm_pause_most_s": max(a.longest_gap_s for a in again),
        "errors": [a.error for a in answers if a.error][:4],
    })  # fmt: skip


async def two(
    folder: str, record: Record, device: str = "cuda", logs: str = "", parts: Sequence[str] = ()
) -> None:
    """Everything of two executors but what needs answers that do not depend on their batch."""
    load = Load()
    async with up(
        folder, *FLAGS, device=device, executors=2, l1_mib=L1_MIB, gpus=GPUS, logs=logs
    ) as fleet:  # fmt: skip
        await load.warm()
        for part in parts or NEEDS_S:
            if part != "throughput" and not record.has(NEEDS_S[part], part):
                continue
            await record.tried("settled", fleet.settled(SETTLED_S))
            if part == "throughput":
                async with up(folder, *FLAGS, device=device, gpus="0", l1_mib=ONE_L1_MIB, logs=logs) as one:
                    await record.tried(part, throughput(one, fleet, load, record))
            elif part == "routing":
                await record.tried(part, routing(fleet, load, record))
            elif part == "move":
                await record.tried(part, move(fleet, record))
            else:
                ways = WAYS if part == "apart" else MORE_WAYS
                await record.tried(part, apart(fleet, load, record, ways))


async def exact(folder: str, record: Record, device: str = "cuda", logs: str = "") -> None:
    """A death and a move of an executor, with answers that do not depend on their batch."""
    load, flags = Load(), (*FLAGS, "--deterministic")
    async with up(
        folder, *flags, device=device, executors=2, l1_mib=L1_MIB, gpus=GPUS, logs=logs
    ) as fleet:  # fmt: skip
        await load.warm()
        await load.run(fleet.url, [(0.0, body) for body in bodies("warm", 32, 32)])
        await record.tried("killed", killed(fleet, load, record))
        if record.has(45, "move"):
            await record.tried("settled", fleet.settled(SETTLED_S))
            await record.tried("move", move(fleet, record))


def _counted(before: Mapping[str, Any], after: Mapping[str, Any], *names: str) -> dict[str, int]:
    """By how much counters of tokens have grown."""
    return {name: after["measured"]["tokens"][name] - before["measured"]["tokens"][name] for name in names}


def _errors(answers: Sequence[Answer]) -> list[str]:
    """The first different errors."""
    return sorted({answer.error for answer in answers if answer.error})[:3]


def _times(name: str, rate: float, seconds: float) -> list[float]:
    """Poisson arrivals, as many as the rate has in this time; the same ones for the same name."""
    return [us / 1e6 for us in arrivals_us(int(rate * seconds), rate, 1.0, name)]


def _first(answers: Sequence[Answer]) -> dict[str, float]:
    """Quantiles of the time to the first token, ms."""
    first = sorted(1e3 * (a.parts_s[0] - a.sent_s) for a in answers if a.parts_s)
    if len(first) < 2:
        return {}
    cuts = statistics.quantiles(first, n=100, method="inclusive")
    return {
        "count": len(first), "ttft_p50_ms": cuts[49], "ttft_p99_ms": cuts[98],
        "ttft_mean_ms": statistics.mean(first),
    }  # fmt: skip


def _differs(one: str, other: str) -> int | None:
    """The first character that differs; None if the texts are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return None if one == other else at
