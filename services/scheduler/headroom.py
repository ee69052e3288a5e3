"""Blocks that sequence groups lack on an executor, and those that admission leaves free: the headroom.

`shortfall` computes the blocks that sequence groups lack, `headroom_blocks` those that admission must leave
free. A sequence leaves a living executor, and gives its blocks back, through `withdraw`.

Blocks for rows of the next step are never given to a group that joins: else each group that joins would
preempt another one at once. Admission that only looks at present needs leads to many preemptions later.

For sequences that an end-of-sequence token may end, a share of the expected growth stays free. In simulation
this removed more stalls than any victim rule. The share adapts: each preemption for lack of a block adds to
it, each step without one takes a little away (AIMD, as SGLang's new_token_ratio).

A sequence that only its length ends grows in a known way: a token a step, until it ends and frees its blocks.
With `reservation=foreseen` the peak of that curve over all such sequences must be free now, as in LightLLM's
Past-Future scheduler (arXiv:2507.10150); then none of them is preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from services.scheduler import prefix_cache
from services.scheduler.state.policies import on_demand, reserve
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.messages import SlotClose

LEAST_PM, MOST_PM = 50, 1_000  # per mille of the expected growth
PREEMPTION_ADDS_PM = 100
STEP_DIVIDES = 512


def withdraw(state: State, sequence: Sequence, known_tokens: int) -> None:
    """Take a sequence off its executor: its blocks and slot are fenced, and full blocks stay cached.

    The KV of its first `known_tokens` tokens is computed, or is in a step in flight: full blocks of it can
    serve others, or the sequence itself when it resumes.
    """
    executor = state.executors.get(sequence.executor)
    if executor is not None and sequence in executor.running:
        prefix_cache.register(executor, sequence, min(sequence.computed, known_tokens))
        executor.remove(sequence)
        executor.fork_copies = [copy for copy in executor.fork_copies if copy[1] not in sequence.table]
        executor.pool.unreserve(sequence.reserved)
        slots, tenant = [sequence.slot], sequence.tenant
        executor.pool.release(sequence.table, slots, executor.step, sequence.seq, tenant)
        closed = SlotClose(slot=sequence.slot, generation=sequence.generation, last_step=executor.step)
        state.send(executor.source, closed)
    sequence.leave()


def reservations(state: State, executor: Executor, group: SequenceGroup) -> list[int]:
    """Blocks to reserve for each sequence of a group. All share the full prompt blocks of the first."""
    block_tokens, head = executor.hello.block_tokens, group.sequences[0]
    blocks_for_sequence = reserve if head.turn.pinned else state.limits.policy.function("reservation")
    if len(group.sequences) == 1:
        return [blocks_for_sequence(len(head.tokens), head.max_length, block_tokens)]
    shared = len(head.tokens) // block_tokens
    sizes = [(len(s.tokens), s.max_length, block_tokens) for s in group.sequences]
    # a fork takes the blocks of its prompt at once, under any policy
    total = [max(blocks_for_sequence(*size), on_demand(*size)) for size in sizes]
    return [total[0]] + [blocks - shared for blocks in total[1:]]


def shortfall(state: State, executor: Executor, *groups: SequenceGroup) -> tuple[int, int]:
    """Blocks and slots that these groups together will still lack after the steps in flight; 0 or less if
    none. A cached block of their prompts needs no other block while a sequence holds it, or for the second
    group that has it."""
    pool, joining = executor.pool, [s for group in groups for s in group.sequences]
    slots = len(joining) - len(pool.free_slots) - pool.fenced_slots
    blocks = sum([sum(reservations(state, executor, group)) for group in groups])
    blocks -= pool.unreserved_blocks + pool.coming_blocks
    bound = blocks + headroom_bound(state, executor, *joining)
    if bound <= 0:
        return bound, slots
    blocks += headroom_blocks(state, executor, joining)
    if blocks > 0:
        hits = cached_blocks(executor, *groups)
        blocks -= sum(hits.values()) - sum(not pool.refs[block] for block in hits)
    return blocks, slots


def cached_blocks(executor: Executor, *groups: SequenceGroup) -> Counter[int]:
    """The cached blocks of the groups' prompts: how many of the groups have each."""
    return Counter(chain.from_iterable(prefix_cache.lookup(executor, g.sequences[0]) for g in groups))


