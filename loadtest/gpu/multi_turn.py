"""Chats that come back, more than the device holds: does their KV come from pinned memory in time?

All conversations take one turn, so many at a time, before any takes its next. A turn's prompt is all before
it, 64 random tokens in place of the last answer, and 256 new ones. The real answer is not in the next prompt,
so its KV is computed again; that costs this engine more than an engine that gets it in the prompt.
"""

from __future__ import annotations

import random
from typing import Any

from loadtest.fleet import Fleet
from loadtest.gpu.readers import bodies, body_of, figures, read_all, some_tokens

CONVERSATIONS, IN_FLIGHT, TURNS = 96, 32, 5
SHARED, OWN, ADDED, ANSWER = 1024, 2048, 256, 64


async def multi_turn(fleet: Fleet) -> dict[str, Any]:
    """The time of each turn; from turn 1 on how long loads took, how long the device stood idle for
    any reason, and what share of the loads that leaves hidden."""
    await fleet.all(bodies("warm-up", 8, 16))
    rng = random.Random("multi-turn")
    shared = some_tokens(rng, SHARED)
    prompts = [shared + some_tokens(rng, OWN) for _ in range(CONVERSATIONS)]
    turns, before, idle_us = list[dict[str, Any]](), dict[str, Any](), 0
    for turn in range(TURNS):
        for prompt in prompts:
            prompt += some_tokens(rng, ADDED)
        asked = [body_of(f"turn-{turn}-{i}", list(prompt), ANSWER) for i, prompt in enumerate(prompts)]
        at_begin = await fleet.executor()
        before = at_begin if turn == 1 else before
        turns.append({"turn": turn, **figures(await read_all(fleet.client, asked, IN_FLIGHT))})
        if turn:
            idle_us += (await fleet.executor())["device_idle_us"] - at_begin["device_idle_us"]
        for prompt in prompts:
            prompt += some_tokens(rng, ANSWER)
    after = await fleet.executor()
    loads_us = after["loaded_us"] - before["loaded_us"]
    scheduler = await fleet.scheduler()
    return {
        "seconds": sum(turn["seconds"] for turn in turns), "turns": turns,
        "loads_s": loads_us / 1e6, "idle_s": idle_us / 1e6, "hidden": 1 - idle_us / max(loads_us, 1),
        "loaded_gb": (after["loaded_bytes"] - before["loaded_bytes"]) / 1e9,
        "scheduler": scheduler["measured"], "tiers": scheduler["tiers"], "executor": after,
    }  # fmt: skip
