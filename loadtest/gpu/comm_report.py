"""Computes the ratios of loadtest.gpu.comm from its times."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch


def device(at: torch.device) -> dict[str, str]:
    """The machine and versions."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    found = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit}
    if at.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {"name": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "nccl": nccl}
    return found


def profile(run: Callable[[], None], most: int = 24) -> dict[str, list[float]]:
    """Time in ms and launches of the kernels that take longest. Every rank must call it."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)[:most]
    return {event.key[:90]: [event.self_device_time_total / 1e3, event.count] for event in events}


def overlapped(way: str) -> bool:
    """Whether it says something, under the compute of another half."""
    return way.startswith("on") and way != "on silent"


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """By way."""
    return {way: statistics.median(found) for way, found in times.items()}


def quickest(ms: dict[str, float], of: str) -> str:
    """The quickest way of those that say something: on one stream, "off", or on two, "on"."""
    return min((way for way in ms if way.startswith(of) and way != "on silent"), key=ms.__getitem__)


def row(tokens: int, times: dict[str, list[float]], more: dict[str, Any]) -> dict[str, Any]:
    """Medians in ms, ratios to `off`, and the share of talking that is exposed."""
    ms = medians(times)
    talking, one = ms["off"] - ms["silent"], ms[quickest(ms, "off")]
    ons = [way for way in ms if overlapped(way)]
    return {
        "tokens": tokens,
        **more,
        "ms": ms,
        "speedup": {way: ms["off"] / ms[way] for way in [*ons, "auto"]},
        "to the best off": {way: one / ms[way] for way in [*ons, "auto"]},
        "talking": talking / ms["off"],
        "exposed": {way: (ms[way] - ms["silent"]) / talking for way in ons},
        "all_ms": times,
    }


def line(found: dict[str, Any]) -> str:
    """A row for people."""
    ms = ", ".join(f"{way} {value:.2f}" for way, value in found["ms"].items())
    speedup = ", ".join(f"{way} {value:.3f}" for way, value in found["speedup"].items())
    best = ", ".join(f"{way} {value:.3f}" for way, value in found["to the best off"].items())
    exposed = ", ".join(f"{way} {value:.2f}" for way, value in found["exposed"].items())
    return (
        f"{found['tokens']} tokens: ms {ms} | speedup {speedup} | to the best off {best} | "
        f"talking {found['talking']:.2f} of off, "
        f"exposed {exposed} | auto is {found['auto is']}"
    )
