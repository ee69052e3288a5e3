"""Computes heartbeat numbers, status, metrics and traces of requests from the scheduler's state, on request.

The actor calls it. Counters come from ../state/counters.py. Metric names follow OpenTelemetry's conventions
for generative AI where there is one; times in metrics are seconds.

How many executors the present demand needs, for an autoscaler: three terms, of which the largest counts.

    rows            running and waiting sequences / those that an executor keeps within the time per token
    prompt_tokens   waiting prompt tokens / those that an executor computes within half the TTFT limit
    blocks          KV blocks of both / KV blocks of an executor

The terms are of this moment: how long a demand must last is the autoscaler's to decide. All are 0 without a
request, and at least one is 1 with one. Without an executor no speed is known, so a queue of any
length needs one; the next report, with that executor, has the rest. While executors sleep, no term is more
than there are with them: to wake one takes seconds, to start one more takes minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from services.scheduler import load_shedding
from services.scheduler.fleet import sleep
from services.scheduler.load_shedding import MIN_STEPS_SEEN, ns_per_token, prompt_tokens
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state.counters import Histogram, StepRecord
from services.scheduler.state.requests import CLASS_NAMES, Phase, request_record
from services.scheduler.state.state import Executor, State
from shared.actor.membership import COLD_START, MIXED, WAITS, WORK
from shared.kv_blocks import blocks_for
from shared.messages import ExecHello
from shared.step_model import StepShape
from shared.telemetry import traces as c
from shared.telemetry.readings import Attributes, HistogramPoint, MetricPoint, Metrics
from shared.telemetry.traces import Choice, request_spans, to_body

PREFIX = "headrace.scheduler"
TTFT = "gen_ai.server.time_to_first_token"
TPOT = "gen_ai.server.time_per_output_token"
E2E = "gen_ai.server.request.duration"
_GEN_AI: Attributes = ((c.GEN_AI_OPERATION, "text_completion"), (c.GEN_AI_PROVIDER, c.PROVIDER))
TIER_COUNTERS = {  # attribute of Counters -> unit
    "loads": "{load}",
    "loads_declined": "{load}",
    "loads_failed": "{load}",
    "l1_hit_blocks": "{block}",
    "l2_hit_blocks": "{block}",
    "restored_tokens": "{token}",
    "stored_blocks": "{block}",
    "stored_ahead_blocks": "{block}",
    "stores_failed": "{store}",
    "dropped_blocks": "{block}",
    "dropped_preempted_blocks": "{block}",
    "tier_backoffs": "{rest}",
}
_US, _PER_MILLE = 1e6, 1e3
MAX_STEPS = 2_000  # in one trace, the newest: about 200 kB, below the payload limit of any server
MAX_SPLIT = 64  # steps with timeline segments in one trace, the newest: 300 bytes each
STEP_COLUMNS = (
    "step", "planned_us", "start_us", "end_us", "result_us", "forward_us", "sample_us", "wait_us", "rows",
    "tokens", "prefill_tokens", "micro_batch", "host_us", "queued_us", "mode", "segments",
)  # fmt: skip
LAST_STEPS = 256  # of an executor, for the median of its step time


def load(state: State) -> tuple[tuple[str, int], ...]:
    """Numbers for the heartbeat."""
    running = sum(len(e.running) for e in state.executors.values())
    figures: tuple[tuple[str, int], ...]
    figures = ("requests", len(state.requests)), ("running", running), ("waiting", len(state.waiting))
    options = (
        *((COLD_START, load_shedding.executor_wait_us(state)), (MIXED, int(state.limits.accept_mixed))),
        *(zip((WORK, WAITS), sleep.work(state), strict=True) if state.limits.shares_memory else ()),
    )
    return (*figures, *(option for option in options if option[1]))


def awaiting_executor(state: State) -> int:
    """The number of waiting groups, parked ones included, whose model has no executor."""
    served = {e.hello.model for e in state.executors.values() if not e.draining}
    return sum(group.request.tokenized.model not in served for group in state.waiting)


def counts(state: State) -> dict[str, int]:
    """Counts for `headrace status`, which shows their changes within the last seconds."""
    counters = state.counters
    return {
        "waiting": len(state.waiting),
        "refused_429": counters.rejected.get(429, 0),
        "refused_503": counters.rejected.get(503, 0),
        "prefilled": counters.prefill_tokens,
        "generated": counters.generated_tokens,
        "prefix_lookups": counters.prefix_lookup_tokens,
        "prefix_hits": counters.prefix_hit_tokens,
        "preemptions": counters.preemptions,
    }


def status(state: State) -> dict[str, object]:
    """The status document. When nothing runs, requests are 0 and all blocks and slots are free."""
    phases = [s.phase for s in state.sequences.values()]
    return {
        "policy": str(state.limits.policy),
        "requests": len(state.requests),
        "waiting": phases.count(Phase.WAITING),
        "awaiting_executor": awaiting_executor(state),
        "running": phases.count(Phase.RUNNING),
        "closing": phases.count(Phase.CLOSING),
        "detokenizers": sorted(state.detokenizers),
        "executors": {name: _executor(state, e) for name, e in sorted(state.executors.items())},
        "states": sleep.states(state),
        "shares_memory": state.limits.shares_memory,
        "kept_out": {name: _excluded(state, hello) for name, hello in sorted(state.excluded.items())},
        "tiers": {
            name: _tier_status(state, e)
            for name, e in sorted(state.executors.items())
            if e.hello.host_id in state.tiers.by_host
        },
        "measured": measured(state),
        "usage": {tenant: asdict(usage) for tenant, usage in sorted(state.counters.usage.items())},
    }


def _excluded(state: State, hello: ExecHello) -> dict[str, object]:
    """An executor of a kind that does not serve."""
    why = load_shedding.kind_refusal(state, hello)
    return {"model": hello.model, "dtype": hello.dtype, "model_digest": hello.model_digest, "why": why}


def _executor(state: State, executor: Executor) -> dict[str, object]:
    pool, hello = executor.pool, executor.hello
    held = executor.running
    used = sum(s.computed for s in held)
    return {
        "model": hello.model,
        "backend": hello.backend,
        "role": executor.role or "both",
        "dtype": hello.dtype,
        "context": min(hello.max_context, pool.blocks * pool.block_tokens),
        "model_digest": hello.model_digest,
        "epoch": executor.epoch,
        "blocks": pool.blocks,
        "free_blocks": pool.free_blocks,
        "reserved_blocks": pool.reserved,
        "fenced_blocks": pool.fenced_blocks,
        "cached_blocks": pool.cached_blocks,
        "dirty_blocks": pool.dirty_blocks,
        "copying_blocks": pool.copying_blocks,
        "kv_used_pct": round(100 * used_share(executor), 1),
        "waste_tokens": waste_tokens(executor),
        "block_tokens": pool.block_tokens,
        "slots": pool.slots,
        "free_slots": len(pool.free_slots),
        "running": len(held),
        "computed_tokens": used,
        "steps": executor.steps_done,
        "step_p50_ms": step_p50_us(state, executor) / 1000,
        "in_flight": len(executor.in_flight),
    }


def step_p50_us(state: State, executor: Executor) -> int:
    """The median time of the executor's last LAST_STEPS steps; 0 without any."""
    own = (s for s in reversed(state.step_log.ring) if s.executor == executor.hello.executor)
    took_us = [step.forward_us + step.sample_us for step in islice(own, LAST_STEPS)]
    return int(statistics.median(took_us)) if took_us else 0


