"""Rows that wait for the host: two halves in turn against one batch, on the real model and the simulated one.

Requests at once, each row with a logits processor: `in_turn` waits 20 ms a row, one row after the other;
`wait` waits 20 ms for all rows of a step together, side by side; none: device-fed rows, what halves lose. A
fleet for each mode, all at once, loaded one after the other; the ratio is of each round's pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.real.report import Report
from loadtest.real.served import WAIT, Body, Served, decode_bodies, env_of, real_env, side_by_side
from loadtest.real.steady import Steady, mode_shares, spread, steady

MODES = ("single", "two_batch", "auto")
BOUND = 1.25
NO_BOUNDS = "standard=60000/10000/60000"  # ms: prompts come in at once, whatever the steps take


@dataclass(frozen=True, slots=True)
class Case:
    """What the rows of a request do on the host."""

    name: str
    label: str
    processor: str
    args: Mapping[str, Any]
    tokens: int  # of an answer
    sim: str = ""  # the simulated engine's times; else the real model runs


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    rows: int = 16
    rounds: int = 3
    threads: int = 2
    scale: float = 1.0  # of the answers
    cases: tuple[str, ...] = ()  # by name; all


CASES = (
    Case("none", "real model, device-fed", "", {}, 20),
    Case("wait", "real model, 20 ms a step", "wait", {"ms": 20}, 20),
    Case("in_turn", "real model, 20 ms a row in turn", "in_turn", {"ms": 20}, 12),
    Case("sim_5", "simulated, 5 ms a row in turn", "wait", {}, 16, "smollm2-cpu,host_row=5000"),
)
WARM_UP_TOKENS = {"single": 4, "two_batch": 4, "auto": 40}  # `auto` is to know the costs


async def run(size: Size, command: str) -> Report:
    """The table of all cases."""
    report = Report(
        "two_batch",
        f"Two batches in turn, {size.rows} rows",
        "SmolLM2-135M-Instruct (or the simulated engine with its step times) behind five processes and a "
        f"nats-server; tokens a second while all rows decode, median (least…most) of {size.rounds} rounds in "
        "turn. `in_turn` and `wait` are logits processors (docs/design/processors.md).",
        command,
        ["rows on the host", "single tok/s", "two_batch tok/s", "two_batch / single", "auto / single",
         "auto took", "step ms single", "step ms half", "idle % single", "idle % two_batch"],
    )  # fmt: skip
    cases = [case for case in CASES if not size.cases or case.name in size.cases]
    for sim in sorted({case.sim for case in cases}):
        base = env_of(backend="sim", sim=sim, logits_processors=WAIT) if sim else real_env(size.threads)
        envs = {mode: base | env_of(overlap=mode, slo=NO_BOUNDS) for mode in MODES}
        async with side_by_side(envs) as fleets:
            for case in (case for case in cases if case.sim == sim):
                await _case(case, size, fleets, report)
    return report


async def _case(case: Case, size: Size, fleets: Mapping[str, Served], report: Report) -> None:
    found: dict[str, list[Steady]] = {mode: [] for mode in MODES}
    for mode in MODES:  # prompts into the cache
        await fleets[mode].all(_bodies(case, size, f"{case.name}-warm-up", WARM_UP_TOKENS[mode]))
    for turn in range(size.rounds):
        for mode in MODES:
            found[mode].append(await _round(case, size, fleets[mode], f"{case.name}-{turn}"))
    speeds = {mode: [one.tok_s for one in of] for mode, of in found.items()}
    ratios = [two / one for one, two in zip(speeds["single"], speeds["two_batch"], strict=True)]
    by_auto = [auto / one for one, auto in zip(speeds["single"], speeds["auto"], strict=True)]
    single, two = found["single"], found["two_batch"]
    report.add(
        [case.label, spread(speeds["single"], 1), spread(speeds["two_batch"], 1), spread(ratios),
         spread(by_auto), mode_shares(found["auto"]), _median(single, "step_ms"), _median(two, "step_ms"),
         _median(single, "idle_pct"), _median(two, "idle_pct")]
    )  # fmt: skip
    report.data.setdefault("rounds", {})[case.name] = {m: [asdict(s) for s in of] for m, of in found.items()}
    if case.name == "in_turn":
        gain = statistics.median(ratios)
        report.checks.append((f"real model, 20 ms a row: {gain:.2f} ≥ {BOUND} × single", gain >= BOUND))


async def _round(case: Case, size: Size, served: Served, name: str) -> Steady:
    await served.all(_bodies(case, size, name, max(8, round(case.tokens * size.scale))))
    return await steady(served, f"{name}-0")


def _bodies(case: Case, size: Size, name: str, tokens: int) -> list[Body]:
    asked = [{"name": case.processor, "args": dict(case.args)}] if case.processor else []
    return decode_bodies(name, size.rows, tokens, logits_processors=asked)


def _median(of: list[Steady], name: str) -> str:
    return f"{statistics.median(getattr(one, name) for one in of):.1f}"
