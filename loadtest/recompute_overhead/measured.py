"""The protocol with real processes and the default model: shorter requests, and fewer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.fleet import MODEL
from loadtest.real.served import ANSWER_S, Body, Served, env_of, real_env, served
from loadtest.recompute_overhead.protocol import SEED, Arm, Lengths, Outcome, Point
from shared.client.client import request_all
from shared.nats import subjects

BLOCK_TOKENS = 8  # so that a pool of a tenth still has some
KV_TOKEN_BYTES = 46_080  # 30 layers, keys and values, 3 heads of 64, float32
PAGE_BYTES = 1 << 20
PATIENT = "standard=0/10000/0"  # all come at once: nobody is refused for that, and nobody ages
PATIENCE_S = 3_600  # of a request: the last one waits for all others
WARM, WARM_TOKENS = 64, 9  # before: then the scheduler knows that no prompt comes back, and what steps take
NOISE = 1.02  # all come at once, so the last latency is the makespan: two runs of one arm differ by so much


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    lengths: Lengths
    slots: int
    threads: int


def size_of(requests: int, threads: int) -> Size:
    """Short requests, 64 at once: 300 of them in a minute or so on two cores."""
    return Size(Lengths(requests, prompt=(24, 72), answer=(12, 52)), slots=64, threads=threads)


def settings_of(size: Size, point: Point, arm: Arm) -> dict[str, str]:
    """Those of the fleet of a run, as its environment."""
    l1_bytes = point.l1_blocks * BLOCK_TOKENS * KV_TOKEN_BYTES
    return real_env(size.threads) | env_of(
        kv_blocks=point.pool_blocks, block_tokens=BLOCK_TOKENS, slots=size.slots, policy=arm.policy,
        max_context=point.pool_blocks * BLOCK_TOKENS, slo=PATIENT, request_timeout_s=PATIENCE_S,
        l1=max(1, round(l1_bytes / PAGE_BYTES)) if arm.tiers else "off",
    )  # fmt: skip


async def latencies_of(
    fleet: Served, lengths: list[tuple[int, int]], now_s: Callable[[], float] = time.perf_counter
) -> list[float]:
    """All requests at once; how long each took, in seconds of the clock given, the least first."""
    return sorted(await asyncio.gather(*(_one(fleet, body, now_s) for body in bodies(lengths))))


async def outcome(size: Size, lengths: list[tuple[int, int]], point: Point, arm: Arm) -> Outcome:
    """One run on a fleet of its own."""
    async with served(settings_of(size, point, arm)) as fleet:
        await fleet.all(warming())
        before = await _counted(fleet)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        latencies = await latencies_of(fleet, lengths)
        took_s = loop.time() - began_s
        after = await _counted(fleet)
        tiers = (await fleet.measured())["tiers"]
    moved = {name: after[name] - before[name] for name in after}
    return Outcome(
        useful_tokens=sum(prompt + answer for prompt, answer in lengths),
        recomputed_tokens=int(moved["recomputed"]),
        preemptions=int(moved["preemptions"]),
        moved_bytes=int(moved["moved_bytes"]),
        tok_s=sum(answer for _, answer in lengths) / took_s,
        latency_s=(rank(latencies, 50), rank(latencies, 99)),
        makespan_s=took_s,
        device_s=moved["device_us"] / 1e6,
        counted=tiers,
    )


def warming() -> list[Body]:
    """What comes before the protocol."""
    return bodies([(WARM_TOKENS, 2)] * WARM, "warm", SEED - 1)


def bodies(lengths: list[tuple[int, int]], name: str = "overhead", seed: int = SEED) -> list[Body]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [
        {
            "model": MODEL,
            "prompt": [rng.randrange(300, 40_000) for _ in range(prompt)],
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
            "request_id": f"{name}-{number}",
        }
        for number, (prompt, answer) in enumerate(lengths)
    ]


async def _one(fleet: Served, body: Body, now_s: Callable[[], float]) -> float:
    """Seconds from sending to the end of the answer."""
    sent_s = now_s()
    await fleet.client.complete(body, timeout_s=PATIENCE_S)
    return now_s() - sent_s


async def _counted(fleet: Served) -> dict[str, float]:
    """What scheduler and executor have counted so far."""
    answers = await request_all(fleet.bus, subjects.STATUS, ANSWER_S)
    by_kind: Mapping[str, dict[str, Any]] = {answer["kind"]: answer for answer in answers}
    scheduler, executor = by_kind["scheduler"], by_kind["executor"]
    tokens = scheduler["measured"]["tokens"]
    return {
        "recomputed": tokens["recomputed"],
        "preemptions": tokens["preemptions"],
        "moved_bytes": executor.get("stored_bytes", 0) + executor.get("loaded_bytes", 0),
        "device_us": executor["device_busy_us"],
    }


def rank(ordered: list[float], percent: int) -> float:
    """The percentile of sorted numbers."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1]