def _tier_status(state: State, executor: Executor) -> dict[str, object]:
    """The links between an executor and its tier, and the input of the tier policy."""
    facts: dict[str, object] = {
        "host": executor.hello.host_id,
        "recompute_block_us": RecomputeCost.of(executor).block_us(0),
        "reuse_pm": state.prefix_reuse_pm,
        "chunk_tokens": executor.chunk_tokens,
    }
    for name, link in (("up", executor.up), ("down", executor.down)):
        facts |= {
            f"{name}_bytes_per_s": link.bytes_per_second if link.copies_seen else 0,
            f"{name}_block_us": link.block_us(executor.hello.bytes_per_block),
            f"{name}_moved_bytes": link.moved_bytes,
            f"{name}_pending": link.pending_jobs,
        }
    return facts


def measured(state: State) -> dict[str, dict[str, object]]:
    """The counters since the start; times are upper bounds of a histogram's buckets."""
    counters = state.counters
    return {
        "queue": {
            **queued(state),
            "rejected": {str(code): count for code, count in counters.rejected.items()},
            "wait_p50_ms": counters.queue_us.quantile(500) / 1000,
            "wait_p99_ms": counters.queue_us.quantile(990) / 1000,
            "ttft_p50_ms": counters.ttft_us.quantile(500) / 1000,
            "ttft_p99_ms": counters.ttft_us.quantile(990) / 1000,
        },
        "steps": {
            "mode": counters.mode,
            **counters.steps,
            "budget_tokens": counters.budget_tokens,
            "step_p50_ms": counters.step_us.quantile(500) / 1000,
            "prediction_error_p50_pct": counters.step_error_pm.quantile(500) / 10,
            "wasted_rows": counters.wasted_rows,
        },
        "tokens": {
            "generated": counters.generated_tokens,
            "prefilled": counters.prefill_tokens,
            "prefix_hits": counters.prefix_hit_tokens,
            "prefix_hit_pct": counters.prefix_hit_pm / 10,
            "preemptions": counters.preemptions,
            "moves": counters.moves,
            "recomputed": counters.recomputed_tokens,
            "recompute_overhead_pct": counters.recompute_overhead_pm / 10,
        },
        "tiers": _measured_tiers(state),
    }


