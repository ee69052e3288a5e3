"""The figures of a run: one flat dict, the same for every scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.simulator.readers import Record
from loadtest.simulator.tiers import Moved
from loadtest.simulator.world import FIRST_US, World

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must keep to count as good."""

    ttft_us: int = 15_000_000
    tpot_us: int = 60_000
    stall_us: int = 2_000_000

    def kept(self, record: Record) -> bool:
        """Whether the request was served within the bounds."""
        return (
            record.served
            and record.ttft_us <= self.ttft_us
            and record.tpot_us <= self.tpot_us
            and record.stall_us <= self.stall_us
        )


def percentile(ordered: Sequence[int], percent: float) -> int:
    """Nearest rank, of values in ascending order; 0 of none."""
    if not ordered:
        return 0
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def figures(world: World, bounds: Bounds | None = None) -> Figures:
    """The table row of a run that has ended."""
    bounds = bounds or Bounds()
    records = world.readers.records
    served = [record for record in records if record.served]
    makespan_us = max([record.ended_us for record in records], default=FIRST_US) - FIRST_US
    good = [record for record in served if bounds.kept(record)]
    tokens = sum(record.tokens for record in served)
    seconds = max(makespan_us, 1) / 1e6
    row: Figures = {
        "requests": len(records),
        "served": len(served),
        "rejected": sum(record.reason == "rejected" for record in records),
        "failed": sum(record.reason == "error" for record in records),
        "makespan_s": round(makespan_us / 1e6, 3),
        "output_tok_s": round(tokens / seconds, 1),
        "goodput_req_s": round(len(good) / seconds, 3),
        "in_slo_pct": round(100 * len(good) / len(records), 2) if records else 0.0,
    }
    row |= spread("ttft_ms", [record.ttft_us for record in served])
    row |= spread("tpot_ms", [record.tpot_us for record in served if record.tokens > 1])
    row |= spread("itl_ms", world.readers.gaps_us)
    row |= spread("stall_ms", [record.stall_us for record in served])
    row |= spread("e2e_ms", [record.e2e_us for record in served])
    return row | _machine_figures(world, records) | _tier_figures(world)


def spread(name: str, values_us: Sequence[int]) -> Figures:
    """Mean and percentiles in ms."""
    ordered = sorted(values_us)
    return {
        f"{name}_mean": round(sum(ordered) / max(len(ordered), 1) / 1e3, 3),
        f"{name}_p50": round(percentile(ordered, 50) / 1e3, 3),
        f"{name}_p90": round(percentile(ordered, 90) / 1e3, 3),
        f"{name}_p99": round(percentile(ordered, 99) / 1e3, 3),
        f"{name}_max": round((ordered[-1] if ordered else 0) / 1e3, 3),
    }


def steady(world: World) -> Figures:
    """The part of a run in which every request has its first token and none its last: for a batch of
    equal requests, decode alone."""
    records = [record for record in world.readers.records if record.served]
    start_us = max(record.first_us for record in records)
    end_us = min(record.last_us for record in records)
    series = world.readers.series
    span_us = max(end_us - start_us, 1)
    tokens = sum(
        count for at, count in zip(series[::2], series[1::2], strict=True) if start_us < at <= end_us
    )
    busy_us = capacity_us = 0
    for engine in world.engines.values():
        stages, log = engine.machine.stages, engine.log
        inside = [
            min(end, end_us) - max(begin, start_us) for begin, end in zip(log[::3], log[1::3], strict=True)
        ]
        busy_us += sum(us for us in inside if us > 0) if stages == 1 else _stage_us(log, start_us, end_us)
        capacity_us += stages * span_us
    return {
        "steady_s": round(span_us / 1e6, 3),
        "steady_tok_s": round(tokens / (span_us / 1e6), 1),
        "steady_idle_pct": round(100 * (1 - busy_us / capacity_us), 2),
    }


def _stage_us(log: Sequence[int], start_us: int, end_us: int) -> int:
    """Work of all stages, by the steps that began within."""
    return sum(us for begin, us in zip(log[::3], log[2::3], strict=True) if start_us <= begin < end_us)


def _tier_figures(world: World) -> Figures:
    """What was moved, in GB; 0 in a world without tiers."""
    copies = [engine.copies for engine in world.engines.values()]
    down, up = sum(c.stored_bytes for c in copies) / 1e9, sum(c.loaded_bytes for c in copies) / 1e9
    moved = world.tier.tier.moved if world.tier is not None else Moved()
    return {
        "moved_gb": round(down + up, 3),
        "stored_gb": round(down, 3),
        "loaded_gb": round(up, 3),
        "l2_gb": round((moved.l2_put_bytes + moved.l2_get_bytes) / 1e9, 3),
        "copies": sum(c.jobs for c in copies),
    }


def _machine_figures(world: World, records: list[Record]) -> Figures:
    totals = [engine.totals for engine in world.engines.values()]
    steps, rows = sum(t.steps for t in totals), sum(t.rows for t in totals)
    busy_us, idle_us = sum(t.busy_us for t in totals), sum(t.idle_us for t in totals)
    prefill = sum(t.prefill_tokens for t in totals)
    recomputed = sum(t.recomputed_tokens for t in totals)
    prompts = sum(record.prompt_tokens for record in records)
    modes = ("single", "run_ahead", "two_batch")
    return {
        "steps": steps,
        **{f"{m}_pct": round(100 * sum(t.modes.get(m, 0) for t in totals) / max(steps, 1), 1) for m in modes},
        "step_ms_mean": round(busy_us / max(steps, 1) / 1e3, 3),
        "rows_mean": round(rows / max(steps, 1), 2),
        "device_idle_pct": round(100 * idle_us / max(idle_us + busy_us, 1), 2),
        "wasted_rows_pct": round(100 * sum(t.wasted_rows for t in totals) / max(rows, 1), 3),
        "preemptions": sum(t.resumed for t in totals),
        "prefill_tokens": prefill,
        "recomputed_tokens": recomputed,
        "recompute_s": round(sum(t.recompute_us for t in totals) / 1e6, 3),
        "busy_s": round(busy_us / 1e6, 3),
        "recomputed_pct": round(100 * recomputed / max(prefill, 1), 2),
        "cached_pct": round(100 * sum(r.cached_tokens for r in records) / max(prompts, 1), 2),
    }
