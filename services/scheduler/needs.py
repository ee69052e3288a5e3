"""What a unit needs of an executor before it may start there."""

from __future__ import annotations

from services.scheduler.growth import spare_blocks
from services.scheduler.policies.promises import by_chunk, on_demand, reserve
from services.scheduler.state import Executor, State
from services.scheduler.waiting import Unit


def promises(state: State, executor: Executor, unit: Unit) -> list[int]:
    """Blocks to promise to each sequence of a unit; the others share the first one's full prompt blocks."""
    block_tokens, head = executor.hello.block_tokens, unit.sequences[0]
    promise = reserve if head.pinned else state.limits.policy.the("kv")
    if len(unit.sequences) > 1 and promise is by_chunk:
        promise = on_demand  # who waits for a fork is promised its blocks
    if len(unit.sequences) == 1:
        return [promise(len(head.tokens), head.max_length, block_tokens)]
    shared = len(head.tokens) // block_tokens
    total = [promise(len(s.tokens), s.max_length, block_tokens) for s in unit.sequences]
    return [total[0]] + [blocks - shared for blocks in total[1:]]


def lacking(state: State, executor: Executor, unit: Unit) -> tuple[int, int]:
    """Blocks and slots that a unit lacks, once the steps in flight are back; none where it is not above 0."""
    ledger = executor.ledger
    coming = ledger.free_blocks - ledger.reserved + ledger.coming_blocks
    blocks = sum(promises(state, executor, unit)) + spare_blocks(state, executor, unit.sequences) - coming
    return blocks, len(unit.sequences) - ledger.free_slots - ledger.fenced_slots


def holds(executor: Executor, unit: Unit) -> bool:
    """True when the executor can run the unit to its end, alone on it."""
    hello, head = executor.hello, unit.sequences[0]
    shared = len(head.tokens) // hello.block_tokens
    total = [reserve(len(s.tokens), s.max_length, hello.block_tokens) for s in unit.sequences]
    blocks = sum(total) - shared * (len(total) - 1)
    return blocks <= hello.blocks and len(total) <= hello.slots and head.max_length <= hello.max_context
