"""The chunk budget: how many prompt tokens a step may take beside its decodes.

The most whose predicted time keeps the time between tokens of the strictest class that runs
(Sarathi-Serve, Agrawal et al. 2024), so that one long prompt stalls nobody; decodes and chunk together
end on a tile of the matrix products, of which a part costs as much as the whole.
"""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.columns import Columns
from services.scheduler.costs import chunk_tokens
from services.scheduler.overlap import MIN_SEEN
from services.scheduler.policies.fills import Share
from services.scheduler.records import Sequence
from services.scheduler.state import Executor, State

COLD_TOKENS = 256  # while nothing is known of the machine
STRETCH_PM = 1_500  # of decodes, what they may take with a chunk where that breaks the promise: see _bound_us
BACKLOG_US = 1_000_000  # of computing that waits: they may take as long once more
ALONE_US = 500_000  # of a step without decodes: a new request waits for its end
TILE_ROWS = 64
GRAIN_TOKENS = 8  # a chunk is a multiple of this, or of a smaller block


def chunk_budget(
    state: State, executor: Executor, columns: Columns, prompts: Collection[Sequence], share: Share
) -> int:
    """Prompt tokens for the step in `columns`, of which the first of `prompts` gets its part first."""
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
    start = next(iter(prompts)).computed
    bound_us = _bound_us(state, executor, columns, prompts)
    grain = min(GRAIN_TOKENS, hello.block_tokens)
    fits = chunk_tokens(executor.costs, columns.shape, start, bound_us, grain, room)
    budget = min(room, fits or hello.block_tokens)
    most = min(room, budget + hello.block_tokens - 1)  # a tile may end within the next block
    tiled = (decodes + most) // TILE_ROWS * TILE_ROWS - decodes
    if tiled > budget and executor.costs.predict_us(columns.shape.with_chunk(start, tiled)) > bound_us:
        tiled -= TILE_ROWS
    return tiled if tiled >= TILE_ROWS else budget


def _bound_us(state: State, executor: Executor, columns: Columns, prompts: Collection[Sequence]) -> int:
    """The shortest time between tokens that was promised to a class that runs; two_batch takes two steps for
    it. Where decodes alone take two thirds of that or more, prompts get half as much time as they, and more
    the more of them wait: else they would starve beside a promise that decodes break by themselves."""
    if not columns.sampled:
        return ALONE_US
    running = zip(state.limits.classes, executor.levels, strict=True)
    bound_us = min(slo.tbt_us for slo, count in running if count)
    bound_us = bound_us if columns.half is None else bound_us // 2
    alone_us = executor.costs.predict_us(columns.shape)
    if STRETCH_PM * alone_us <= 1_000 * bound_us:
        return bound_us
    tokens = sum(prompt.opened_length - prompt.computed for prompt in prompts)
    tile_us = executor.costs.predict_us(columns.shape.with_chunk(0, TILE_ROWS)) - alone_us
    waiting_us = tile_us * tokens // TILE_ROWS
    return max(bound_us, STRETCH_PM * alone_us // 1_000 + alone_us * waiting_us // BACKLOG_US)
