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
from itertools import islice
from typing import Any

from services.scheduler import load_shedding, recovery
from services.scheduler.executors import sleep
from services.scheduler.load_shedding import MIN_STEPS_SEEN, ns_per_token, prompt_tokens
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state.counters import LoggedStep, TenantUsage
from services.scheduler.state.requests import CLASS_NAMES, Phase, request_facts
from services.scheduler.state.state import Executor, State
from shared.actor.membership import COLD_START, MIXED, WAITS, WORK
from shared.kv_blocks import blocks_for
from shared.messages import ExecHello
from shared.step_model import StepShape
from shared.telemetry import traces as c
from shared.telemetry.counters import (
    Counted,
    HistogramPoint,
    MetricPoint,
    Metrics,
    declared,
    in_load,
    in_status,
    points,
)
from shared.telemetry.counters import SchedulerCounter as Count
from shared.telemetry.counters import SchedulerLinkCounter as Links
from shared.telemetry.counters import SchedulerSessionCounter as Sessions
from shared.telemetry.counters import SchedulerTierCounter as TierCount
from shared.telemetry.traces import Choice, request_spans, to_body

MAX_STEPS = 2_000  # in one trace, the newest: about 200 kB, below the payload limit of any server
MAX_SPLIT = 64  # steps with timeline segments in one trace, the newest: 300 bytes each
STEP_COLUMNS = (
    "step", "planned_us", "start_us", "end_us", "result_us", "forward_us", "sample_us", "wait_us", "rows",
    "tokens", "prefill_tokens", "micro_batch", "host_us", "queued_us", "mode", "segments",
)  # fmt: skip
LAST_STEPS = 256  # of an executor, for the median of its step time


def load(state: State) -> tuple[tuple[str, int], ...]:
    """Numbers for the heartbeat."""
    options = (
        *((COLD_START, load_shedding.executor_wait_us(state)), (MIXED, int(state.limits.accept_mixed))),
        *(zip((WORK, WAITS), sleep.work(state), strict=True) if state.limits.shares_memory else ()),
    )
    return (*in_load(counted(state)), *(option for option in options if option[1]))


def awaiting_executor(state: State) -> int:
    """The number of waiting groups, parked ones included, whose model has no executor."""
    served = {e.hello.model for e in state.executors.values() if not e.draining}
    return sum(group.request.tokenized.model not in served for group in state.waiting)


def counted(state: State) -> Counted:
    """What is counted, but for counts of a tenant, a class, a link. When nothing runs, requests are 0."""
    counters, phases = state.counters, [s.phase for s in state.sequences.values()]
    return {
        Count.REQUESTS: len(state.requests),
        Count.RUNNING: sum(len(e.running) for e in state.executors.values()),
        Count.WAITING_REQUESTS: len(state.waiting),
        Count.WAITING: phases.count(Phase.WAITING),
        Count.CLOSING: phases.count(Phase.CLOSING),
        Count.AWAITING_EXECUTOR: awaiting_executor(state),
        Count.REFUSED_429: counters.rejected.get(429, 0),
        Count.REFUSED_503: counters.rejected.get(503, 0),
        Count.PREFIX_LOOKUPS: counters.prefix_lookup_tokens,
        Count.PREFIX_HITS: counters.prefix_hit_tokens,
        Count.PREFILLED: counters.prefill_tokens,
        Count.RECOMPUTED: counters.recomputed_tokens,
        Count.GENERATED: counters.generated_tokens,
        Count.WASTED_ROWS: counters.wasted_rows,
        Count.DRAFTS: counters.drafts,
        Count.DRAFT_TOKENS: counters.draft_tokens,
        Count.ACCEPTED_TOKENS: counters.accepted_tokens,
        Count.PREEMPTIONS: counters.preemptions,
        Count.MOVES: counters.moves,
        Count.ADAPTER_LOADS: counters.adapter_loads,
        Count.ROLE_CHANGES: counters.role_changes,
        Count.PREDICTED_TIME: counters.predicted_us,
        Count.BUDGET: counters.budget_tokens,
        Count.HIT_RATIO: counters.prefix_hit_pm,
        Count.RECOMPUTE_OVERHEAD: counters.recompute_overhead_pm,
        **{each: getattr(counters, each.status.rpartition(".")[2]) for each in declared(TierCount)},
        Links.LOOKUPS_OPEN: len(state.tiers.lookups),
        Links.JOBS: len(state.tiers.jobs),
        Links.RESTORE_P50: counters.restore_us.quantile(500) / 1000,
        Links.RESTORE_P99: counters.restore_us.quantile(990) / 1000,
        Links.RESTORE_ERROR_P50: counters.restore_error_pm.quantile(500) / 10,
        Links.RECOMPUTE_ERROR_P50: counters.recompute_error_pm.quantile(500) / 10,
    }


