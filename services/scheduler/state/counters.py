"""The scheduler's counters: plain integers in its state, without clock, lock or OpenTelemetry.

The core adds to these attributes; ../reports/status.py computes other values from the state on request, and
shared/telemetry/metrics.py exports both. Counters only grow. No decision depends on them, so the hash of the
state leaves them out.

What each counts: shared/telemetry/counters.py. `_us` are histograms of durations, `_pm` of prediction errors,
|real - predicted| / predicted, per mille; `budget_tokens` and `mode` are those of the last step planned.

`StepLog` keeps the last steps for traces, in a ring, and chooses the steps that become spans.

These are the first step of each second, and steps with a prompt chunk of a traced request, but at most one
each SPAN_EVERY_US: so the cost is bounded at any load. `results` adds steps, the actor exports the spans.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.state.requests import Request
from shared.messages import SEGMENT_LANES, Usage
from shared.telemetry import traces
from shared.telemetry import traces as c
from shared.telemetry.traces import SpanData, Value

LATENCY_BOUNDS_US = (
    1_000, 2_000, 5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 640_000, 1_280_000, 2_560_000,
    5_120_000, 10_240_000, 30_000_000, 60_000_000,
)  # fmt: skip
STEP_BOUNDS_US = (
    500, 1_000, 2_000, 4_000, 6_000, 8_000, 12_000, 16_000, 24_000, 32_000, 50_000, 100_000, 250_000,
    1_000_000,
)  # fmt: skip
MAX_TENANTS = 1_000  # a metric for each: clients without credentials may invent tenants
OTHERS = "(others)"
ERROR_BOUNDS_PM = (10, 20, 50, 100, 150, 200, 300, 500, 1_000, 2_000)


@dataclass(slots=True)
class Histogram:
    """Integers counted by fixed upper bounds, as OpenTelemetry's explicit-bucket histogram: `counts[i]` has
    the values in (bounds[i-1], bounds[i]], the last one those above all bounds."""

    bounds: tuple[int, ...]
    counts: list[int] = field(default_factory=list)
    total: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: int, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def quantile(self, per_mille: int) -> int:
        """The upper bound of the bucket with this quantile. The highest bound for values above it, 0 without
        values."""
        rank, seen = -(-self.count * per_mille // 1000), 0
        if not rank:
            return 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen >= rank:
                return bound
        return self.bounds[-1]


@dataclass(slots=True)
class TenantUsage:
    """What the ended requests of a tenant have used."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts: found in a cache, not computed
    completion_tokens: int = 0


