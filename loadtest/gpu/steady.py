"""The rate at which rows decode while all of them do, from the scheduler's record of the steps."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from loadtest.fleet import Fleet
from services.launcher.commands.trace import find

FROM, TO = 0.15, 0.85  # of the rows after the last prompt chunk: at both ends not all rows are there


@dataclass(frozen=True, slots=True)
class Steady:
    """The middle of a batch's decode."""

    tok_s: float
    step_ms: float  # forward and sampling, median
    period_ms: float  # from start to start, mean
    idle_pct: float  # the device had no plan
    modes: dict[str, int]  # steps


async def steps_of(fleet: Fleet, request_id: str) -> list[dict[str, Any]]:
    """The steps that a request lived through, as the scheduler remembers them, oldest first."""
    body = await find(fleet.bus, request_id, steps=True, wait_s=5)
    (columns,) = body["steps"].values()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


async def steady(fleet: Fleet, request_id: str) -> Steady:
    """The figures of the batch with this request."""
    steps = await steps_of(fleet, request_id)
    last_prompt = max((i for i, step in enumerate(steps) if step["prefill_tokens"]), default=-1)
    decodes = steps[last_prompt + 1 :]
    all_rows, seen, window = sum(step["rows"] for step in decodes), 0, []
    for step in decodes:
        seen += step["rows"]
        if FROM * all_rows <= seen <= TO * all_rows:
            window.append(step)
    first, rest = window[0], window[1:]
    took_us = window[-1]["result_us"] - first["result_us"]
    device_us = window[-1]["start_us"] - first["start_us"]
    return Steady(
        tok_s=sum(step["rows"] for step in rest) * 1e6 / took_us,
        step_ms=statistics.median(s["forward_us"] + s["sample_us"] for s in window) / 1e3,
        period_ms=device_us / len(rest) / 1e3,
        idle_pct=100 * sum(step["wait_us"] for step in rest) / device_us,
        modes=dict(Counter(step["mode"] for step in window)),
    )
