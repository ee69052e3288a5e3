"""Builds a StepPlan, column by column, for the step planner; `fork` gives choices their parent's prompt.

Blocks come from the executor's pool: first from a sequence's reservation, then from unreserved ones.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial

from services.scheduler.state.requests import ChunkRecord, Sequence
from services.scheduler.state.state import Executor, Row
from shared.kv_blocks import blocks_for
from shared.messages import StepPlan, ints
from shared.step_model import StepShape

EMPTY = partial(array, "i")  # as `ints()`, in a third of the time
NO_ROWS = StepShape(0, 0, 0, 0)
MAX_TABLE_ENTRIES = 8_192  # in one plan: 32 KiB; a longer table needs a plan without others


@dataclass(slots=True)
class StepColumns:
    """The columns of a StepPlan while it is being built."""

    mode: str
    micro_batch: int | None  # 0 or 1, in mode two_batch
    slots: array[int] = field(default_factory=EMPTY)
    starts: array[int] = field(default_factory=EMPTY)
    counts: array[int] = field(default_factory=EMPTY)
    from_device: array[int] = field(default_factory=EMPTY)
    sample_rows: array[int] = field(default_factory=EMPTY)
    sample_slots: array[int] = field(default_factory=EMPTY)
    table_slots: array[int] = field(default_factory=EMPTY)
    table_first: array[int] = field(default_factory=EMPTY)
    table_counts: array[int] = field(default_factory=EMPTY)
    table_blocks: array[int] = field(default_factory=EMPTY)
    sampled: list[Row] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, ChunkRecord]] = field(default_factory=list)
    shape: StepShape = NO_ROWS  # for the cost model
    two_stream: bool = False

    def has_table_room(self, entries: int) -> bool:
        """Whether a table of so many entries fits in this plan.

        A long table fits if the plan has only the single new blocks of decodes: nearly every plan has those,
        so the table must not wait for a plan without them.
        """
        tabled = len(self.table_blocks)
        return tabled + entries < MAX_TABLE_ENTRIES or tabled == len(self.table_slots)

    def grow_all(self, executor: Executor, rows: list[Sequence]) -> bool:
        """Add the next block to each of these decodes at once. False, without a change, if the executor lacks
        more of a table or if blocks are short: then `grow` handles the rows one by one."""
        if len(rows) >= MAX_TABLE_ENTRIES or any(
            s.computed > s.table_capacity or s.table_sent < len(s.table) for s in rows
        ):
            return False
        reserved = [s for s in rows if s.reserved]
        blocks = executor.pool.try_allocate(len(rows), len(reserved))
        if blocks is None:
            return False
        self.table_slots.extend(ints([s.slot for s in rows]))
        self.table_first.extend(ints([s.table_sent for s in rows]))
        self.table_counts.extend(ints([1]) * len(rows))
        self.table_blocks.extend(ints(blocks))
        for s in reserved:
            s.reserved -= 1
        block_tokens = executor.hello.block_tokens
        for s, block in zip(rows, blocks, strict=True):
            s.table.append(block)
            s.table_sent += 1
            s.table_capacity += block_tokens
        return True

    def grow(self, executor: Executor, sequence: Sequence, length: int) -> bool:
        """Add blocks for `length` tokens, and the unsent part of the table. False if no block is free."""
        table, block_tokens = sequence.table, executor.hello.block_tokens
        short = blocks_for(length, block_tokens) - len(table)
        if short > 0 and sequence.reserved:
            reserved = min(short, sequence.reserved)
            sequence.reserved -= reserved
            short -= reserved
            table.extend(executor.pool.allocate(reserved))
        while short > 0:
            if (block := executor.pool.try_allocate()) is None:
                return False
            table += block
            short -= 1
        if sequence.table_sent < len(table):
            self.table_slots.append(sequence.slot)
            self.table_first.append(sequence.table_sent)
            self.table_counts.append(len(table) - sequence.table_sent)
            self.table_blocks.extend(ints(table[sequence.table_sent :]))
            sequence.table_sent = len(table)
            sequence.table_capacity = len(table) * block_tokens
        return True

    def plan(self, executor: Executor) -> StepPlan:
        """The plan, with the block copies that the executor makes before it."""
        copies, executor.fork_copies = executor.fork_copies, []
        if copies:
            executor.forked_step = executor.step
        return StepPlan(
            exec_epoch=executor.epoch,
            step=executor.step,
            mode=self.mode,
            micro_batch=self.micro_batch or 0,
            slots=self.slots,
            starts=self.starts,
            counts=self.counts,
            from_device=self.from_device,
            sample_rows=self.sample_rows,
            sample_slots=self.sample_slots,
            table_slots=self.table_slots,
            table_first=self.table_first,
            table_counts=self.table_counts,
            table_blocks=self.table_blocks,
            copy_from=ints([source for source, _ in copies]),
            copy_to=ints([target for _, target in copies]),
            two_stream=self.two_stream,
        )


def fork(executor: Executor, parent: Sequence) -> None:
    """Give each child the parent's prompt: full blocks are shared; the partial one is copied before the next
    step, which is the first to write after the prompt."""
    length, block_tokens = parent.computed, executor.hello.block_tokens
    full, tail = divmod(length, block_tokens)
    for child in executor.running:
        if child.parent is not parent:
            continue
        child.parent, child.computed = None, length
        child.table = parent.table[:full]
        child.keyed, child.keys, child.registered = parent.keyed, parent.keys[:full], full
        child.cached_tokens = parent.cached_tokens
        executor.pool.adopt(child.table)
        if tail:
            child.reserved -= 1  # reserved at admission
            child.table += executor.pool.allocate(1)
            executor.fork_copies.append((parent.table[full], child.table[full]))
