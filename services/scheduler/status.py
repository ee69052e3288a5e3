"""What the scheduler tells about itself: beats and `headrace status`."""

from __future__ import annotations

from services.scheduler import gauges
from services.scheduler.records import Phase
from services.scheduler.state import Executor, State
from services.scheduler.tiers.worth import Recompute


def load(state: State) -> tuple[tuple[str, int], ...]:
    """Numbers for the beat."""
    running = sum(len(e.running) for e in state.executors.values())
    return (("requests", len(state.requests)), ("running", running), ("waiting", len(state.waiting)))


def status(state: State) -> dict[str, object]:
    """Everything that must be back at zero, or all free, when nothing runs."""
    phases = [s.phase for s in state.sequences.values()]
    return {
        "requests": len(state.requests),
        "waiting": phases.count(Phase.WAITING),
        "running": phases.count(Phase.RUNNING),
        "closing": phases.count(Phase.CLOSING),
        "detokenizers": sorted(state.detokenizers),
        "executors": {name: _executor(e) for name, e in sorted(state.executors.items())},
        "tiers": {
            name: _links(state, e) for name, e in sorted(state.executors.items()) if _has_tier(state, e)
        },
        "measured": measured(state),
    }


def measured(state: State) -> dict[str, dict[str, object]]:
    """What has been counted since the start; times are upper bounds of a histogram's buckets."""
    meter = state.meter
    return {
        "queue": {
            **gauges.queued(state),
            "rejected": {str(code): count for code, count in meter.rejected.items()},
            "wait_p50_ms": meter.queue_us.quantile(500) / 1000,
            "wait_p99_ms": meter.queue_us.quantile(990) / 1000,
            "ttft_p50_ms": meter.ttft_us.quantile(500) / 1000,
            "ttft_p99_ms": meter.ttft_us.quantile(990) / 1000,
        },
        "steps": {
            "mode": meter.mode,
            **meter.steps,
            "budget_tokens": meter.budget_tokens,
            "step_p50_ms": meter.step_us.quantile(500) / 1000,
            "prediction_error_p50_pct": meter.step_error_pm.quantile(500) / 10,
            "wasted_rows": meter.wasted_rows,
        },
        "tokens": {
            "generated": meter.generated_tokens,
            "prefilled": meter.prefill_tokens,
            "prefix_hits": meter.prefix_hit_tokens,
            "prefix_hit_pct": meter.prefix_hit_pm / 10,
            "preemptions": meter.preemptions,
            "recomputed": meter.recomputed_tokens,
            "recompute_tax_pct": meter.recompute_tax_pm / 10,
        },
        "tiers": _measured_tiers(state),
    }


def _measured_tiers(state: State) -> dict[str, object]:
    meter = state.meter
    counted = {name: getattr(meter, name) for name in gauges.TIER_COUNTERS}
    return {
        **counted,
        "lookups_open": len(state.tiers.lookups),
        "jobs_open": len(state.tiers.jobs),
        "restore_p50_ms": meter.restore_us.quantile(500) / 1000,
        "restore_p99_ms": meter.restore_us.quantile(990) / 1000,
        "restore_error_p50_pct": meter.restore_error_pm.quantile(500) / 10,
        "recompute_error_p50_pct": meter.recompute_error_pm.quantile(500) / 10,
    }


def _has_tier(state: State, executor: Executor) -> bool:
    return executor.hello.host_id in state.tiers.by_host


def _links(state: State, executor: Executor) -> dict[str, object]:
    """Of one executor: the links to and from the tier of its host, and what a copy is judged by."""
    facts: dict[str, object] = {
        "host": executor.hello.host_id,
        "recompute_block_us": Recompute.of(executor).block_us(0),
        "reuse_pm": state.reuse_pm,
        "chunk_tokens": executor.chunk_tokens,
    }
    for name, link in (("up", executor.up), ("down", executor.down)):
        facts |= {
            f"{name}_bytes_per_s": link.bytes_per_second if link.seen else 0,
            f"{name}_block_us": link.block_us(executor.hello.bytes_per_block),
            f"{name}_moved_bytes": link.moved_bytes,
            f"{name}_pending": link.pending_jobs,
        }
    return facts


def _executor(executor: Executor) -> dict[str, object]:
    ledger, hello = executor.ledger, executor.hello
    held = executor.running
    used = sum(s.computed for s in held)
    return {
        "model": hello.model,
        "backend": hello.backend,
        "dtype": hello.dtype,
        "epoch": executor.epoch,
        "blocks": ledger.blocks,
        "free_blocks": ledger.free_blocks,
        "reserved_blocks": ledger.reserved,
        "fenced_blocks": ledger.fenced_blocks,
        "cached_blocks": ledger.cached_blocks,
        "dirty_blocks": ledger.dirty_blocks,
        "copying_blocks": ledger.copying_blocks,
        "waste_tokens": gauges.waste_tokens(executor),
        "block_tokens": ledger.block_tokens,
        "slots": ledger.slots,
        "free_slots": ledger.free_slots,
        "running": len(held),
        "computed_tokens": used,
        "steps": executor.steps_done,
        "in_flight": len(executor.in_flight),
    }
