"""Measures the overlap modes: device-fed decodes, host-fed rows, chats that come back.

One fleet for each mode, one after the other: they would not fit on the device together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from loadtest.gpu.readers import bodies
from loadtest.real.served import Served
from loadtest.real.steady import steady

MODES = ("single", "run_ahead", "two_batch", "auto")
BATCHES, TOKENS = (32, 128, 256), 128
HOSTED, ROW_US = 256, 30
HOSTED_RUNS = 3  # the host decides, and it varies: the median of these
PROCESSOR = "work=loadtest.gpu.modes:Work"


class Work:
    """A logits processor that computes for some microseconds a row, and changes nothing."""

    def __init__(self, args: dict[str, Any], prompt_tokens: Sequence[int]) -> None:
        self._ns = int(args["us"]) * 1_000

    def process(self, generated: Sequence[int], logits: Tensor) -> Tensor:
        """Busy for its time: a sleep of 30 us lasts 90."""
        until_ns = time.perf_counter_ns() + self._ns
        while time.perf_counter_ns() < until_ns:
            pass
        return logits


class Start(Protocol):
    """Starts a fleet with some settings."""

    def __call__(self, **settings: object) -> AbstractAsyncContextManager[Served]: ...


async def by_mode(start: Start) -> dict[str, Any]:
    """Tokens a second and step times of each mode and load."""
    found: dict[str, Any] = {}
    for mode in MODES:
        async with start(overlap=mode, logits_processors=PROCESSOR, step_tokens=4096) as fleet:
            found[mode] = {
                f"device_{rows}": await _decodes(fleet, f"{mode}-{rows}", rows) for rows in BATCHES
            }
            if mode != "run_ahead":  # without rows that the device feeds it is single
                asked = {"logits_processors": [{"name": "work", "args": {"us": ROW_US}}]}
                runs = [await _decodes(fleet, f"{mode}-hosted{i}", HOSTED, asked) for i in range(HOSTED_RUNS)]
                runs.sort(key=lambda run: float(run["tok_s"]))
                found[mode]["host_256"] = {
                    **runs[len(runs) // 2],
                    "runs_tok_s": [run["tok_s"] for run in runs],
                }
    return found


async def _decodes(
    fleet: Served, name: str, rows: int, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    await fleet.all(bodies(name, rows, TOKENS, **(more or {})))
    one = asdict(await steady(fleet, f"{name}-0"))
    print(name, {k: round(v, 2) if isinstance(v, float) else v for k, v in one.items()}, flush=True)
    return one
