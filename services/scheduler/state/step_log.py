"""`StepLog` keeps the last steps for traces, in a ring, and chooses the steps that become spans.

These are the first step of each second, and steps with a prompt chunk of a traced request, but at most one
each SPAN_EVERY_US: so the cost is bounded at any load. `results` adds steps, the actor exports the spans.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.state.requests import Request
from shared.messages import SEGMENT_LANES
from shared.telemetry import traces
from shared.telemetry import traces as c
from shared.telemetry.traces import SpanRecord, Value

MAX_KEPT = 4_096
SPAN_EVERY_US = 100_000
SECOND_US = 1_000_000
MAX_LINKS = 16
MAX_UNSENT_SPANS = 64  # the actor takes them after each event


@dataclass(frozen=True, slots=True)
class StepRecord:
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

    def by_segment(self) -> Iterator[tuple[int, int, int]]:
        """Index in SEGMENT_LANES, start and length of each timeline segment, us."""
        return zip(self.segments[::3], self.segments[1::3], self.segments[2::3], strict=True)


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step that becomes a span, and the traces of the requests in it."""

    record: StepRecord
    epoch: int
    links: tuple[str, ...]


@dataclass(slots=True)
class StepLog:
    """The ring, and the spans that wait for the actor."""

    ring: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    unsent: deque[StepSpan] = field(default_factory=lambda: deque(maxlen=MAX_UNSENT_SPANS))
    _last_span_us: int = -SECOND_US
    _next_second_us: int = 0

    def add(self, record: StepRecord, epoch: int, chunks: list[Request], others: Iterator[Request]) -> None:
        """Keep a step, and make it a span if one is due. `chunks` are the requests with a prompt chunk in it,
        `others` those with a sample row."""
        self.ring.append(record)
        now_us = record.result_us
        due = now_us >= self._next_second_us
        if not due and not (now_us - self._last_span_us >= SPAN_EVERY_US and any(r.traced for r in chunks)):
            return
        if due:
            self._next_second_us = now_us + SECOND_US
        links: dict[str, None] = {}
        for request in (*chunks, *others):
            if request.traced:
                links[request.trace] = None
                if len(links) == MAX_LINKS:
                    break
        if links:
            self._last_span_us = now_us
            self.unsent.append(StepSpan(record, epoch, tuple(links)))

    def between(self, executors: set[str], start_us: int, end_us: int) -> list[StepRecord]:
        """The steps of these executors that were planned or running within [start, end]."""
        return [
            r
            for r in self.ring
            if r.executor in executors and r.planned_us <= end_us and r.result_us >= start_us
        ]


def step_trace(step: StepSpan) -> str:
    """The traceparent of a step: a trace of its own, since a step serves many requests."""
    name = f"{step.record.executor}/{step.epoch}/{step.record.step}"
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return traces.make(digest[:32], digest[32:], sampled=True)


def step_spans(step: StepSpan) -> list[SpanRecord]:
    """The span of a step, linked to its requests, and those of its timeline segments. The scheduler sends
    them, with the executor as component, from the timestamps in the result."""
    return [_whole(step), *_segments(step.record)]


def _segments(r: StepRecord) -> Iterator[SpanRecord]:
    """The compute and the collectives of the two micro-batches."""
    of_executor: dict[str, Value] = {c.COMPONENT: f"executor.{r.executor}", c.EXECUTOR: r.executor}
    for lane, from_us, took_us in r.by_segment():
        began_us = r.start_wall_us + from_us
        yield SpanRecord(SEGMENT_LANES[lane], began_us, began_us + took_us, attributes=of_executor)


def _whole(step: StepSpan) -> SpanRecord:
    r = step.record
    return SpanRecord(
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
        },
        links=step.links,
        error="the step failed" if r.failed else "",
    )