def _measured_tiers(state: State) -> dict[str, object]:
    counters = state.counters
    counted = {name: getattr(counters, name) for name in TIER_COUNTERS}
    return {
        **counted,
        "lookups_open": len(state.tiers.lookups),
        "jobs_open": len(state.tiers.jobs),
        "restore_p50_ms": counters.restore_us.quantile(500) / 1000,
        "restore_p99_ms": counters.restore_us.quantile(990) / 1000,
        "restore_error_p50_pct": counters.restore_error_pm.quantile(500) / 10,
        "recompute_error_p50_pct": counters.recompute_error_pm.quantile(500) / 10,
    }


def queued(state: State) -> dict[str, int]:
    """The number of waiting groups by class, after aging."""
    depths = dict.fromkeys(CLASS_NAMES, 0)
    for (_, level), queue in state.waiting.queues.items():
        depths[CLASS_NAMES[level]] += queue.groups
    return depths


def blocks(executor: Executor) -> dict[str, int]:
    """An executor's blocks by state; reserved ones are also free or cached."""
    pool = executor.pool
    return {
        "free": pool.free_blocks - pool.cached_blocks,
        "cached": pool.cached_blocks,
        "held": pool.held_blocks,
        "fenced": pool.fenced_blocks,
        "dirty": pool.dirty_blocks,
        "copying": pool.copying_blocks,
        "reserved": pool.reserved,
    }


def used_share(executor: Executor) -> float:
    """The share of an executor's blocks that running sequences hold."""
    return executor.pool.held_blocks / executor.pool.blocks


def waste_tokens(executor: Executor) -> int:
    """Token slots without a token in the tables of running sequences: ends of last blocks, and blocks given
    out early."""
    block_tokens = executor.pool.block_tokens
    return sum(len(s.table) * block_tokens - s.computed for s in executor.running)


def metric_points(state: State) -> Metrics:
    """All metrics, for export."""
    return [*_counters(state), *_gauges(state), *_histograms(state)]


