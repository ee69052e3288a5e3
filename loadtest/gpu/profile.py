"""Profiles a decode step and mixed steps: the time of each kernel, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from loadtest.driver import Driver
from loadtest.gpu.rig import Built
from shared.messages import StepPlan

ROWS, CONTEXT, STEPS, WARM = 64, 1024, 8, 4
CHUNKS = (0, 192, 448, 960)  # tokens of a prompt beside the decodes
_PROMPT = 99  # its slot


def profiles(built: Built) -> list[dict[str, Any]]:
    """A step of 64 decodes alone, and beside a chunk that has 512 tokens before it."""
    return [_profile(built, chunk) for chunk in CHUNKS if chunk + ROWS <= built.backend.info.max_step_tokens]


def _profile(built: Built, chunk: int) -> dict[str, Any]:
    driver = Driver(built.backend)
    plans = _plans(driver, chunk)
    driver.run(plans[:WARM])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        ends_s = driver.run(plans[WARM:])
        torch.cuda.synchronize()
    driver.close()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    by_name: dict[str, list[float]] = {}
    busy_us = until_us = 0.0
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        by_name.setdefault(event.name[:48], []).append(end - begin)
        busy_us += max(0.0, end - max(begin, until_us))
        until_us = max(until_us, end)
    span_us = until_us - events[0].time_range.start
    found = {
        "rows": ROWS, "chunk": chunk, "step_us": span_us / STEPS, "idle_us": (span_us - busy_us) / STEPS,
        "by_results_us": 1e6 * (ends_s[-2] - ends_s[0]) / (len(ends_s) - 2),
        "kernels": {
            name: {"us": sum(us) / STEPS, "launches": len(us) / STEPS}
            for name, us in sorted(by_name.items(), key=lambda item: -sum(item[1]))
        },
    }  # fmt: skip
    print("profile", {k: v for k, v in found.items() if k != "kernels"}, flush=True)
    for name, row in list(found["kernels"].items())[:20]:
        print(f"    {row['us']:9.1f} us {row['launches']:6.1f} x  {name}", flush=True)
    return found


def _plans(driver: Driver, chunk: int) -> list[StepPlan]:
    tables = dict(driver.open(slot, CONTEXT, CONTEXT + STEPS + WARM + 1) for slot in range(ROWS))
    if chunk:
        tables[_PROMPT] = driver.open(_PROMPT, 512 + chunk, 512 + chunk + 1)[1]
    plans = []
    for step in range(STEPS + WARM):
        rows = [(slot, CONTEXT - 1 + step, 1, step > 0) for slot in range(ROWS)]
        if chunk:
            rows.append((_PROMPT, 512, chunk, False))
        plans.append(driver.plan(rows, tables if not step else {}))
    return plans
