"""One step: decode rows first, then the prompt chunks that the chunk budget leaves room for."""

from __future__ import annotations

from services.scheduler import comm, overlap, preempt, prefix
from services.scheduler.budget import chunk_budget
from services.scheduler.columns import MAX_TABLE_ENTRIES, Columns, fork
from services.scheduler.halves import balance
from services.scheduler.policies.fills import Share, View
from services.scheduler.records import Sequence
from services.scheduler.state import Executor, InFlight, State
from services.scheduler.tiers import places
from shared.messages import ints
from shared.step_model import StepShape

ROW_NUMBERS = ints(range(65_536))  # a slice of it is made in no time


def plan_next(state: State, executor: Executor) -> bool:
    """Plan and send the executor's next step; False when its window is full or no row is ready."""
    mode, depth = overlap.mode_of(state, executor)
    if len(executor.in_flight) >= depth:
        return False
    needy = preempt.make_room(state, executor)
    executor.holds = needy > 0 and places.worth_waiting(state, executor, needy)
    if executor.holds or places.in_time(state, executor, needy):
        return False
    if mode != "two_batch":
        return _plan_step(state, executor, mode, None)
    other = 1 - executor.pace.half
    halves = (other, 1 - other, other)  # rows may move to the first, where those that stay lack blocks
    return any(_plan_step(state, executor, mode, half) for half in halves)


def _plan_step(state: State, executor: Executor, mode: str, half: int | None) -> bool:
    decodes, prompts = ready_rows(executor, mode == "run_ahead", half)
    if half is not None and decodes:
        decodes = balance(executor, half, decodes)
    stalled_us = state.now_us - executor.decoded_us if decodes and executor.decoded_us else 0
    fill = state.limits.policy.the("fill")
    share: Share = fill(View(len(decodes), len(prompts), stalled_us))
    columns = Columns(mode, half)
    if share.decodes and _add_decodes(state, executor, columns, decodes):
        executor.decoded_us = state.now_us
    if prompts and share.prompts != "none":
        _add_chunks(state, executor, columns, prompts, share)
    if not columns.slots:
        return False
    columns.two_stream = comm.two_stream(state, executor, columns)
    _send(state, executor, columns)
    for leader in columns.forks:
        fork(executor, leader)
    return True


def ready_rows(executor: Executor, ahead: bool, half: int | None) -> tuple[list[Sequence], list[Sequence]]:
    """The sequences that can decode now, and those with prompt tokens to compute. A prompt chunk needs no
    sample; a decode needs that before it: on the device, where steps run ahead, or else applied here."""
    rows = executor.running if half is None else [s for s in executor.running if s.half == half]
    decodes, others = [], []
    for s in rows:  # one loop, over each row of each step
        at = s.computed
        if at < s.opened_length:
            others.append(s)
        elif at + 1 < s.max_length:
            decodes.append(s)
    if not ahead:
        decodes = [s for s in decodes if s.computed + 1 == len(s.tokens)]
    elif executor.host_fed:
        decodes = [s for s in decodes if not s.host_fed or s.computed + 1 == len(s.tokens)]
    # who waits for a leader or a load lacks prompt tokens, too: it cannot be among the decodes
    return decodes, [s for s in others if s.leader is None and not s.loading]


def _add_decodes(state: State, executor: Executor, columns: Columns, decodes: list[Sequence]) -> int:
    """One device-fed row for each of these sequences. This runs for each row of each step: whole columns at
    once, since a comprehension costs a third of a loop that appends."""
    rows = decodes[: executor.hello.max_step_tokens]
    short = [s for s in rows if s.computed >= s.room]
    if short and not _grow(state, executor, columns, short):
        rows = [s for s in rows if s.computed < s.room]  # preempt.py sees to a block for the others
    count, starts = len(rows), [s.computed for s in rows]
    cached = sum(starts) + count
    columns.shape = StepShape(count, count, cached, cached)
    columns.slots = ints([s.slot for s in rows])
    columns.starts = ints(starts)
    columns.sampled = [(s, s.placement) for s in rows]
    columns.counts = ints([1]) * count
    columns.from_device = ints([1]) * count
    columns.sample_rows = ROW_NUMBERS[:count]
    columns.sample_slots = columns.slots[:]
    for s in rows:
        s.computed += 1
    return count


def _grow(state: State, executor: Executor, columns: Columns, short: list[Sequence]) -> bool:
    """A new block for each of these decodes, and whatever of its table the executor has not seen. False when
    some are left without."""
    if columns.grow_all(executor, short):
        for s in short:
            _charge(state, s)
        return True
    grown = [s for s in short if _grow_one(state, executor, columns, s)]
    return len(grown) == len(short)