def _counters(state: State) -> Iterator[MetricPoint]:
    counters = state.counters
    for name, value, group in (
        ("prefix.lookup_tokens", counters.prefix_lookup_tokens, "{token}"),
        ("prefix.hit_tokens", counters.prefix_hit_tokens, "{token}"),
        ("prefill_tokens", counters.prefill_tokens, "{token}"),
        ("recomputed_tokens", counters.recomputed_tokens, "{token}"),
        ("generated_tokens", counters.generated_tokens, "{token}"),
        ("wasted_rows", counters.wasted_rows, "{row}"),
        ("preemptions", counters.preemptions, "{preemption}"),
        ("moves", counters.moves, "{move}"),
        ("role_changes", counters.role_changes, "{change}"),
        ("step.predicted_duration", counters.predicted_us / _US, "s"),
    ):
        yield MetricPoint(f"{PREFIX}.{name}", value, group, is_counter=True)
    for name, group in TIER_COUNTERS.items():
        yield MetricPoint(
            f"{PREFIX}.tiers.{name.removeprefix('tier_')}", getattr(counters, name), group, is_counter=True
        )
    for mode, steps in counters.steps.items():
        yield MetricPoint(f"{PREFIX}.steps", steps, "{step}", ((c.OVERLAP_MODE, mode),), is_counter=True)
    for code, requests in counters.rejected.items():
        yield MetricPoint(
            f"{PREFIX}.rejected", requests, "{request}", ((c.ERROR_TYPE, str(code)),), is_counter=True
        )
    for reason, sequences in counters.finished.items():
        yield MetricPoint(
            f"{PREFIX}.finished", sequences, "{sequence}", (("reason", reason),), is_counter=True
        )


def usage_points(state: State, model: str) -> Iterator[MetricPoint]:
    """The usage of the tenants of a model."""
    for tenant, usage in sorted(state.counters.usage.items()):
        whose: Attributes = ((c.TENANT, tenant), ("model", model))
        for name, count in asdict(usage).items():
            unit = "{request}" if name == "requests" else "{token}"
            yield MetricPoint(f"{PREFIX}.usage.{name}", count, unit, whose, is_counter=True)


def _gauges(state: State) -> Iterator[MetricPoint]:
    for name, groups in queued(state).items():
        yield MetricPoint(f"{PREFIX}.queue.requests", groups, "{request}", (("slo.class", name),))
    yield MetricPoint(f"{PREFIX}.queue.awaiting_executor", awaiting_executor(state), "{request}")
    for executor in state.executors.values():
        where: Attributes = ((c.EXECUTOR, executor.hello.executor),)
        yield MetricPoint(f"{PREFIX}.running", len(executor.running), "{sequence}", where)
        yield MetricPoint(f"{PREFIX}.blocks_used", used_share(executor), "1", where)
        yield MetricPoint(f"{PREFIX}.waste_tokens", waste_tokens(executor), "{token}", where)
        for kind, count in blocks(executor).items():
            yield MetricPoint(f"{PREFIX}.blocks", count, "{block}", (*where, ("state", kind)))
        yield from _links(executor, where)
    yield MetricPoint(f"{PREFIX}.tiers.jobs", len(state.tiers.jobs), "{job}")
    counters = state.counters
    yield MetricPoint(f"{PREFIX}.step.budget_tokens", counters.budget_tokens, "{token}")
    yield MetricPoint(f"{PREFIX}.prefix.hit_ratio", counters.prefix_hit_pm / _PER_MILLE, "1")
    yield MetricPoint(f"{PREFIX}.recompute_overhead", counters.recompute_overhead_pm / _PER_MILLE, "1")


def _links(executor: Executor, where: Attributes) -> Iterator[MetricPoint]:
    """The links to and from the tier below; a rate is 0 until a copy has been measured."""
    for direction, link in (("up", executor.up), ("down", executor.down)):
        there = (*where, ("direction", direction))
        yield MetricPoint(
            f"{PREFIX}.tiers.rate", link.bytes_per_second if link.copies_seen else 0, "By/s", there
        )
        yield MetricPoint(f"{PREFIX}.tiers.pending", link.pending_bytes, "By", there)
        yield MetricPoint(f"{PREFIX}.tiers.moved", link.moved_bytes, "By", there, is_counter=True)


