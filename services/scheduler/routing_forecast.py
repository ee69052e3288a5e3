"""Predicts what it costs to start a group on an executor: the input of the routing policies.

    ttft_us   prompts that are already there, by the executor's own speed beside its decodes
              + its own prompt: from the prefix cache, from a tier if that is faster, or computed
              + one loop between scheduler and executor
    harm_us   the time that its prompt adds to the steps of the rows that decode there, summed over the rows

Every term is learned from the executor's own steps and copies, so executors may differ in speed.
"""

from __future__ import annotations

from services.scheduler.recompute_cost import RecomputeCost, backlog_us
from services.scheduler.state.state import Executor
from services.scheduler.state.waiting_queue import SequenceGroup


def forecast(
    executor: Executor, group: SequenceGroup, held_blocks: int, load: tuple[int, int]
) -> tuple[int, int]:
    """`ttft_us` and `harm_us` of a group of whose prompt the executor holds so many blocks; (0, 0) while its
    cost model has seen too little. `load`: how many more blocks a tier holds, and the time to load them."""
    head, costs = group.sequences[0], RecomputeCost.of(executor)
    if not costs.known:
        return 0, 0
    held = held_blocks * executor.hello.block_tokens
    before_us = backlog_us(executor, None, costs)
    compute_us = costs.tokens_us(held, len(head.tokens) - held)
    ready_us = before_us + compute_us + costs.beside_us(len(head.tokens) - held)
    blocks, load_us = load
    if blocks:
        loaded = held + blocks * executor.hello.block_tokens
        rest = max(len(head.tokens) - loaded, 1)
        rest_us = costs.tokens_us(loaded, rest)
        if (later_us := max(load_us, before_us) + rest_us + costs.beside_us(rest)) < ready_us:
            ready_us, compute_us = later_us, rest_us
    return ready_us + executor.cost_model.loop_us, compute_us * costs.base.rows
