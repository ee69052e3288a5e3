"""A step as a span: component executor, though the scheduler sends it, from the stamps in its result."""

from __future__ import annotations

import hashlib

from services.scheduler.steps import StepSpan
from shared import conventions as c
from shared import telemetry
from shared.spans import SpanRecord


def step_trace(step: StepSpan) -> str:
    """The traceparent of a step: a trace of its own, since a step serves many requests."""
    name = f"{step.record.executor}/{step.epoch}/{step.record.step}"
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return telemetry.make(digest[:32], digest[32:], sampled=True)


def step_span(step: StepSpan) -> SpanRecord:
    """The span of a step, linked to the requests it serves."""
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
