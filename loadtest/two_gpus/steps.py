"""What an executor's steps took while requests ran, from their traces: which ones readers waited for."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

from services.launcher.commands.trace import find
from shared.errors import HeadraceError
from shared.nats.bus import NatsBus

SLOW_MS, TOLD = 15.0, 6


async def slow_steps(bus: NatsBus, requests: Iterable[str]) -> dict[str, Any]:
    """By executor: how many steps these requests' traces name, and those whose result came more than SLOW_MS
    after the one before, with prompt tokens and without; of the slowest that time and the time on the device,
    ms, us in the executor's queue, rows and prompt tokens. Of steps of decodes the medians of both times."""
    steps: dict[str, dict[int, tuple[int, ...]]] = {}
    for request in requests:
        try:
            traced = await find(bus, request, steps=True)
        except HeadraceError:
            continue
        for executor, columns in traced["steps"].items():
            names = ("step", "result_us", "start_us", "end_us", "queued_us", "rows", "prefill_tokens")
            rows = zip(*(columns[name] for name in names), strict=True)
            steps.setdefault(executor, {}).update({row[0]: row for row in rows})
    return {executor: _slow(list(found.values())) for executor, found in steps.items()}


def _slow(rows: list[tuple[int, ...]]) -> dict[str, Any]:
    took = [
        ((after[1] - before[1]) / 1e3, (after[3] - after[2]) / 1e3, *after[4:])
        for before, after in itertools.pairwise(sorted(rows))
        if after[0] == before[0] + 1 and after[5] > 1
    ]
    slow = [each for each in took if each[0] > SLOW_MS]
    decodes = [each[:2] for each in took if not each[-1]] or [(0.0, 0.0)]
    return {
        "decodes_p50_ms": [statistics.median(times) for times in zip(*decodes, strict=True)],
        "steps": len(rows), "slow_with_prompts": sum(bool(each[-1]) for each in slow),
        "slow_without": sum(not each[-1] for each in slow),
        "prompt_tokens": sum(row[-1] for row in rows), "slowest": sorted(slow, reverse=True)[:TOLD],
    }  # fmt: skip
