"""Chats that come back, more than the device holds: does their KV come from pinned memory in time?

All conversations take one turn, so many at a time, before any takes its next. A turn's prompt is all before
it, 64 random tokens in place of the last answer, and 256 new ones. The real answer is not in the next prompt,
so its KV is computed again; that costs this engine more than an engine that gets it in the prompt.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

from loadtest.gpu.readers import (
    Read,
    bodies,
    body_of,
    executor_status,
    figures,
    judging,
    read,
    read_all,
    some_tokens,
)
from loadtest.gpu.turn_steps import turn_steps
from loadtest.real.served import Body, Served
from loadtest.real.steady import steps_of

CONVERSATIONS, IN_FLIGHT, TURNS = 96, 32, 5
SHARED, OWN, ADDED, ANSWER = 1024, 2048, 256, 64
DECODES, DECODE_TOKENS, SETTLED = 16, 512, 64
SHORT = 64  # tokens of a chunk that computes no more than what no block of a tier had


async def multi_turn(fleet: Served) -> tuple[dict[str, Any], list[list[int]]]:
    """Wall time of each turn, how long loads took from turn 1 on, how long the device stood idle between the
    steps of those turns, whatever it waited for, and what share of the loads that leaves hidden; and the
    prompts of the last turn."""
    await pinned(fleet)
    await fleet.all(bodies("warm-up", 8, 16))
    rng = random.Random("multi-turn")
    shared = some_tokens(rng, SHARED)
    prompts = [shared + some_tokens(rng, OWN) for _ in range(CONVERSATIONS)]
    loop, turns, worked = asyncio.get_running_loop(), list[dict[str, Any]](), list[dict[str, Any]]()
    before, asked = dict[str, Any](), list[Body]()
    judged = [await judging(fleet)]
    for turn in range(TURNS):
        for prompt in prompts:
            prompt += some_tokens(rng, ADDED)
        asked = [body_of(f"turn-{turn}-{i}", list(prompt), ANSWER) for i, prompt in enumerate(prompts)]
        if turn == 1:
            before = await executor_status(fleet)
        began_s = loop.time()
        reads = await read_all(fleet, asked, IN_FLIGHT)
        turns.append({"turn": turn, **figures(reads, loop.time() - began_s, ANSWER)})
        if turn:
            worked.append(await turn_steps(fleet, [str(body["request_id"]) for body in asked]))
        judged.append(await judging(fleet))
        for prompt in prompts:
            prompt += some_tokens(rng, ANSWER)
    after = await executor_status(fleet)
    loads_s, idle_s = (after["loaded_us"] - before["loaded_us"]) / 1e6, sum(w["idle_s"] for w in worked)
    found = {
        "seconds": sum(turn["seconds"] for turn in turns), "turns": turns,
        "loads_s": loads_s, "idle_s": idle_s, "hidden": 1 - idle_s / max(loads_s, 1e-6),
        "loaded_gb": (after["loaded_bytes"] - before["loaded_bytes"]) / 1e9,
        "scheduler": await fleet.measured(), "executor": after, "judged_by": judged,
        "steps_of_turns": worked,
    }  # fmt: skip
    return found, [list(one["prompt"]) for one in asked]


async def restores(fleet: Served, prompts: list[list[int]]) -> dict[str, Any]:
    """The same chats come back for one token each while others decode: the rate of the loads, and what the
    others feel of them. One that comes back also computes its last block, in a step beside the decodes: those
    steps are told apart."""
    alone = await _beside(fleet, "alone", [])
    before = await executor_status(fleet)
    asked = [body_of(f"again-{i}", prompt, 1) for i, prompt in enumerate(prompts)]
    beside = await _beside(fleet, "beside", asked)
    after = await executor_status(fleet)
    moved, took_us = (after[name] - before[name] for name in ("loaded_bytes", "loaded_us"))
    return {
        "gb_s": moved / max(took_us, 1) / 1e3, "loaded_gb": moved / 1e9, "load_s": took_us / 1e6,
        "alone": alone, "beside": beside, "itl_p50_ratio": beside["itl_p50_ms"] / alone["itl_p50_ms"],
        "step_ratio": beside["decode_step_ms"] / alone["decode_step_ms"],
    }  # fmt: skip


async def _beside(fleet: Served, name: str, asked: list[Body]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    decodes = asyncio.gather(*(read(fleet, body) for body in bodies(name, DECODES, DECODE_TOKENS)))
    coming = asyncio.create_task(read_all(fleet, asked, 2))
    reads = await decodes
    took_s = loop.time() - began_s
    await coming
    steady = [Read(seen.sent_s, seen.parts_s[SETTLED:]) for seen in reads]  # all prompts are done by then
    return figures(steady, took_s, DECODE_TOKENS) | await _steps(fleet, f"{name}-0")


async def _steps(fleet: Served, request_id: str) -> dict[str, Any]:
    """Median device time of steps of decodes alone, and of those beside a short chunk, while chats came back;
    without any, of all decodes."""
    steps = (await steps_of(fleet, request_id))[SETTLED:]
    mixed = [i for i, step in enumerate(steps) if 0 < step["prefill_tokens"] <= SHORT]
    window = steps[mixed[0] : mixed[-1] + 1] if mixed else steps
    took_ms = [(step["prefill_tokens"], (step["forward_us"] + step["sample_us"]) / 1e3) for step in window]
    decodes = [ms for tokens, ms in took_ms if not tokens]
    beside = [ms for tokens, ms in took_ms if 0 < tokens <= SHORT]
    return {
        "window_ms": (window[-1]["start_us"] - window[0]["start_us"]) / 1e3,
        "decode_steps": len(decodes), "decode_step_ms": statistics.median(decodes),
        "mixed_steps": len(beside), "mixed_step_ms": statistics.median(beside) if beside else 0.0,
    }  # fmt: skip


async def pinned(fleet: Served) -> None:
    """Return once the executor has the arena: to pin 48 GiB takes 15 s."""
    while not (await executor_status(fleet)).get("arena_generation"):
        pass
