"""Draws the device's steps while chats came back, and when their KV was loaded, from the scheduler's records.

python -m loadtest.gpu.turn_steps FOUND.json PICTURE.png    # FOUND.json is of a run of loadtest.gpu.serve
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.document import text_of
from loadtest.real.served import Served
from services.launcher.commands.trace import find

SHOWN_US = 400_000  # of a turn's beginning, where most is loaded
DECODE, MIXED, LOADED = "#4c78a8", "#f58518", "#54a24b"


async def turn_steps(fleet: Served, request_ids: Sequence[str]) -> dict[str, Any]:
    """Of a turn that is over: seconds from the start of its first step to the end of its last, those in which
    the device stood still, and for its beginning the steps and the loads, in us."""
    steps, loads = dict[int, dict[str, int]](), list[tuple[int, int]]()
    for request_id in request_ids:
        body = await find(fleet.bus, request_id, steps=True, wait_s=5)
        (columns,) = body["steps"].values()
        for row in zip(*columns.values(), strict=True):
            step = dict(zip(columns, row, strict=True))
            steps[step["step"]] = step
        loads += _loads(body)
    ran = [(s["start_us"], s["forward_us"] + s["sample_us"], s["prefill_tokens"]) for s in steps.values()]
    ran.sort()
    began_us, ended_us = ran[0][0], ran[-1][0] + ran[-1][1]
    span_s, busy_s = (ended_us - began_us) / 1e6, sum(took for _, took, _ in ran) / 1e6
    loads = sorted((begin - began_us, end - began_us) for begin, end in loads)
    return {
        "span_s": span_s, "busy_s": busy_s, "idle_s": max(span_s - busy_s, 0.0),
        "steps": [(at - began_us, *rest) for at, *rest in ran if at - began_us < SHOWN_US],
        "loads": [load for load in loads if load[0] < SHOWN_US],
    }  # fmt: skip


def _loads(body: dict[str, Any]) -> list[tuple[int, int]]:
    """When the loads of a request were asked for, and when its blocks were there."""
    told = [event for span in body["spans"] for event in span["events"] if event["name"] == "restore"]
    came = [event for event in told if event["attributes"].get("tokens")]
    return [(event["at_us"] - event["attributes"]["took_us"], event["at_us"]) for event in came]


def picture(turn: dict[str, Any], path: Path) -> None:
    """The device's steps over the loads, each a bar."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 4.5), layout="constrained")
    device, loads = drawn.subplots(2, 1, sharex=True, height_ratios=(1, 4))
    for kind, colour, chunked in (("decodes", DECODE, False), ("decodes and prompt chunks", MIXED, True)):
        bars = [(at / 1e3, took / 1e3) for at, took, tokens in turn["steps"] if bool(tokens) == chunked]
        device.broken_barh(bars, (0, 1), color=colour, edgecolor="white", linewidth=0.3, label=kind)
    device.set_yticks([])
    device.set_ylabel("device")
    device.legend(fontsize=7, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.6))
    for row, (begin, end) in enumerate(turn["loads"]):
        loads.broken_barh([(begin / 1e3, (end - begin) / 1e3)], (row, 0.8), color=LOADED)
    loads.set_ylabel("chats whose KV is on its way up")
    loads.set_xlabel("ms since the first step of the turn")
    loads.invert_yaxis()
    drawn.savefig(path, dpi=120, metadata={"Software": None})


def main(found: Path, out: Path) -> None:
    """Draw turn 2 of the run."""
    turns = json.loads(text_of(found))["multi_turn"]["auto"]["steps_of_turns"]
    picture(turns[1], out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
