"""The chunk budget: how many prompt tokens a step may take beside its decodes.

The most whose predicted time keeps the time between tokens of the strictest class that runs
(Sarathi-Serve, Agrawal et al. 2024), so that one long prompt stalls nobody; decodes and chunk together
end on a tile of the matrix products, of which a part costs as much as the whole.
"""

from __future__ import annotations

from services.scheduler.columns import Columns
from services.scheduler.costs import chunk_tokens
from services.scheduler.overlap import MIN_SEEN
from services.scheduler.policies.fills import Share
from services.scheduler.records import Sequence
from services.scheduler.state import Executor, State

COLD_TOKENS = 256  # while nothing is known of the machine
STRETCH = 2  # of decodes, what they may take with a chunk where that breaks the promise: prompts would starve
ALONE_US = 500_000  # of a step without decodes: a new request waits for its end
TILE_ROWS = 64


def chunk_budget(state: State, executor: Executor, columns: Columns, first: Sequence, share: Share) -> int:
    """Prompt tokens for the step in `columns`, of which `first` gets its part first."""
    hello, decodes = executor.hello, len(columns.slots)
    room = hello.max_step_tokens - decodes
    if room <= 0 or share.prompts == "whole":
        return room
    if share.prompts == "block":
        return min(room, hello.block_tokens)
    # a step full of decodes still takes one block of prompt, or prefill would starve
    room = min(room, max(state.limits.step_tokens - decodes, hello.block_tokens))
    if executor.costs.seen < MIN_SEEN:
        return min(room, COLD_TOKENS)
    bound_us = max(_bound_us(state, executor, columns), STRETCH * executor.costs.predict_us(columns.shape))
    fits = chunk_tokens(executor.costs, columns.shape, first.computed, bound_us, hello.block_tokens, room)
    budget = min(room, fits or hello.block_tokens)
    most = min(room, budget + hello.block_tokens - 1)  # a tile may end within the next block
    tiled = (decodes + most) // TILE_ROWS * TILE_ROWS - decodes
    if (
        tiled > budget
        and executor.costs.predict_us(columns.shape.with_chunk(first.computed, tiled)) > bound_us
    ):
        tiled -= TILE_ROWS
    return tiled if tiled >= TILE_ROWS else budget


def _bound_us(state: State, executor: Executor, columns: Columns) -> int:
    """The shortest time between tokens that was promised to a class that runs; two_batch takes two steps for
    it."""
    if not columns.sampled:
        return ALONE_US
    running = zip(state.limits.classes, executor.levels, strict=True)
    bound_us = min(slo.tbt_us for slo, count in running if count)
    return bound_us if columns.half is None else bound_us // 2
