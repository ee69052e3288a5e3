"""The overlap grid: batch x context x hop to the executor, in every mode, decode alone.

For each point: tokens a second of each mode as a multiple of `single`, and of the best mode. The ideal of
run-ahead is (T + L) / max(T, (T + L) / 2): T the step, L the round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from loadtest.scenarios.definitions import H200, Arm
from loadtest.scenarios.run import limits_of
from loadtest.scenarios.synthetic import batch
from loadtest.scenarios.tables import NOTE, page, table
from loadtest.simulator.hops import Hop
from loadtest.simulator.report import Figures, figures, steady
from loadtest.simulator.world import Setup, World
from shared.step_model import StepShape

ROWS = (1, 16, 64, 256)
CONTEXTS = (256, 1_024, 4_096)
HOPS_US = (0, 200, 1_000, 5_000)
STEADY_STEPS = 300  # at least, after the last prompt
PREFILL = (("step_tokens", 8_192),)  # to have the prompts out of the way
MACHINE = replace(H200, blocks=90_000)
MODES = ("single", "run_ahead", "two_batch")
Point = tuple[int, int, int]


def run(command: str, modes: Sequence[str]) -> tuple[dict[str, Any], str]:
    """(result, Markdown) of the whole grid."""
    rows = [point_row(point, modes) for point in product(ROWS, CONTEXTS, HOPS_US)]
    result = {"scenario": "grid", "title": "Overlap grid", "note": NOTE, "command": command, "rows": rows}
    return result, _markdown(result, modes)


def point_row(point: Point, modes: Sequence[str]) -> dict[str, Any]:
    """All modes at one point."""
    rows, context, hop_us = point
    by_mode = {mode: _figures(point, mode) for mode in modes}
    speeds = {mode: by_mode[mode]["steady_tok_s"] for mode in modes}
    step_us = MACHINE.model.step_us(StepShape(rows, rows, rows * (context + 150), rows * (context + 150)))
    loop_us = 2 * hop_us
    made = {
        "rows": rows,
        "context": context,
        "hop_us": hop_us,
        "step_us": step_us,
        "ideal": round((step_us + loop_us) / max(step_us, (step_us + loop_us) / 2), 3),
        "tok_s": speeds,
        "idle_pct": {mode: by_mode[mode]["steady_idle_pct"] for mode in modes},
        "wasted_rows_pct": {mode: by_mode[mode]["wasted_rows_pct"] for mode in modes},
        "answer_tokens": _answer_tokens(rows, context),
        "steps_pct": {m: {o: by_mode[m][f"{o}_pct"] for o in MODES} for m in modes if m not in MODES},
    }
    if "single" in speeds:
        made["of_single"] = {mode: round(s / speeds["single"], 4) for mode, s in speeds.items()}
    made["of_best"] = {mode: round(s / max(speeds.values()), 4) for mode, s in speeds.items()}
    return made


def _figures(point: Point, mode: str) -> Figures:
    rows, context, hop_us = point
    machine = replace(MACHINE, hop=Hop(hop_us))
    workload = batch(rows, context, _answer_tokens(rows, context), max_tokens=4_096)  # ends by a stop id
    world = World(Setup((machine,), limits_of(Arm(mode, overlap=mode, limits=PREFILL))), workload)
    world.run()
    return figures(world) | steady(world)


def _answer_tokens(rows: int, context: int) -> int:
    return -(-rows * context // MACHINE.max_step_tokens) + STEADY_STEPS


def _markdown(result: dict[str, Any], modes: Sequence[str]) -> str:
    head = ["rows", "context", "hop ms", "step ms", "ideal"]
    others = [mode for mode in modes if mode != "single"]
    head += ["single tok/s", *(f"{m} / single" for m in others), *(f"idle % {m}" for m in modes)]
    lines = []
    for row in result["rows"]:
        line = [row["rows"], row["context"], row["hop_us"] / 1e3, row["step_us"] / 1e3, row["ideal"]]
        line += [row["tok_s"].get("single", ""), *(row.get("of_single", {}).get(m, "") for m in others)]
        lines.append([f"{cell}" for cell in [*line, *(row["idle_pct"][m] for m in modes)]])
    return page("Overlap grid", NOTE, table(head, lines), result["command"])