def _grow_one(state: State, executor: Executor, columns: Columns, sequence: Sequence) -> bool:
    unsent = len(sequence.table) - sequence.table_sent
    if columns.table_blocks and len(columns.table_blocks) + unsent >= MAX_TABLE_ENTRIES:
        return False  # a fork of a long prompt: its table travels with a later step
    _charge(state, sequence)
    return columns.grow(executor, sequence, sequence.computed + 1)


def _add_chunks(
    state: State, executor: Executor, columns: Columns, prompts: list[Sequence], share: Share
) -> None:
    """Prompt chunks, those that have begun first, up to the chunk budget."""
    prompts = sorted(prompts, key=lambda s: s.prefill_chunks == 0)  # a cached prefix is no beginning
    budget = whole = chunk_budget(state, executor, columns, prompts, share)
    state.meter.budget_tokens = budget
    for sequence in prompts:
        if budget <= 0:
            break
        prefix.catch_up(executor, sequence)
        unsent = len(sequence.table) - sequence.table_sent
        if columns.table_blocks and len(columns.table_blocks) + unsent >= MAX_TABLE_ENTRIES:
            continue  # a hit of a long prefix: its table travels with a later step
        count = min(budget, sequence.opened_length - sequence.computed, _room(executor, sequence))
        if count <= 0:
            continue  # preempt.py sees to a block
        if count == budget:
            executor.chunk_tokens = whole
        _add_chunk(state, executor, columns, sequence, count)
        budget -= count
    first = columns.shape.rows
    chunks = zip(columns.starts[first:], columns.counts[first:], strict=True)
    columns.shape = columns.shape.with_chunks(chunks)


def _room(executor: Executor, sequence: Sequence) -> int:
    """Tokens for which it has blocks, or may take them: all of its prompt, unless it was promised a chunk."""
    ledger = executor.ledger
    blocks = len(sequence.table) + sequence.reserved + max(ledger.free_blocks - ledger.reserved, 0)
    return blocks * executor.hello.block_tokens - sequence.computed


def _add_chunk(state: State, executor: Executor, columns: Columns, sequence: Sequence, count: int) -> None:
    """One host-fed row of `count` tokens, and sample rows if it reaches the last known token."""
    columns.chunks.append((sequence, sequence.note_chunk(state.now_us, count, executor.step + 1)))
    columns.grow(executor, sequence, sequence.computed + count)
    row = len(columns.slots)
    columns.slots.append(sequence.slot)
    columns.starts.append(sequence.computed)
    columns.counts.append(count)
    columns.from_device.append(0)
    _account(state, sequence, count)
    sequence.computed += count
    sequence.steps += 1
    sequence.prefill_chunks += 1
    prefix.register(executor, sequence, sequence.computed)
    if sequence.prefilling:
        return
    alone = sequence.request.asked.n == 1
    followers = [] if alone else [s for s in executor.running if s.leader is sequence]
    for sampled in (sequence, *followers):
        columns.sample_rows.append(row)
        columns.sample_slots.append(sampled.slot)
        columns.sampled.append((sampled, sampled.placement))
    if followers:
        columns.forks.append(sequence)


def _charge(state: State, sequence: Sequence) -> None:
    """Its client has been served another block of tokens. The prefix cache hears of it when the sequence
    leaves: until then nobody else is likely to go on from where it is."""
    generated = len(sequence.tokens) - sequence.prompt_tokens
    state.waiting.served.charge_output(sequence.request.client, generated - sequence.charged)
    sequence.charged = generated


def _account(state: State, sequence: Sequence, count: int) -> None:
    """What was computed before is our loss; what is new is charged to the client."""
    start, end, reach = sequence.computed, sequence.computed + count, sequence.reach
    again = 0 if reach <= start else min(reach, end) - start
    sequence.recomputed_tokens += again
    sequence.reach = max(reach, end)
    state.meter.prefill_tokens += count
    state.meter.recomputed_tokens += again
    state.waiting.served.charge_input(sequence.request.client, count - again)


def _send(state: State, executor: Executor, columns: Columns) -> None:
    executor.step += 1
    plan, shape = columns.plan(executor), columns.shape
    if columns.half is not None:
        executor.pace.half = columns.half
    predicted_us = executor.costs.predict_us(shape) if executor.costs.seen >= overlap.MIN_SEEN else 0
    flight = InFlight(executor.step, columns.sampled, state.now_us, plan, shape, predicted_us, columns.chunks)
    if not executor.in_flight:
        executor.pace.planned(state.now_us)
    executor.in_flight.append(flight)
    state.meter.count_step(columns.mode)
    state.send(executor.source, plan)