def _histograms(state: State) -> Iterator[HistogramPoint]:
    counters = state.counters
    for name, histogram in ((TTFT, counters.ttft_us), (TPOT, counters.tpot_us), (E2E, counters.e2e_us)):
        yield _histogram(name, histogram, _US, "s", _GEN_AI)
    yield _histogram(f"{PREFIX}.inter_token.duration", counters.inter_token_us, _US, "s")
    yield _histogram(f"{PREFIX}.queue.duration", counters.queue_us, _US, "s")
    yield _histogram(f"{PREFIX}.step.duration", counters.step_us, _US, "s")
    yield _histogram(f"{PREFIX}.step.prediction_error", counters.step_error_pm, _PER_MILLE, "1")
    yield _histogram(f"{PREFIX}.tiers.restore.duration", counters.restore_us, _US, "s")
    yield _histogram(f"{PREFIX}.tiers.restore.prediction_error", counters.restore_error_pm, _PER_MILLE, "1")
    yield _histogram(
        f"{PREFIX}.tiers.recompute.prediction_error", counters.recompute_error_pm, _PER_MILLE, "1"
    )


def _histogram(
    name: str, of: Histogram, per: float, group: str, attributes: Attributes = ()
) -> HistogramPoint:
    bounds = [bound / per for bound in of.bounds]
    return HistogramPoint(name, bounds, list(of.counts), of.total / per, group, attributes)


def trace(
    state: State, request: str, wall_offset_us: int, *, tenant: str = "", steps: bool = False
) -> dict[str, Any]:
    """The answer to `headrace.v1.trace.<request>`: the spans of a running or ended request of `tenant`, of
    any tenant if it is empty, as for the operator; with `steps` also the steps of its executors in its time.
    It works without OpenTelemetry. `wall_offset_us` is the wall clock minus the scheduler's monotonic
    clock."""

    def is_wanted(key: tuple[str, str]) -> bool:
        return key[1] == request and tenant in ("", key[0])

    live = next((r for key, r in state.requests.items() if is_wanted(key)), None)
    ended = None if live is not None else state.ended.find(is_wanted)
    if live is not None:
        facts, context = request_record(live, state.now_us), live.trace
    elif ended is not None:
        facts, context = ended.record, ended.trace
    else:
        return {"request_id": request, "state": "unknown"}
    spans = request_spans(facts)
    body: dict[str, Any] = {
        "request_id": request,
        "state": "ended" if live is None else "running",
        "tenant": facts.tenant,
        "model": facts.model,
        "trace_id": c.trace_id(context),
        "detokenizer": facts.detokenizer,
        "choices": [_choice(choice) for choice in facts.choices],
        "spans": to_body(spans),
    }
    if steps:
        within_us = (spans[0].start_us - wall_offset_us, spans[0].end_us - wall_offset_us)
        executors = {chunk.executor for choice in facts.choices for chunk in choice.close.chunks}
        found = state.step_log.between(executors, *within_us)[-MAX_STEPS:]
        body["window"] = state.limits.window
        body["steps"] = {
            name: _step_columns([r for r in found if r.executor == name], wall_offset_us)
            for name in sorted(executors)
        }
    return body


def _choice(choice: Choice) -> dict[str, Any]:
    usage = choice.close.usage
    return {
        "choice": choice.index,
        "reason": choice.reason,
        "tokens": choice.tokens,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "executor": choice.close.executor,
        "error": choice.close.message,
    }


def _step_columns(records: list[StepRecord], wall_offset_us: int) -> dict[str, list[Any]]:
    """The steps as columns; times are wall clock."""
    split = {r.step for r in [r for r in records if r.segments][-MAX_SPLIT:]}
    columns: dict[str, list[Any]] = {
        "planned_us": [r.planned_us + wall_offset_us for r in records],
        "start_us": [r.start_wall_us for r in records],
        "end_us": [r.end_wall_us for r in records],
        "result_us": [r.result_us + wall_offset_us for r in records],
        "segments": [[*r.segments] if r.step in split else [] for r in records],
    }
    return {n: columns[n] if n in columns else [getattr(r, n) for r in records] for n in STEP_COLUMNS}


