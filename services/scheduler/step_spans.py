"""A step as a span: component executor, though the scheduler sends it, from the stamps in its result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from services.scheduler.steps import StepRecord, StepSpan
from shared import conventions as c
from shared import telemetry
from shared.messages.steps import PIECE_LANES
from shared.spans import SpanRecord, Value


def step_trace(step: StepSpan) -> str:
    """The traceparent of a step: a trace of its own, since a step serves many requests."""
    name = f"{step.record.executor}/{step.epoch}/{step.record.step}"
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return telemetry.make(digest[:32], digest[32:], sampled=True)


def step_spans(step: StepSpan) -> list[SpanRecord]:
    """The span of a step, linked to the requests it serves; of one in two halves, what these did when."""
    return [_whole(step), *_pieces(step.record)]


def _pieces(r: StepRecord) -> Iterator[SpanRecord]:
    """The ranks' talk of A under the compute of B, and the other way round."""
    of_executor: dict[str, Value] = {c.COMPONENT: f"executor.{r.executor}", c.EXECUTOR: r.executor}
    for lane, from_us, took_us in r.by_piece():
        began_us = r.start_wall_us + from_us
        yield SpanRecord(PIECE_LANES[lane], began_us, began_us + took_us, attributes=of_executor)


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
            c.OVERLAP_COMM: "two_stream" if r.pieces else "off",
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
