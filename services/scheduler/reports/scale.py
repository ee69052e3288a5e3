"""How many executors the present demand needs, for an autoscaler: three terms, of which the largest counts.

    rows            running and waiting sequences / those that an executor keeps within the time per token
    prompt_tokens   waiting prompt tokens / those that an executor computes within half the TTFT limit
    blocks          KV blocks of both / KV blocks of an executor

The terms are of this moment: how long a demand must last is the autoscaler's to decide. All are 0 without a
request, and at least one is 1 with one. Without an executor no speed is known, so a queue of any
length needs one; the next report, with that executor, has the rest. While executors sleep, no term is more
than there are with them: to wake one takes seconds, to start one more takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.load_shedding import MIN_STEPS_SEEN, ns_per_token, prompt_tokens
from services.scheduler.state.requests import CLASS_NAMES
from services.scheduler.state.state import Executor, State
from shared.kv_blocks import blocks_for
from shared.step_model import StepShape
from shared.telemetry.readings import MetricPoint

TTFT_SHARE = 2  # a queue as long as the whole TTFT limit is refused: an executor must be wanted before that
LOWEST = len(CLASS_NAMES) - 1

Terms = dict[str, int]


def wanted(state: State) -> Terms:
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


def points(state: State, model: str) -> Iterator[MetricPoint]:
    """The terms as metrics."""
    for term, executors in wanted(state).items():
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