def _of_tenant(usage: TenantUsage) -> Counted:
    return {
        Count.USED_REQUESTS: usage.requests,
        Count.USED_PROMPT_TOKENS: usage.prompt_tokens,
        Count.USED_CACHED_TOKENS: usage.cached_tokens,
        Count.USED_COMPLETION_TOKENS: usage.completion_tokens,
    }


def status(state: State) -> dict[str, object]:
    """The status document. When nothing runs, requests are 0 and all blocks and slots are free."""
    shown, sessions = in_status(counted(state)), state.sessions.counted(state)
    return {
        "policy": str(state.limits.policy),
        **shown,
        Sessions.FOLLOWED.status: sessions.get("running", 0) + sessions.get("idle", 0),
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
        "measured": measured(state, shown["measured"]),
        "usage": {
            tenant: in_status(_of_tenant(usage)) for tenant, usage in sorted(state.counters.usage.items())
        },
    }


def _excluded(state: State, hello: ExecHello) -> dict[str, object]:
    """An executor of a kind that does not serve."""
    why = recovery.kind_refusal(state, hello)
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
        Count.KV_USED.status: round(100 * used_share(executor), 1),
        Count.WASTE.status: waste_tokens(executor),
        "block_tokens": pool.block_tokens,
        Count.SLOTS.status: pool.slots,
        Count.FREE_SLOTS.status: len(pool.free_slots),
        Count.RUNNING.status: len(held),
        "computed_tokens": used,
        "steps": executor.steps_done,
        Count.STEP_P50.status: step_p50_us(state, executor) / 1000,
        "in_flight": len(executor.in_flight),
        **_adapters(executor),
    }


def _adapter_points(state: State) -> Iterator[MetricPoint]:
    """The names of adapters, those with a waiting and those with a running sequence, as vLLM has them."""
    if places := sum(executor.hello.adapter_places for executor in state.executors.values()):
        waiting = {group.request.tokenized.adapter_name for group in state.waiting} - {""}
        every = [s for executor in state.executors.values() for s in executor.running]
        running = {s.request.tokenized.adapter_name for s in every} - {""}
        yield Count.ADAPTERS.point(places, str(places), ",".join(sorted(waiting)), ",".join(sorted(running)))


def _adapters(executor: Executor) -> dict[str, object]:
    """The adapters of an executor that has places for some."""
    part = load_shedding.adapting() if executor.hello.adapter_places else None
    return {} if part is None else {"adapters": part.shown(executor)}


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
        "reuse_pm": state.reuse.mean_pm,
        "chunk_tokens": executor.chunk_tokens,
    }
    up = (Links.UP_RATE, Links.UP_MOVED, Links.UP_PENDING)
    down = (Links.DOWN_RATE, Links.DOWN_MOVED, Links.DOWN_PENDING)
    for name, link, counts in ("up", executor.up, up), ("down", executor.down, down):
        values = link.bytes_per_second if link.copies_seen else 0, link.moved_bytes, link.pending_jobs
        facts[f"{name}_block_us"] = link.block_us(executor.hello.bytes_per_block)
        facts |= in_status(dict(zip(counts, values, strict=True)))
    return facts


