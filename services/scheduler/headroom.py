"""Admission asks here what a group needs of an executor, and how many blocks must stay free.

The running sequences go first: what the rows of the next step lack is never given to one that joins, or each
that joins would push out another at once. And admission that looks at present needs alone preempts sequence
after sequence later on.

Of a sequence that an end-of-sequence token may end, a share of the expected growth is kept free. That removed
more stalls than any victim rule in simulation; the share adapts: each preemption for want of a block adds to
it, each step without one takes a little away (AIMD, as SGLang's new_token_ratio).

A sequence that only its length ends has a known growth. With `reservation=foreseen` such sequences are laid
out in time: each grows by a token a step until it ends and gives back its blocks. The highest point of that
curve has to be free now, as in LightLLM's Past-Future scheduler (arXiv:2507.10150); then no sequence has to
be preempted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.state.policies import on_demand, reserve
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup

LEAST_PM, MOST_PM = 50, 1_000  # per mille of the expected growth
PREEMPTION_ADDS_PM = 100
STEP_DIVIDES = 512


def reservations(state: State, executor: Executor, group: SequenceGroup) -> list[int]:
    """Blocks to promise to each sequence of a group; the others share the first one's full prompt blocks."""
    block_tokens, head = executor.hello.block_tokens, group.sequences[0]
    blocks_for_sequence = reserve if head.pinned else state.limits.policy.function("reservation")
    if len(group.sequences) == 1:
        return [blocks_for_sequence(len(head.tokens), head.max_length, block_tokens)]
    shared = len(head.tokens) // block_tokens
    sizes = [(len(s.tokens), s.max_length, block_tokens) for s in group.sequences]
    total = [
        max(blocks_for_sequence(*size), on_demand(*size)) for size in sizes
    ]  # who waits for a fork has its blocks
    return [total[0]] + [blocks - shared for blocks in total[1:]]


def shortfall(state: State, executor: Executor, group: SequenceGroup) -> tuple[int, int]:
    """Blocks and slots that a group lacks, once the steps in flight are back; none where it is not above
    0."""
    pool = executor.pool
    coming = pool.unreserved_blocks + pool.coming_blocks
    blocks = (
        sum(reservations(state, executor, group)) + headroom_blocks(state, executor, group.sequences) - coming
    )
    return blocks, len(group.sequences) - pool.free_slots - pool.fenced_slots


def fits_alone(executor: Executor, group: SequenceGroup) -> bool:
    """True when the executor can run the group to its end, alone on it."""
    hello, head = executor.hello, group.sequences[0]
    shared = len(head.tokens) // hello.block_tokens
    total = [reserve(len(s.tokens), s.max_length, hello.block_tokens) for s in group.sequences]
    blocks = sum(total) - shared * (len(total) - 1)
    return blocks <= hello.blocks and len(total) <= hello.slots and head.max_length <= hello.max_context


def headroom_blocks(state: State, executor: Executor, joining: Iterable[Sequence] = ()) -> int:
    """Blocks that admission of `joining` must leave free. None on an empty executor for what may end at any
    token, or nothing large could ever start."""
    least = len(rows_without_block(executor))
    if state.limits.policy.greedy:
        return least
    alone = not executor.running  # then it may have all: see holds
    looks_ahead = state.limits.policy.looks_ahead and not alone
    expected, block_tokens, mean = 0, executor.hello.block_tokens, state.mean_output_tokens
    for s in executor.running:  # once an admission, over every row
        if looks_ahead and s.fixed_length:
            continue
        length = len(s.tokens)
        left, most = mean + s.prompt_tokens - length, s.max_length - length
        if left < block_tokens:
            left = block_tokens
        more = length + (left if left < most else most) - (len(s.table) + s.reserved) * block_tokens
        if more > 0:
            expected += more
    spare = expected * executor.headroom_pm // (1000 * block_tokens)
    if looks_ahead:
        ends = [_end(s, len(s.table) + s.reserved, block_tokens) for s in executor.running if s.fixed_length]
        ends += [
            _end(s, on_demand(len(s.tokens), s.max_length, block_tokens), block_tokens)
            for s in joining
            if s.fixed_length
        ]
        spare += _peak_blocks(ends, block_tokens, state.limits.window)
    return max(spare, least)


def headroom_bound(state: State, executor: Executor, joining: Sequence) -> int:
    """At least as many as `headroom_blocks`, without a look at every row."""
    if state.limits.policy.greedy:
        return len(executor.running)
    if state.limits.policy.looks_ahead and (executor.fixed_lengths or joining.fixed_length):
        return executor.pool.blocks
    each = max(state.mean_output_tokens, executor.hello.block_tokens) // executor.hello.block_tokens + 2
    return max(len(executor.running) * each * executor.headroom_pm // 1000, len(executor.running))


def rows_without_block(executor: Executor) -> list[Sequence]:
    """Sequences whose next token needs a block that nobody promised them."""
    block_tokens = executor.hello.block_tokens
    return [
        s
        for s in executor.running
        if not s.reserved
        and s.parent is None
        and not s.awaits_grammar
        and s.planned_length < s.max_length
        and s.computed >= len(s.table) * block_tokens
    ]


class _End(NamedTuple):
    """When a row ends, in steps; the tokens that fit into what it holds; those that its end frees."""

    left: int
    spare: int
    frees: int


def _end(s: Sequence, blocks: int, block_tokens: int) -> _End:
    length, held = len(s.tokens), blocks * block_tokens
    # a cached part is shared
    return _End(s.max_length - length, held - length, max(held - s.cached_tokens, 0))


def _peak_blocks(rows: list[_End], block_tokens: int, late: int) -> int:
    """The most that these will need at one time beyond what they hold now; that one has ended is seen `late`
    steps after. A row that was promised all it may need takes nothing more, and gives nothing to others
    before its end."""
    growing = [row for row in rows if row.spare < row.left]
    alive, spare, freed, peak = len(growing), sum(row.spare for row in growing), 0, 0
    for row in sorted(rows):  # it is highest just before somebody ends; a last block may hold a single token
        peak = max(peak, alive * (row.left + late + block_tokens - 1) - spare - freed)
        if row.spare < row.left:
            alive, spare = alive - 1, spare - row.spare
        freed += row.frees
    return peak // block_tokens


def on_preemption(executor: Executor) -> None:
    """A sequence had to be preempted for want of a block."""
    executor.headroom_pm = min(MOST_PM, executor.headroom_pm + PREEMPTION_ADDS_PM)


def on_step(executor: Executor) -> None:
    """A step went by."""
    executor.headroom_pm = max(LEAST_PM, executor.headroom_pm - executor.headroom_pm // STEP_DIVIDES)


def observe_output(state: State, generated: int) -> None:
    """A sequence has ended after so many tokens."""
    state.mean_output_tokens = max(1, (15 * state.mean_output_tokens + generated) // 16)
