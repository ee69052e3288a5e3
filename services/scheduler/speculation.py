"""Gives the decodes of a step their drafts: tokens that the executor foresees, and computes in the same step.

A draft is kept where the sampler chooses it, so drafts change the time of a step, and never a token.

    step n      row of 1 + 3 tokens, from place p at most     computed: p + 4
    step n + 1  row at the device's own place                  computed: p + 5, planned before the result of n
    result n    2 tokens: one draft was kept, two refused      computed: p + 3

So `Sequence.computed` is an upper bound while drafts are in flight, and exact otherwise. A row has blocks up
to that bound. KV after the device's length is written again before a row reads it.

How many: by price, unless `Limits.speculate` is a number. A draft is worth its place in a step while it
brings more tokens for its part of the step's time than the step has for all of its time: of a row whose
drafts are kept with probability a, the j-th draft brings a^j tokens (DSpark's rule, vllm-project/vllm#47808).
Where no draft pays, a row tries one now and then, and another one at once while they are kept.

An engine that computes its steps as recorded graphs pays for as many drafts in each row as one row has.
Others pay only for the drafts that they find. All numbers are integers, so that a replay finds the same.
"""

from __future__ import annotations

from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import AUTO, Executor, State
from services.scheduler.step_planner import StepColumns
from shared.messages import AT_DEVICE
from shared.step_model import StepShape

MIN_SEEN = 16  # steps before the cost model is used
MARGIN_PM = 30  # that drafts must gain
TRY_EVERY = 64  # steps after a refused draft until a row tries another one
TRY_FIRST = 8  # steps of a sequence until it tries one
TRY_STEPS = 2  # of TRY_EVERY, in which rows of recorded steps try one
LEAST_PM = 5  # of a draft's probability
PREDICTED_PM = 900  # drafts that are kept of a request with a prediction, until it is learned
GRAPHS = (1, 3, 7)  # drafts of a row for which engines record graphs


def add_drafts(
    state: State, executor: Executor, columns: StepColumns, rows: list[Sequence], alone: bool
) -> None:
    """Give the first rows of `columns`, decodes of these sequences, their drafts. `alone`: no prompts follow,
    whose computation they would delay."""
    hello, wanted = executor.hello, list[int]()
    if alone and len(rows) <= (hello.max_draft_rows or len(rows)):
        wanted = _wanted(state, executor, columns, rows)
    if not any(wanted):
        if not any(flight.drafts for flight in executor.in_flight):
            return  # the step is the same as without speculation
        wanted = [0] * len(rows)
    left, expected_pm = hello.max_step_tokens - len(rows), 0
    for at, (s, count) in enumerate(zip(rows, wanted, strict=True)):
        if count:
            count = min(count, hello.max_drafts, left, s.max_length - 1 - s.computed)
            count = _with_blocks(executor, columns, s, count)
        if not (count or s.drafting.in_flight):
            continue
        columns.from_device[at] = AT_DEVICE
        columns.counts[at] += count
        columns.drafts += count
        s.computed += count
        s.steps -= count  # see Sequence.steps_planned
        s.drafting.in_flight += count
        left -= count
        expected_pm += count * s.drafting.found_pm
    if columns.drafts:
        executor.count_decodes(columns.drafts)
        columns.found_drafts = columns.drafts if executor.has_graphs else expected_pm // 1_000


def _with_blocks(executor: Executor, columns: StepColumns, s: Sequence, count: int) -> int:
    """As many of these drafts as have blocks. No other row goes without a block for them."""
    end = s.computed + count
    if end > s.table_capacity and executor.pool.unreserved_blocks > len(executor.running):
        unsent = len(s.table) - s.table_sent
        if not unsent or columns.has_table_room(unsent):
            columns.grow(executor, s, end)
    return max(min(count, s.table_capacity - s.computed), 0)


def _wanted(state: State, executor: Executor, columns: StepColumns, rows: list[Sequence]) -> list[int]:
    """How many drafts each row is to have."""
    if state.limits.speculate != AUTO:
        return [state.limits.speculate * s.request.tokenized.speculate for s in rows]
    pace, step = executor.drafting, executor.step + 1
    if executor.cost_model.seen < MIN_SEEN:
        return [0] * len(rows)
    fresh = [s for s in rows if s.drafting.count < 0]
    for s in fresh:
        s.drafting.found_pm, s.drafting.kept_pm = pace.found_ppm // 1_000, pace.kept_ppm // 1_000
        if s.request.tokenized.prediction:
            s.drafting.found_pm, s.drafting.kept_pm = PREDICTED_PM, max(PREDICTED_PM, s.drafting.kept_pm)
        s.drafting.tried_step = step - TRY_EVERY + TRY_FIRST
    if fresh or step - pace.chosen_step > len(rows) // 4:
        _choose(executor, columns.shape, rows)
        pace.chosen_step = step
    if executor.has_graphs:  # a draft costs as much as one in each row: all rows try in the same steps
        together = int(step % TRY_EVERY < TRY_STEPS)
        return [s.drafting.count or together * s.request.tokenized.speculate for s in rows]
    return [
        s.drafting.count or int(s.request.tokenized.speculate and step - s.drafting.tried_step >= TRY_EVERY)
        for s in rows
    ]


def _choose(executor: Executor, shape: StepShape, rows: list[Sequence]) -> None:
    """Choose the number of drafts of each row with which the step has the most tokens for its time."""
    offers = _offers(executor, rows)
    graphs, most = executor.has_graphs, executor.hello.max_drafts
    sizes = [k for k in GRAPHS if k <= most] if graphs else _sizes(len(offers))
    predict_us = executor.cost_model.predict_us
    best, tokens, took_us = 0, len(rows) * (1_000 + MARGIN_PM), max(predict_us(shape), 1)
    for size in sizes:
        part = [offer for offer in offers if offer[1] <= size] if graphs else offers[:size]
        added = size * len(rows) if graphs else size
        step_us = max(predict_us(shape.with_drafts(added, again=not graphs)), 1)
        gained = 1_000 * len(rows) + sum(-offer[0] for offer in part)
        if gained * took_us > tokens * step_us:
            best, tokens, took_us = size, gained, step_us
    for s in rows:
        s.drafting.count = best * s.request.tokenized.speculate if graphs else 0
    if not graphs:
        for _, nth, _, s in offers[:best]:
            s.drafting.count = nth  # a row's offers come in order


def _offers(executor: Executor, rows: list[Sequence]) -> list[tuple[int, int, int, Sequence]]:
    """(minus its probability per mille, which draft of its row, sequence) for each draft that a row may have,
    the likeliest first. Where only drafts that are found cost something, they count as found."""
    offers, most, graphs = [], executor.hello.max_drafts, executor.has_graphs
    for s in rows:
        chance = s.drafting.found_pm if graphs else 1_000
        for nth in range(1, most + 1 if s.request.tokenized.speculate else 1):
            chance = chance * s.drafting.kept_pm // 1_000
            if chance < LEAST_PM:
                break
            offers.append((-chance, nth, s.seq, s))
    offers.sort(key=lambda offer: offer[:3])
    return offers


def _sizes(most: int) -> list[int]:
    """Numbers up to `most`: 1, 2, 3, 4, 6, 8, 12, ..., and `most` itself."""
    sizes = {most}
    size = 1
    while size < most:
        sizes |= {size, min(most, size * 3 // 2)}
        size *= 2
    return sorted(sizes - {0})