def measured(state: State, counts: dict[str, Any]) -> dict[str, dict[str, object]]:
    """The `counts` since the start with the rest; times are upper bounds of a histogram's buckets."""
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
            **counts["steps"],
            "step_p50_ms": counters.step_us.quantile(500) / 1000,
            "prediction_error_p50_pct": counters.step_error_pm.quantile(500) / 10,
        },
        "tokens": {
            **counts["tokens"],
            "prefix_hit_pct": counters.prefix_hit_pm / 10,
            "recompute_overhead_pct": counters.recompute_overhead_pm / 10,
        },
        "drafts": {
            **counts["drafts"],
            "accepted_pct": round(100 * counters.accepted_tokens / max(counters.draft_tokens, 1), 1),
            "tokens_a_row": round(1 + counters.accepted_tokens / max(counters.drafts, 1), 2),
        },
        "tiers": counts["tiers"],
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
    whole = {each: value for each, value in counted(state).items() if not each.attributes}
    return [*points(whole), *_labelled(state), *_sessions(state), *_histograms(state)]


def _labelled(state: State) -> Iterator[MetricPoint]:
    for mode, steps in state.counters.steps.items():
        yield Count.STEPS.point(steps, mode)
    for code, requests in state.counters.rejected.items():
        yield Count.REJECTED.point(requests, str(code))
    for reason, sequences in state.counters.finished.items():
        yield Count.FINISHED.point(sequences, reason)
    for name, groups in queued(state).items():
        yield Count.QUEUED.point(groups, name)
    yield from _adapter_points(state)
    for executor in state.executors.values():
        name = executor.hello.executor
        yield Count.RUNNING.point(len(executor.running), name)
        yield Count.BLOCKS_USED.point(used_share(executor), name)
        yield Count.WASTE.point(waste_tokens(executor), name)
        for kind, count in blocks(executor).items():
            yield Count.BLOCKS.point(count, name, kind)
        for direction, link in (("up", executor.up), ("down", executor.down)):  # a rate needs a copy
            yield Links.RATE.point(link.bytes_per_second if link.copies_seen else 0, name, direction)
            yield Links.PENDING.point(link.pending_bytes, name, direction)
            yield Links.MOVED.point(link.moved_bytes, name, direction)


def _sessions(state: State) -> Iterator[MetricPoint]:
    found = state.sessions.counted(state)
    for name in ("running", "idle", "kept"):
        if name in found:
            yield Sessions.SESSIONS.point(found[name], name)
    for tool in found.get("tools", ()):
        yield Sessions.PAUSE.point(tool["p50_us"], tool["tool"])
    for tier, count in found.get("returns", {}).items():
        yield Sessions.RETURNS.point(count, tier)
    for cause in ("released", "superseded", "over"):
        if cause in found:
            yield Sessions.ENDED.point(found[cause], cause)
    for each, name in ((Sessions.PREFETCHED, "prefetched"), (Sessions.WASTED, "wasted")):
        if name in found:
            yield each.point(found[name])


def usage_points(state: State, model: str) -> Iterator[MetricPoint]:
    """The usage of the tenants of a model."""
    for tenant, usage in sorted(state.counters.usage.items()):
        for each, count in _of_tenant(usage).items():
            yield each.point(count, tenant, model)


def _histograms(state: State) -> Iterator[HistogramPoint]:
    counters, ours = state.counters, ("text_completion", c.PROVIDER)
    for each, of in (
        (Count.TTFT, counters.ttft_us),
        (Count.TPOT, counters.tpot_us),
        (Count.E2E, counters.e2e_us),
        (Count.INTER_TOKEN, counters.inter_token_us),
        (Count.QUEUE_TIME, counters.queue_us),
        (Count.STEP_TIME, counters.step_us),
        (Count.STEP_ERROR, counters.step_error_pm),
        (Links.RESTORE_TIME, counters.restore_us),
        (Links.RESTORE_ERROR, counters.restore_error_pm),
        (Links.RECOMPUTE_ERROR, counters.recompute_error_pm),
    ):
        yield each.histogram(of.bounds, of.counts, of.total, *(ours if each.attributes else ()))


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
        facts, context = request_facts(live, state.now_us), live.trace
    elif ended is not None:
        facts, context = ended.facts, ended.trace
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


def _step_columns(records: list[LoggedStep], wall_offset_us: int) -> dict[str, list[Any]]:
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
        yield Count.WANTED.point(executors, term, model)


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
