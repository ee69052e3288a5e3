"""`headrace bench compare`: two results side by side, each figure of both and their ratio."""

from __future__ import annotations

from typing import Any

from loadtest.bench.document import Result
from loadtest.bench.figures import PERCENTILES
from shared.errors import BadRequest

RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
TIMES = tuple(
    f"{figure}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el", "stall")
    for figure in ("mean", "median", *(f"p{p}" for p in PERCENTILES))
)
COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "cached_tokens")
COUNTED = (
    "recompute_overhead_pct",
    "preemptions",
    "prefix_hits",
    "l1_hit_blocks",
    "l2_hit_blocks",
    "restored_tokens",
)
SAME = ("machine", "versions")  # should be equal for a ratio to mean something
Row = tuple[str, float | None, float | None, float | None]


def rows(one: dict[str, Any], other: dict[str, Any]) -> list[Row]:
    """(figure, of the one run, of the other, other / one). None where there is no value."""
    made: list[Row] = []
    left, right = (run["figures"] | (run.get("counted") or {}) for run in (one, other))
    for name in (*COUNTS, *RATES, *TIMES, *COUNTED):
        a, b = left.get(name), right.get(name)
        if a is not None or b is not None:
            made.append((name, a, b, b / a if a and b is not None else None))
    return made


def compare(one: Result, other: Result) -> str:
    """A table for each pair of runs, in order, and what makes the comparison unfair. Raises BadRequest."""
    if len(one["runs"]) != len(other["runs"]):
        raise BadRequest(
            f"{one['label']} has {len(one['runs'])} runs, {other['label']} {len(other['runs'])}: "
            "compare results of the same sweep"
        )
    lines = [f"warning: {each}" for each in differences(one, other)]
    for number, (a, b) in enumerate(zip(one["runs"], other["runs"], strict=True)):
        heads = (f"{point_name(a)} (run {number + 1})", one["label"], other["label"], "ratio")
        lines += ["", f"{heads[0]:<32}{heads[1]:>16.15}{heads[2]:>16.15}{heads[3]:>9}"]
        lines += [
            f"{name:<32}{_number(left):>16}{_number(right):>16}{_number(ratio):>9}"
            for name, left, right, ratio in rows(a, b)
        ]
    return "\n".join(lines).lstrip("\n")


def differences(one: Result, other: Result) -> list[str]:
    """What else differs between two results than the server: flags, points, machine, versions."""
    found: list[str] = []
    flags = sorted(one["configuration"].keys() | other["configuration"].keys())
    for name in flags:
        a, b = one["configuration"].get(name), other["configuration"].get(name)
        if a != b:
            found.append(f"{name} differs: {a} and {b}")
    for name in SAME:
        parts = sorted(one[name].keys() | other[name].keys() - {"load_average"})
        for part in parts:
            a, b = one[name].get(part), other[name].get(part)
            if a != b and part != "load_average":
                found.append(f"{name} differs: {part} {a} and {b}")
    if [run["point"] for run in one["runs"]] != [run["point"] for run in other["runs"]]:
        found.append("the points of the sweeps differ")
    return found


def point_name(run: dict[str, Any]) -> str:
    """The load of a run, for people."""
    point = run["point"]
    rate = f"{point['request_rate']:g} req/s" if point["request_rate"] else ""
    most = f"concurrency {point['max_concurrency']}" if point["max_concurrency"] else ""
    return ", ".join(filter(None, (rate, most))) or "all at once"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