TTFT_SHARE = 2  # a queue as long as the whole TTFT limit is refused: an executor must be wanted before that
LOWEST = len(CLASS_NAMES) - 1

Terms = dict[str, int]


def executors_wanted(state: State) -> Terms:
    """Executors that the demand needs, by term."""
    waiting = sum(len(group.sequences) for group in state.waiting)
    serving = [e for e in state.executors.values() if not e.draining]
    if not serving:
        return {"rows": min(waiting, 1), "prompt_tokens": 0, "blocks": 0}
    terms = {
        "rows": _rows(state, serving, waiting),
        "prompt_tokens": _prompt_tokens(state, serving),
        "blocks": _blocks(state, serving, waiting),
    }
    if sleepers := len(state.asleep) + sum(e.sleep_by_us > 0 for e in state.executors.values()):
        return {term: min(count, len(serving) + sleepers) for term, count in terms.items()}
    return terms


def scale_points(state: State, model: str) -> Iterator[MetricPoint]:
    """The terms as metrics."""
    for term, executors in executors_wanted(state).items():
        yield MetricPoint(
            "headrace.scale_wanted", executors, "{executor}", (("term", term), ("model", model))
        )


def _rows(state: State, serving: list[Executor], waiting: int) -> int:
    running = [s for e in serving for s in e.running]
    if not (rows := len(running) + waiting):
        return 0
    levels = {s.level for s in running} | {group.level for group in state.waiting}
    bound_us = min(state.limits.classes[level].tbt_us for level in levels)
    tokens = (sum(s.computed for s in running) + state.waiting.queued_tokens) // rows
    return _needed(rows, [_rows_within(e, bound_us, tokens) for e in serving])


def _rows_within(executor: Executor, bound_us: int, tokens: int) -> int:
    """The most decode rows of so many tokens in a step that is predicted to stay within `bound_us`. All slots
    while that is not known, and where one row is too long already: more executors would not help."""
    fits, over = 0, executor.pool.slots + 1
    if executor.cost_model.seen < MIN_STEPS_SEEN:
        return over - 1
    while over - fits > 1:
        rows = (fits + over) // 2
        shape = StepShape(rows=rows, tokens=rows, kv_tokens=rows * (tokens + 1), attention=rows * tokens)
        if executor.cost_model.predict_us(shape) <= bound_us:
            fits = rows
        else:
            over = rows
    return fits or executor.pool.slots


def _prompt_tokens(state: State, serving: list[Executor]) -> int:
    """By the class that needs most: its own prompt tokens and those of higher classes, which go first."""
    known = [e for e in serving if e.cost_model.seen >= MIN_STEPS_SEEN]
    if not known:
        return 0
    speeds = [1_000_000_000 // max(ns_per_token(e), 1) for e in known]  # tokens/s
    most = 0
    for level, slo in enumerate(state.limits.classes):
        if not slo.ttft_us:
            continue
        tokens = sum(prompt_tokens(e, level) for e in serving)
        tokens += sum(queue.tokens for (_, at), queue in state.waiting.queues.items() if at <= level)
        most = max(
            most, _needed(tokens, [speed * slo.ttft_us // TTFT_SHARE // 1_000_000 for speed in speeds])
        )
    return most


def _blocks(state: State, serving: list[Executor], waiting: int) -> int:
    """Waiting sequences need blocks for their tokens and for the mean output."""
    tokens = state.waiting.queued_tokens + waiting * state.mean_output_tokens
    held = sum(e.pool.held_blocks for e in serving)
    return _needed(held + blocks_for(tokens, serving[0].pool.block_tokens), [e.pool.blocks for e in serving])


def _needed(amount: int, capacities: list[int]) -> int:
    """How many executors of the mean capacity the amount needs."""
    return -(-amount * len(capacities) // max(sum(capacities), 1))
