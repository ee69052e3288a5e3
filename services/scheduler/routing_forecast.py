"""Predicts what it costs to start a group on an executor: the input of the routing policies.

    ttft_us   the rest of the steps in flight
              + the steps that compute its prompt and those already there, beside the decodes; part of its
              prompt comes from the prefix cache, or from a tier if that is faster
              + one loop between scheduler and executor
    harm_us   the time that its prompt adds to the steps of the rows that decode there, summed over the rows
    tbt_pm    how much of the time between tokens that these rows should keep their steps take, per mille

Every term is learned from the executor's own steps and copies, so executors may differ in speed.
"""

from __future__ import annotations

from services.scheduler.recompute_cost import RecomputeCost
from services.scheduler.state import late_plans
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.step_model import NO_ROWS, StepShape


def forecast(
    state: State, executor: Executor, group: SequenceGroup, held_blocks: int, load: tuple[int, int]
) -> tuple[int, int, int]:
    """`ttft_us`, `harm_us` and `tbt_pm` of a group of whose prompt the executor holds so many blocks; zeros
    while its cost model has seen too little. `load`: how many more blocks a tier holds, and the time to load
    them."""
    costs = RecomputeCost.of(executor)
    if not costs.known:
        return 0, 0, 0
    step_tokens = min(executor.hello.max_step_tokens, state.limits.step_tokens)
    length, held = len(group.sequences[0].tokens), held_blocks * executor.hello.block_tokens
    before = _before(executor)
    _, before_us = costs.steps_us(before, step_tokens)
    us, added_us = costs.steps_us(before.with_chunk(held, max(length - held, 1)), step_tokens)
    in_flight_us = late_plans.in_flight_us(state, executor)
    ready_us = in_flight_us + us
    blocks, load_us = load
    if blocks:
        loaded = held + blocks * executor.hello.block_tokens
        rest = NO_ROWS.with_chunk(loaded, max(length - loaded, 1))
        us, rest_added_us = costs.steps_us(before.with_chunk(loaded, rest.tokens), step_tokens)
        later_us = max(in_flight_us + us, load_us + costs.steps_us(rest, step_tokens)[0])
        if later_us < ready_us:
            ready_us, added_us = later_us, rest_added_us
    harm_us = max(added_us - before_us, 0) * costs.base.rows
    tbt_us, _ = state.limits.strictest(executor.running_by_class)
    return ready_us + executor.cost_model.loop_us, harm_us, costs.base_us * 1_000 // tbt_us


def _before(executor: Executor) -> StepShape:
    """The prompts that are already there, as if they had one length."""
    sums = executor.row_sums()
    tokens, prompts = sums.backlog_tokens, sums.backlog_prompts
    half = tokens // prompts // 2 if prompts else 0
    return StepShape(prompts, tokens, tokens, tokens * half)
