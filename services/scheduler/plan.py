"""One step: decode rows first, then the prompt chunks that the token budget leaves room for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.scheduler.records import ChunkNote, Sequence
from services.scheduler.state import Executor, InFlight, Row, State
from shared.messages import StepPlan, ints

MAX_TABLE_ENTRIES = 8_192  # in one plan: 32 of the 64 KiB that a message may have


@dataclass(slots=True)
class _Columns:
    """The columns of a StepPlan while it is being built."""

    slots: array[int] = field(default_factory=ints)
    starts: array[int] = field(default_factory=ints)
    counts: array[int] = field(default_factory=ints)
    from_device: array[int] = field(default_factory=ints)
    sample_rows: array[int] = field(default_factory=ints)
    sample_slots: array[int] = field(default_factory=ints)
    table_slots: array[int] = field(default_factory=ints)
    table_first: array[int] = field(default_factory=ints)
    table_counts: array[int] = field(default_factory=ints)
    table_blocks: array[int] = field(default_factory=ints)
    sampled: list[Row] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, ChunkNote]] = field(default_factory=list)


def plan_step(state: State, executor: Executor) -> bool:
    """Plan and send the executor's next step; False when no row is ready."""
    columns = _Columns()
    decodes = _add_decodes(executor, columns)
    room = executor.hello.max_step_tokens - decodes
    # a step full of decodes still takes one block of prompt, or prefill would starve
    room = min(room, max(state.limits.step_tokens - decodes, executor.hello.block_tokens))
    for sequence in executor.running:
        if room and sequence.prefilling and sequence.leader is None:
            count = min(room, sequence.opened_length - sequence.computed)
            columns.chunks.append((sequence, sequence.note_chunk(state.now_us, count, executor.step + 1)))
            _add_chunk(executor, columns, sequence, count)
            room -= count
    if not columns.slots:
        return False
    _send(state, executor, columns)
    for leader in columns.forks:
        _fork(executor, leader)
    return True


def _add_decodes(executor: Executor, columns: _Columns) -> int:
    """One device-fed row for every running sequence whose next input is its own last sample. This
    loop runs for each row of each step, hence the local names."""
    block_tokens, room = executor.hello.block_tokens, executor.hello.max_step_tokens
    slots, starts, sampled = columns.slots, columns.starts, columns.sampled
    for sequence in executor.running:
        if not sequence.decodable:
            continue
        if len(slots) == room:
            break
        unsent = len(sequence.table) - sequence.table_sent
        if columns.table_blocks and len(columns.table_blocks) + unsent >= MAX_TABLE_ENTRIES:
            continue  # a fork of a long prompt: its table travels with a later step
        start = sequence.computed
        if start >= len(sequence.table) * block_tokens or sequence.table_sent < len(sequence.table):
            _grow_table(executor, columns, sequence, start + 1)
        slots.append(sequence.slot)
        starts.append(start)
        sampled.append((sequence, sequence.placement))
        sequence.computed = start + 1
        sequence.planned_length += 1
        sequence.steps += 1
    count = len(slots)
    columns.counts.extend([1] * count)
    columns.from_device.extend([1] * count)
    columns.sample_rows.extend(range(count))
    columns.sample_slots.extend(slots)
    return count


def _add_chunk(executor: Executor, columns: _Columns, sequence: Sequence, count: int) -> None:
    """One host-fed row of `count` tokens, and sample rows if it reaches the last known token."""
    _grow_table(executor, columns, sequence, sequence.computed + count)
    row = len(columns.slots)
    columns.slots.append(sequence.slot)
    columns.starts.append(sequence.computed)
    columns.counts.append(count)
    columns.from_device.append(0)
    sequence.computed += count
    sequence.steps += 1
    sequence.prefill_chunks += 1
    if sequence.prefilling:
        return
    followers = [s for s in executor.running if s.leader is sequence]
    for sampled in (sequence, *followers):
        columns.sample_rows.append(row)
        columns.sample_slots.append(sampled.slot)
        columns.sampled.append((sampled, sampled.placement))
        sampled.planned_length += 1
    if followers:
        columns.forks.append(sequence)


def _grow_table(executor: Executor, columns: _Columns, sequence: Sequence, length: int) -> None:
    """Blocks for `length` tokens, and whatever part of the table the executor has not seen."""
    table, block_tokens = sequence.table, executor.hello.block_tokens
    while len(table) * block_tokens < length:
        table.append(executor.ledger.allocate())
        sequence.reserved -= 1
    if sequence.table_sent < len(table):
        columns.table_slots.append(sequence.slot)
        columns.table_first.append(sequence.table_sent)
        columns.table_counts.append(len(table) - sequence.table_sent)
        columns.table_blocks.extend(table[sequence.table_sent :])
        sequence.table_sent = len(table)


def _fork(executor: Executor, leader: Sequence) -> None:
    """Give each follower the leader's prompt: full blocks shared, the partial tail copied before
    the next forward, which is the first to write behind the prompt."""
    length, block_tokens = leader.computed, executor.hello.block_tokens
    full, tail = divmod(length, block_tokens)
    for follower in executor.running:
        if follower.leader is not leader:
            continue
        follower.leader, follower.computed = None, length
        follower.table = leader.table[:full]
        for block in follower.table:
            executor.ledger.share(block)
        if tail:
            follower.table.append(executor.ledger.allocate())
            follower.reserved -= 1
            executor.copies.append((leader.table[full], follower.table[full]))


def _send(state: State, executor: Executor, columns: _Columns) -> None:
    executor.step += 1
    copies, executor.copies = executor.copies, []
    plan = StepPlan(
        exec_epoch=executor.epoch,
        step=executor.step,
        mode="single" if state.limits.window == 1 else "run_ahead",
        micro_batch=0,
        slots=columns.slots,
        starts=columns.starts,
        counts=columns.counts,
        from_device=columns.from_device,
        sample_rows=columns.sample_rows,
        sample_slots=columns.sample_slots,
        table_slots=columns.table_slots,
        table_first=columns.table_first,
        table_counts=columns.table_counts,
        table_blocks=columns.table_blocks,
        copy_from=ints(source for source, _ in copies),
        copy_to=ints(target for _, target in copies),
    )
    executor.in_flight.append(InFlight(executor.step, columns.sampled, state.now_us, plan, columns.chunks))
    state.send(executor.source, plan)