@dataclass(slots=True)
class Counters:
    """See the top of this file."""

    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    wasted_rows: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    moves: int = 0
    adapter_loads: int = 0
    role_changes: int = 0
    predicted_us: int = 0
    loads: int = 0
    loads_declined: int = 0
    loads_failed: int = 0
    l1_hit_blocks: int = 0
    l2_hit_blocks: int = 0
    restored_tokens: int = 0
    stored_blocks: int = 0
    stored_ahead_blocks: int = 0
    stores_failed: int = 0
    dropped_blocks: int = 0
    dropped_preempted_blocks: int = 0
    tier_backoffs: int = 0
    budget_tokens: int = 0
    mode: str = ""
    steps: dict[str, int] = field(default_factory=dict)
    rejected: dict[int, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    usage: dict[str, TenantUsage] = field(default_factory=dict)
    queue_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    ttft_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    inter_token_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    tpot_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    e2e_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    step_us: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_US))
    step_error_pm: Histogram = field(default_factory=lambda: Histogram(ERROR_BOUNDS_PM))
    restore_us: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_US))
    restore_error_pm: Histogram = field(default_factory=lambda: Histogram(ERROR_BOUNDS_PM))
    recompute_error_pm: Histogram = field(default_factory=lambda: Histogram(ERROR_BOUNDS_PM))

    def count_step(self, mode: str) -> None:
        """Count a planned step by its overlap mode."""
        self.mode = mode
        self.steps[mode] = self.steps.get(mode, 0) + 1

    def count_rejected(self, code: int) -> None:
        """Count a refused request."""
        self.rejected[code] = self.rejected.get(code, 0) + 1

    def count_finished(self, reason: str) -> None:
        """Count an ended sequence: stop, length, error, cancelled."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def add_usage(self, tenant: str, usage: Usage) -> None:
        """Count an ended request. Above MAX_TENANTS tenants the others are counted together."""
        if tenant not in self.usage and len(self.usage) >= MAX_TENANTS:
            tenant = OTHERS
        counts = self.usage.setdefault(tenant, TenantUsage())
        counts.requests += 1
        counts.prompt_tokens += usage.prompt_tokens
        counts.cached_tokens += usage.cached_tokens
        counts.completion_tokens += usage.completion_tokens

    def add_ended(self, e2e_us: int, decode_us: int, tokens: int) -> None:
        """Count a sequence that ended normally, `decode_us` after the first of its `tokens`."""
        self.e2e_us.add(e2e_us)
        if tokens > 1:
            self.tpot_us.add(decode_us // (tokens - 1))

    def add_step(self, took_us: int, predicted_us: int) -> None:
        """Count a step; `predicted_us` is 0 if it was not predicted."""
        self.step_us.add(took_us)
        if predicted_us:
            self.predicted_us += predicted_us
            self.step_error_pm.add(abs(took_us - predicted_us) * 1000 // predicted_us)

    def add_restore(self, took_us: int, predicted_us: int) -> None:
        """Count a load of blocks from a tier."""
        self.restore_us.add(took_us)
        if predicted_us:
            self.restore_error_pm.add(abs(took_us - predicted_us) * 1000 // predicted_us)

    def add_recompute(self, took_us: int, predicted_us: int) -> None:
        """Count the recomputation of a resumed sequence."""
        if predicted_us:
            self.recompute_error_pm.add(abs(took_us - predicted_us) * 1000 // predicted_us)

    @property
    def recompute_overhead_pm(self) -> int:
        """Recomputed tokens / prefilled tokens, per mille."""
        return self.recomputed_tokens * 1000 // max(self.prefill_tokens, 1)

    @property
    def prefix_hit_pm(self) -> int:
        """Prefix hits / tokens looked up, per mille."""
        return self.prefix_hit_tokens * 1000 // max(self.prefix_lookup_tokens, 1)


MAX_KEPT = 4_096
SPAN_EVERY_US = 100_000
SECOND_US = 1_000_000
MAX_LINKS = 16
MAX_UNSENT_SPANS = 64  # the actor takes them after each event


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step with a result. `_us` by the scheduler's monotonic clock, `_wall_us` by the executor's."""

    executor: str
    step: int
    planned_us: int
    result_us: int
    start_wall_us: int
    end_wall_us: int
    forward_us: int
    sample_us: int
    wait_us: int
    rows: int
    tokens: int
    prefill_tokens: int
    micro_batch: int
    mode: str
    failed: bool
    host_us: int = 0  # time of the logits processors
    queued_us: int = 0  # the plan waited at the executor for earlier steps
    segments: tuple[int, ...] = ()  # of two micro-batches: see StepResult
    drafts: int = 0
    accepted: int = 0  # of the drafts, those that became tokens

    def by_segment(self) -> Iterator[tuple[int, int, int]]:
        """Index in SEGMENT_LANES, start and length of each timeline segment, us."""
        return zip(self.segments[::3], self.segments[1::3], self.segments[2::3], strict=True)


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step that becomes a span, and the traces of the requests in it."""

    entry: LoggedStep
    epoch: int
    links: tuple[str, ...]


@dataclass(slots=True)
class StepLog:
    """The ring, and the spans that wait for the actor."""

    ring: deque[LoggedStep] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    unsent: deque[StepSpan] = field(default_factory=lambda: deque(maxlen=MAX_UNSENT_SPANS))
    _last_span_us: int = -SECOND_US
    _next_second_us: int = 0

    def add(self, entry: LoggedStep, epoch: int, chunks: list[Request], others: Iterator[Request]) -> None:
        """Keep a step, and make it a span if one is due. `chunks` are the requests with a prompt chunk in it,
        `others` those with a sample row."""
        self.ring.append(entry)
        now_us = entry.result_us
        due = now_us >= self._next_second_us
        if not due and not (
            now_us - self._last_span_us >= SPAN_EVERY_US and any(r.is_traced for r in chunks)
        ):
            return
        if due:
            self._next_second_us = now_us + SECOND_US
        links: dict[str, None] = {}
        for request in (*chunks, *others):
            if request.is_traced:
                links[request.trace] = None
                if len(links) == MAX_LINKS:
                    break
        if links:
            self._last_span_us = now_us
            self.unsent.append(StepSpan(entry, epoch, tuple(links)))

    def between(self, executors: set[str], start_us: int, end_us: int) -> list[LoggedStep]:
        """The steps of these executors that were planned or running within [start, end]."""
        return [
            r
            for r in self.ring
            if r.executor in executors and r.planned_us <= end_us and r.result_us >= start_us
        ]


def step_trace(step: StepSpan) -> str:
    """The traceparent of a step: a trace of its own, since a step serves many requests."""
    name = f"{step.entry.executor}/{step.epoch}/{step.entry.step}"
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return traces.make(digest[:32], digest[32:], sampled=True)


def step_spans(step: StepSpan) -> list[SpanData]:
    """The span of a step, linked to its requests, and those of its timeline segments. The scheduler sends
    them, with the executor as component, from the timestamps in the result."""
    return [_whole(step), *_segments(step.entry)]


def _segments(r: LoggedStep) -> Iterator[SpanData]:
    """The compute and the collectives of the two micro-batches."""
    of_executor: dict[str, Value] = {c.COMPONENT: f"executor.{r.executor}", c.EXECUTOR: r.executor}
    for lane, from_us, took_us in r.by_segment():
        began_us = r.start_wall_us + from_us
        yield SpanData(SEGMENT_LANES[lane], began_us, began_us + took_us, attributes=of_executor)


def _whole(step: StepSpan) -> SpanData:
    r = step.entry
    return SpanData(
        f"step {r.mode}",
        r.start_wall_us,
        r.end_wall_us,
        None,
        {
            c.COMPONENT: f"executor.{r.executor}",
            c.EXECUTOR: r.executor,
            c.STEP: r.step,
            c.BATCH_ID: c.batch_id(r.executor, r.step),
            c.OVERLAP_MODE: r.mode,
            c.OVERLAP_COMM: "two_stream" if r.segments else "off",
            c.MICRO_BATCH: r.micro_batch,
            c.ROWS: r.rows,
            c.TOKENS: r.tokens,
            c.PREFILL_TOKENS: r.prefill_tokens,
            c.FORWARD_US: r.forward_us,
            c.SAMPLE_US: r.sample_us,
            c.WAIT_US: r.wait_us,
            **({c.DRAFTS: r.drafts, c.ACCEPTED: r.accepted} if r.drafts else {}),
        },
        links=step.links,
        error="the step failed" if r.failed else "",
    )
