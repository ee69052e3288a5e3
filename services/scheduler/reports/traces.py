"""Answers `headrace.v1.trace.<request>`: the spans of a running or ended request, and the steps of its time.

The actor calls `answer`. It works without OpenTelemetry, from the scheduler's records.
"""

from __future__ import annotations

from typing import Any

from services.scheduler.state.requests import request_record
from services.scheduler.state.state import State
from services.scheduler.state.step_log import StepRecord
from shared.telemetry import traces
from shared.telemetry.traces import Choice, request_spans, to_body

MAX_STEPS = 2_000  # in one answer, the newest: about 200 kB, below the payload limit of any server
MAX_SPLIT = 64  # steps with timeline segments in one answer, the newest: 300 bytes each
COLUMNS = (
    "step", "planned_us", "start_us", "end_us", "result_us", "forward_us", "sample_us", "wait_us", "rows",
    "tokens", "prefill_tokens", "micro_batch", "host_us", "queued_us", "mode", "segments",
)  # fmt: skip


def answer(state: State, request: str, wall_offset_us: int, *, steps: bool = False) -> dict[str, Any]:
    """The trace of a request of any tenant; with `steps` also the steps of its executors in its time.
    `wall_offset_us` is the wall clock minus the scheduler's monotonic clock."""
    live = next((r for key, r in state.requests.items() if key[1] == request), None)
    ended = None if live is not None else state.ended.find(request)
    if live is not None:
        facts, trace = request_record(live, state.now_us), live.trace
    elif ended is not None:
        facts, trace = ended.record, ended.trace
    else:
        return {"request_id": request, "state": "unknown"}
    spans = request_spans(facts)
    body: dict[str, Any] = {
        "request_id": request,
        "state": "ended" if live is None else "running",
        "tenant": facts.tenant,
        "model": facts.model,
        "trace_id": traces.trace_id(trace),
        "detokenizer": facts.detokenizer,
        "choices": [_choice(c) for c in facts.choices],
        "spans": to_body(spans),
    }
    if steps:
        within_us = (spans[0].start_us - wall_offset_us, spans[0].end_us - wall_offset_us)
        executors = {chunk.executor for c in facts.choices for chunk in c.close.chunks}
        found = state.step_log.between(executors, *within_us)[-MAX_STEPS:]
        body["window"] = state.limits.window
        body["steps"] = {
            name: _columns([r for r in found if r.executor == name], wall_offset_us)
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


def _columns(records: list[StepRecord], wall_offset_us: int) -> dict[str, list[Any]]:
    """The steps as columns; times are wall clock."""
    shown = {r.step for r in [r for r in records if r.segments][-MAX_SPLIT:]}
    rows = [
        (
            r.step,
            r.planned_us + wall_offset_us,
            r.start_wall_us,
            r.end_wall_us,
            r.result_us + wall_offset_us,
            r.forward_us,
            r.sample_us,
            r.wait_us,
            r.rows,
            r.tokens,
            r.prefill_tokens,
            r.micro_batch,
            r.host_us,
            r.queued_us,
            r.mode,
            [*r.segments] if r.step in shown else [],
        )
        for r in records
    ]
    return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