def can_fit(executor: Executor, group: SequenceGroup) -> bool:
    """True if an otherwise empty executor can run the group to its end."""
    hello, head = executor.hello, group.sequences[0]
    shared = len(head.tokens) // hello.block_tokens
    total = [reserve(len(s.tokens), s.max_length, hello.block_tokens) for s in group.sequences]
    blocks = sum(total) - shared * (len(total) - 1)
    return blocks <= hello.blocks and len(total) <= hello.slots and head.max_length <= hello.max_context


def headroom_blocks(state: State, executor: Executor, joining: Iterable[Sequence] = ()) -> int:
    """Blocks that admission of `joining` must leave free. An empty executor keeps none free for sequences
    that may end at any token: else a large one could never start."""
    least = len(rows_without_block(executor))
    if state.limits.policy.greedy:
        return least
    looks_ahead = state.limits.policy.looks_ahead and bool(executor.running)
    expected, block_tokens, mean = 0, executor.hello.block_tokens, state.mean_output_tokens
    for s in executor.running:  # one loop, over every row for each admission
        if looks_ahead and s.has_fixed_end:
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
        ends = [_end(s, len(s.table) + s.reserved, block_tokens) for s in executor.running if s.has_fixed_end]
        ends += [
            _end(s, on_demand(len(s.tokens), s.max_length, block_tokens), block_tokens)
            for s in joining
            if s.has_fixed_end
        ]
        spare += _peak_blocks(ends, block_tokens, state.limits.window)
    return max(spare, least)


def headroom_bound(state: State, executor: Executor, *joining: Sequence) -> int:
    """An upper bound of `headroom_blocks`, without a loop over all rows."""
    if state.limits.policy.greedy:
        return len(executor.running)
    if state.limits.policy.looks_ahead and (executor.fixed_lengths or any(s.has_fixed_end for s in joining)):
        return executor.pool.blocks
    each = max(state.mean_output_tokens, executor.hello.block_tokens) // executor.hello.block_tokens + 2
    return max(len(executor.running) * each * executor.headroom_pm // 1000, len(executor.running))


def rows_without_block(executor: Executor) -> list[Sequence]:
    """Running sequences without a reserved block for the next token."""
    block_tokens = executor.hello.block_tokens
    return [
        s
        for s in executor.running
        if not s.reserved
        and s.parent is None
        and not s.needs_grammar
        and s.planned_length < s.max_length
        and s.computed >= len(s.table) * block_tokens
    ]


class _End(NamedTuple):
    """The end of a row of known length."""

    left: int  # steps
    spare: int  # tokens that fit into its blocks
    frees: int  # tokens of the blocks that it gives back


def _end(s: Sequence, blocks: int, block_tokens: int) -> _End:
    length, held = len(s.tokens), blocks * block_tokens
    return _End(
        s.max_length - length, held - length, max(held - s.cached_tokens, 0)
    )  # a cached part is shared


def _peak_blocks(rows: list[_End], block_tokens: int, late: int) -> int:
    """The most blocks that these rows will need at one time beyond those they hold.

    The end of a row is seen `late` steps after it. A row with all blocks reserved takes no more, and frees
    none before its end.
    """
    growing = [row for row in rows if row.spare < row.left]
    alive, spare, freed, peak = len(growing), sum(row.spare for row in growing), 0, 0
    for row in sorted(rows):  # a peak is just before a row ends; a last block may hold a single token
        peak = max(peak, alive * (row.left + late + block_tokens - 1) - spare - freed)
        if row.spare < row.left:
            alive, spare = alive - 1, spare - row.spare
        freed += row.frees
    return peak // block_tokens


def raise_headroom(executor: Executor) -> None:
    """A sequence is preempted for lack of a block: keep more free."""
    executor.headroom_pm = min(MOST_PM, executor.headroom_pm + PREEMPTION_ADDS_PM)


def lower_headroom(executor: Executor) -> None:
    """A step has ended: keep a little less free."""
    executor.headroom_pm = max(LEAST_PM, executor.headroom_pm - executor.headroom_pm // STEP_DIVIDES)


def observe_output(state: State, generated: int) -> None:
    """Update the mean output with a sequence that ended after `generated` tokens."""
    state.mean_output_tokens = max(1, (15 * state.mean_output_tokens + generated) // 16)
