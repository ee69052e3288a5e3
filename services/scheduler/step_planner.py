"""`plan_next` plans one step: decode rows first, then prompt chunks within the chunk budget.

It also decides whether the ranks compute the step in two micro-batches (`must_split`), and whether the step
waits a moment for blocks that are being copied (`are_copies_ending`, `is_worth_waiting`): blocks of a
preempted sequence are copied down before reuse, and a resumed sequence loads blocks. A row that misses the
step for such a copy waits for all of it, though the copy takes a small part of a step: on a CPU 5 of 70 ms.
With run-ahead a step may also wait, rarely, for a slot that the steps in flight free (`is_room_coming`).
`core.decide` calls `plan_next` until it returns False.

`StepColumns` builds the StepPlan column by column; `fork` gives choices their parent's prompt. Blocks come
from the executor's pool: first from a sequence's reservation, then from unreserved ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pkgutil import resolve_name

from services.scheduler import headroom, overlap, preemption, prefix_cache
from services.scheduler.kv_tiers import store
from services.scheduler.kv_tiers.lookups import executor_of
from services.scheduler.overlap import MIN_SEEN, balance
from services.scheduler.state.cost_model import chunk_tokens
from services.scheduler.state.policies import BatchingView, StepShare
from services.scheduler.state.requests import ChunkRecord, Sequence
from services.scheduler.state.state import PREFILL, Executor, InFlight, Row, State
from shared.kv_blocks import blocks_for
from shared.messages import StepPlan, ints
from shared.step_model import NO_ROWS, PROMPT_PART, StepShape

COLD_TOKENS = 256  # the chunk budget until the cost model has seen enough steps
STRETCH_PM = (
    1_500  # step time with a chunk, relative to decodes alone, if decodes break their bound: _bound_us
)
BACKLOG_US = 1_000_000  # prompt time that waits, for which that step may take as long again as decodes
EASY_PM = 2_000  # longest step with a chunk, relative to decodes alone, while few prompts wait: see _bound_us
EASY_STEPS = 4  # a chunk may exceed EASY_PM if more prompt waits than so many steps compute
URGENT_PM = 2_500  # longest step, relative to its target, while prompts wait that take longer: see _bound_us
ALONE_US = 500_000  # bound of a step without decodes: a new request waits for its end
TILE_ROWS = 64
GRAIN_TOKENS = 8  # a chunk is a multiple of this, or of a smaller block

MOVE_US = 200_000  # without room elsewhere for so long, a sequence decodes where its prompt was computed
LATE_US = 1_000_000  # since admission: from then on the oldest prompt gets a part of each step
LATE_PART = 4  # that part is a quarter of the tokens

HELD_LOOPS = 64  # so a step that waits for a slot costs at most 1.6 % of the time: see is_room_coming
OVERDUE = 2  # a copy that takes so many times its predicted time has no foreseeable end
DRAFTS = {  # which give rows their drafts
    "price": "services.scheduler.speculation:add_drafts",
}
MOST_VECTORS = 256  # in one step: with hidden states of 8,192 numbers 8 MiB of a result's 15
MAX_TABLE_ENTRIES = 8_192  # in one plan: 32 KiB; a longer table needs a plan without others
EMPTY = partial(array, "i")  # as `ints()`, in a third of the time
ROW_NUMBERS = ints(range(65_536))  # slicing it is fast


def plan_next(state: State, executor: Executor) -> bool:
    """Plan and send the executor's next step; False when its window is full or no row is ready."""
    if executor.settled == executor.changes:
        return False
    mode, depth = overlap.mode_of(state, executor)
    if len(executor.in_flight) >= depth:
        executor.settled = executor.changes
        return False
    if executor.in_flight and executor.late_plan.due_us > state.now_us:
        return False
    if mode == "run_ahead" and is_room_coming(state, executor):
        return False
    short_rows = preemption.make_room(state, executor)
    executor.awaits_copies = short_rows > 0 and is_worth_waiting(state, executor, short_rows)
    if executor.awaits_copies or are_copies_ending(state, executor, short_rows):
        return False
    if (
        mode == "run_ahead"
        and not short_rows
        and executor.in_flight
        and overlap.can_plan_later(state, executor)
    ):
        return False
    if mode != "two_batch":
        planned = _plan_step(state, executor, mode, None)
        if not executor.running:
            executor.settled = executor.changes  # else each event of another executor would try again
        return planned
    other = 1 - executor.pace.micro_batch
    order = (other, 1 - other, other)  # rows may move to the other one if those that stay lack blocks
    return any(_plan_step(state, executor, mode, micro_batch) for micro_batch in order)


def _plan_step(state: State, executor: Executor, mode: str, micro_batch: int | None) -> bool:
    """Plan one step. False if no row is ready."""
    executor.changes += 1  # also if no row gets into the step: a row may have taken a block
    decodes, prompts = ready_rows(executor, mode == "run_ahead", micro_batch)
    if executor.role == PREFILL:
        decodes = [s for s in decodes if not must_move(state, s)]
    if micro_batch is not None and decodes:
        decodes = balance(executor, micro_batch, decodes)
    stalled_us = state.now_us - executor.decoded_us if decodes and executor.decoded_us else 0
    batching = state.limits.policy.function("batching")
    share: StepShare = batching(BatchingView(len(decodes), len(prompts), stalled_us))
    columns = StepColumns(mode, micro_batch)
    executor.pace.crowded = False
    if share.decodes and (rows := _add_decodes(state, executor, columns, decodes)):
        executor.decoded_us = state.now_us
        if executor.hello.max_drafts and state.limits.speculate:
            alone = not prompts or share.prompts == "none"
            for add_drafts in _draft_adders():
                add_drafts(state, executor, columns, rows, alone)
    if prompts and share.prompts != "none":
        _add_chunks(state, executor, columns, prompts, share)
    if not columns.slots:
        return False
    columns.two_stream = must_split(state, executor, columns)
    _send(state, executor, columns)
    for parent in columns.forks:
        fork(executor, parent)
    return True


def ready_rows(
    executor: Executor, ahead: bool, micro_batch: int | None
) -> tuple[list[Sequence], list[Sequence]]:
    """The sequences that can decode now, and those with prompt tokens to compute. A decode needs the sample
    before it: on the device if steps run ahead, else applied here. A prompt chunk needs none."""
    rows = (
        executor.running
        if micro_batch is None
        else [s for s in executor.running if s.micro_batch == micro_batch]
    )
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
    # a sequence that waits for a parent, a load or a grammar lacks prompt tokens: it is never in `decodes`
    return decodes, [s for s in others if s.parent is None and not s.copies.load_job and not s.needs_grammar]


def must_move(state: State, sequence: Sequence) -> bool:
    """Whether a sequence waits for its move, after its first token on an executor that only prefills: a
    decode would bound the chunks there."""
    sampled = len(sequence.tokens) - sequence.opened_length
    return sampled < 1 or (sampled == 1 and state.now_us - sequence.last_token_us < MOVE_US)


@cache
def _draft_adders() -> list[Callable[..., None]]:
    return [resolve_name(name) for name in DRAFTS.values()]


def _add_decodes(
    state: State, executor: Executor, columns: StepColumns, decodes: list[Sequence]
) -> list[Sequence]:
    """Add one device-fed row for each of these sequences, and return those that were added. Builds whole
    columns, since a comprehension takes a third of the time of a loop that appends."""
    rows = decodes[: executor.hello.max_step_tokens]
    short = [s for s in rows if s.computed >= s.table_capacity]
    if short and not _grow(state, executor, columns, short):
        rows = [s for s in rows if s.computed < s.table_capacity]  # preemption.py frees blocks for the others
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
    executor.count_decodes(count)
    return rows


def _grow(state: State, executor: Executor, columns: StepColumns, short: list[Sequence]) -> bool:
    """Add a block to each of these decodes, and the unsent part of its table. False if some get none."""
    if columns.grow_all(executor, short):
        for s in short:
            _charge(state, s)
        return True
    grown = [s for s in short if _grow_one(state, executor, columns, s)]
    return len(grown) == len(short)


def _grow_one(state: State, executor: Executor, columns: StepColumns, sequence: Sequence) -> bool:
    """Add a block. False if none is free, or the plan has no room for the table."""
    unsent = len(sequence.table) - sequence.table_sent
    if unsent and not columns.has_table_room(unsent):
        return False  # a fork of a long prompt: a later plan carries its table
    _charge(state, sequence)
    return columns.grow(executor, sequence, sequence.computed + 1)


def _add_chunks(
    state: State, executor: Executor, columns: StepColumns, prompts: list[Sequence], share: StepShare
) -> None:
    """Add prompt chunks, in turn, up to the chunk budget."""
    prompts, ahead_tokens = _in_turn(state, executor, prompts)
    waiting = [(s.computed, s.opened_length - s.computed) for s in prompts]
    left_tokens = sum(left for _, left in waiting)
    budget = whole = chunk_budget(state, executor, columns, waiting, share)
    state.counters.budget_tokens = budget
    executor.pace.crowded = left_tokens > state.limits.step_tokens
    vectors = 0
    for sequence in prompts:
        if budget <= 0:
            break
        if sequence.request.tokenized.pooling:
            vectors += 1
            if vectors > MOST_VECTORS:
                continue
        prefix_cache.catch_up(executor, sequence)
        unsent = len(sequence.table) - sequence.table_sent
        if unsent and not columns.has_table_room(unsent):
            continue  # a hit of a long prefix: a later plan carries its table
        left = sequence.opened_length - sequence.compiles_grammar - sequence.computed
        count = min(budget, left, _room(executor, sequence))
        if ahead_tokens and sequence is prompts[0]:
            count = min(count, max(budget // LATE_PART, 1, budget - ahead_tokens))
        if count <= 0:
            continue  # preemption.py frees a block
        if count == budget and whole >= TILE_ROWS:
            executor.chunk_tokens = whole
        _add_chunk(state, executor, columns, sequence, count)
        budget -= count
    first = columns.shape.rows
    chunks = zip(columns.starts[first:], columns.counts[first:], strict=True)
    columns.shape = columns.shape.with_chunks(chunks)


def _in_turn(state: State, executor: Executor, prompts: list[Sequence]) -> tuple[list[Sequence], int]:
    """The order of prompts, and the tokens of those that the late prompt in front has overtaken (else 0).

    A tenant's only sequence comes first: a single request does not wait for another tenant's many prompts.
    Then by class; within it prompts that have started, so that steps do not interleave many prompts; then by
    VTC counter. But the oldest prompt is late LATE_US after its admission. It then comes first, limited to a
    part of the step or to what the overtaken prompts leave (`_add_chunks`): so each prompt ends.
    """
    if len(executor.running_by_tenant) == 1 and sum(map(bool, executor.running_by_class)) == 1:
        return sorted(prompts, key=lambda s: s.prefill_chunks == 0), 0  # a cached prefix is no start

    def turn(s: Sequence) -> tuple[bool, int, bool, int]:
        served = state.waiting.served.get((s.tenant, s.level))
        return executor.running_by_tenant[s.tenant] > 1, s.level, s.prefill_chunks == 0, served

    in_turn, first = sorted(prompts, key=turn), prompts[0]  # `running` is in order of admission
    if state.now_us - first.admitted_us < LATE_US:
        return in_turn, 0
    at = in_turn.index(first)
    return [first, *in_turn[:at], *in_turn[at + 1 :]], _tokens_left(in_turn[:at])


def _tokens_left(prompts: list[Sequence]) -> int:
    return sum(s.opened_length - s.computed for s in prompts)


def _room(executor: Executor, sequence: Sequence) -> int:
    """Tokens that fit in its blocks, its reservation and the unreserved blocks."""
    pool = executor.pool
    blocks = len(sequence.table) + sequence.reserved + max(pool.unreserved_blocks, 0)
    return blocks * executor.hello.block_tokens - sequence.computed


def _add_chunk(
    state: State, executor: Executor, columns: StepColumns, sequence: Sequence, count: int
) -> None:
    """Add one host-fed row of `count` tokens, and sample rows if it reaches the last known token."""
    columns.chunks.append((sequence, sequence.record_chunk(state.now_us, count, executor.step + 1)))
    columns.grow(executor, sequence, sequence.computed + count)
    row = len(columns.slots)
    columns.slots.append(sequence.slot)
    columns.starts.append(sequence.computed)
    columns.counts.append(count)
    columns.from_device.append(0)
    _account(state, sequence, count)
    executor.advance(sequence, count)
    sequence.steps += 1
    sequence.prefill_chunks += 1
    if not sequence.generated:
        executor.prompts.tokens += count
        if not sequence.is_prefilling:
            executor.prompts.squares += max(sequence.prompt_tokens - sequence.cached_tokens, 1) ** 2
    prefix_cache.register(executor, sequence, sequence.computed)
    if sequence.is_prefilling:
        return
    alone = sequence.request.tokenized.n == 1
    children = [] if alone else [s for s in executor.running if s.parent is sequence]
    drafts = executor.hello.max_drafts and sequence.request.tokenized.speculate
    for sampled in (sequence, *children):
        if drafts:
            executor.drafting.begin(sampled, len(executor.running))
        columns.sample_rows.append(row)
        columns.sample_slots.append(sampled.slot)
        columns.sampled.append((sampled, sampled.placement))
    if children:
        columns.forks.append(sequence)


def _charge(state: State, sequence: Sequence) -> None:
    """Charge the client for the tokens generated since the last block. The new blocks get their keys only
    when the sequence leaves: another request is unlikely to continue from them earlier."""
    generated = len(sequence.tokens) - sequence.prompt_tokens
    state.waiting.served.charge_output(sequence.request.client, generated - sequence.charged_tokens)
    sequence.charged_tokens = generated


def _account(state: State, sequence: Sequence, count: int) -> None:
    """Charge the client for new tokens, and count recomputed ones."""
    start, end, reach = sequence.computed, sequence.computed + count, sequence.most_computed
    again = 0 if reach <= start else min(reach, end) - start
    sequence.recomputed_tokens += again
    sequence.most_computed = max(reach, end)
    state.counters.prefill_tokens += count
    state.counters.recomputed_tokens += again
    state.waiting.served.charge_input(sequence.request.client, count - again)


def _send(state: State, executor: Executor, columns: StepColumns) -> None:
    executor.step += 1
    plan, shape = columns.plan(executor), columns.shape
    if columns.micro_batch is not None:
        executor.pace.micro_batch = columns.micro_batch
    expected = (
        shape.with_drafts(columns.found_drafts, again=not executor.has_graphs) if columns.drafts else shape
    )
    predicted_us = (
        executor.cost_model.predict_us(expected) if executor.cost_model.seen >= overlap.MIN_SEEN else 0
    )
    flight = InFlight(executor.step, columns.sampled, state.now_us, plan, shape, predicted_us, columns.chunks)
    flight.drafts = columns.drafts
    flight.lead_us, executor.late_plan.due_us = overlap.plan_lead_us(state, executor), 0
    if not executor.in_flight:
        executor.pace.on_planned(state.now_us)
    executor.in_flight.append(flight)
    state.counters.count_step(columns.mode)
    state.send(executor.source, plan)


def chunk_budget(
    state: State,
    executor: Executor,
    columns: StepColumns,
    waiting: list[tuple[int, int]],
    share: StepShare,
) -> int:
    """The number of prompt tokens for the step in `columns`. `waiting`: where each prompt goes on, and the
    tokens that it has left, in turn.

    It is the largest number that keeps the predicted time of the step within the time between tokens of the
    strictest class that runs (Sarathi-Serve, Agrawal et al. 2024), so a long prompt stalls no decode. Decodes
    and chunk together fill whole tiles of the matrix products: a partial tile takes as long as a whole one.
    """
    hello, decodes = executor.hello, len(columns.slots)
    room = hello.max_step_tokens - decodes
    if room <= 0 or share.prompts == "whole":
        return room
    if share.prompts == "block":
        return min(room, hello.block_tokens)
    # a step full of decodes still takes some of the prompts, or prefill would starve
    least = max(state.limits.step_tokens // PROMPT_PART, hello.block_tokens)
    room = min(room, max(state.limits.step_tokens - decodes, least))
    if executor.cost_model.seen < MIN_SEEN:
        return min(room, COLD_TOKENS)
    left, with_prompt = sum(left for _, left in waiting), partial(_with_prompt, columns.shape, waiting)
    bound_us = _bound_us(state, executor, columns, left, min(left, room), with_prompt)
    grain = min(GRAIN_TOKENS, hello.block_tokens)
    fits = chunk_tokens(executor.cost_model, with_prompt, bound_us, grain, room)
    budget = min(room, fits or hello.block_tokens)
    most = min(room, budget + hello.block_tokens - 1)  # a tile may end within the next block
    tiled = (decodes + most) // TILE_ROWS * TILE_ROWS - decodes
    if tiled > budget and executor.cost_model.predict_us(with_prompt(tiled)) > bound_us:
        tiled -= TILE_ROWS
    budget = tiled if tiled >= TILE_ROWS else budget
    return _evenly(left, budget, decodes) if columns.sampled and left > budget else budget


def _with_prompt(shape: StepShape, waiting: list[tuple[int, int]], tokens: int) -> StepShape:
    """The shape with so many tokens of these prompts, in turn; if they have fewer, with a further one."""
    chunks: list[tuple[int, int]] = []
    for start, left in (*waiting, (0, tokens)):
        chunks.append((start, min(left, tokens)))
        tokens -= min(left, tokens)
        if not tokens:
            break
    return shape.with_chunks(chunks)


def _evenly(left: int, budget: int, decodes: int) -> int:
    """Spread the `left` prompt tokens evenly over the steps that they need, in whole tiles."""
    steps = -(-left // budget)
    tiled = -(-(decodes + -(-left // steps)) // TILE_ROWS) * TILE_ROWS - decodes
    return min(budget, tiled)


def _bound_us(
    state: State,
    executor: Executor,
    columns: StepColumns,
    left: int,
    most: int,
    with_prompt: Callable[[int], StepShape],
) -> int:
    """How long a step may take that computes some of the `left` prompt tokens, at most `most` of them.

    The bound is the shortest target time between tokens of a class that runs; two_batch uses two steps for
    it. If decodes alone take two thirds of the bound or more, prompts get half as much time as decodes,
    and more the more prompt tokens wait: else prompts would starve for a bound that decodes break anyhow.

    If decodes are much faster than the bound, the step takes at most twice as long as decodes alone, or
    longer if more prompt tokens wait than EASY_STEPS steps compute. So the time between tokens is short under
    light load; under heavy load steps are long, which takes the least time per token.

    On a slow engine, prompts of that class may wait that take longer than the bound. Then a step may take
    URGENT_PM of it: many small chunks would cost the first tokens more than they save between tokens. Class
    interactive keeps its bound.
    """
    if not columns.sampled:
        return ALONE_US
    tbt_us, level = state.limits.strictest(executor.running_by_class)
    tbt_us = tbt_us if columns.micro_batch is None else tbt_us // 2
    predict_us, shape = executor.cost_model.predict_us, columns.shape
    alone_us = predict_us(shape)
    chunk_us = predict_us(with_prompt(most)) - alone_us
    bound_us = step_bound_us(alone_us, tbt_us, chunk_us * left // most)
    if level and chunk_us * min(left, executor.row_sums().prompt_tokens[level]) > tbt_us * most:
        return max(bound_us, URGENT_PM * tbt_us // 1_000)
    return bound_us


def step_bound_us(alone_us: int, bound_us: int, waiting_us: int) -> int:
    """The bound of a step whose decodes alone take `alone_us`, under a target of `bound_us`, while prompts of
    `waiting_us` wait: see `_bound_us`."""
    if STRETCH_PM * alone_us > 1_000 * bound_us:
        return max(bound_us, STRETCH_PM * alone_us // 1_000 + alone_us * waiting_us // BACKLOG_US)
    return min(bound_us, max(EASY_PM * alone_us // 1_000, alone_us + waiting_us // EASY_STEPS))


def must_split(state: State, executor: Executor, columns: StepColumns) -> bool:
    """Whether to split the step into two micro-batches: one's collectives overlap the other's compute.

    off          never
    auto         from the split threshold that the executor measured at its start: below it, reading the
                 weights twice takes longer than the overlap saves
    two_stream   always, if the executor offers it

    A step of decodes alone stays whole: its collectives are short, and fused with the norms after them. The
    plan carries the decision, so all ranks agree (DeepSeek's prefill, LightLLM's and SGLang's two-batch
    overlap).
    """
    since_tokens, mode = executor.hello.two_stream_tokens, state.limits.comm
    if not since_tokens or mode not in ("auto", "two_stream") or not columns.chunks:
        return False
    return mode == "two_stream" or columns.shape.tokens >= since_tokens


def is_room_coming(state: State, executor: Executor) -> bool:
    """True if the next step should wait for the steps in flight: they free the room of a preempted sequence
    for a request of a higher class, whose prompt is then in that step and not in the one after it. The device
    is idle for a loop, so this happens at most once in HELD_LOOPS of them."""
    group = state.waiting.groups.get(state.blocked_on[0]) if state.blocked_on else None
    if group is None or not executor.in_flight or group.held_executor != executor.source:
        return False
    loop_us, pool = executor.cost_model.loop_us, executor.pool
    if not loop_us or not pool.fenced_slots or not any(executor.running_by_class[group.level + 1 :]):
        return False
    if executor.hold.step == executor.step:
        return True
    if state.now_us - executor.hold.since_us < HELD_LOOPS * loop_us:
        return False
    if max(headroom.shortfall(state, executor, group)) > 0:
        return False
    executor.hold.step, executor.hold.since_us = executor.step, state.now_us
    return True


def are_copies_ending(state: State, executor: Executor, short_rows: int) -> bool:
    """True if the next step can be planned later without idle time: a step is in flight, and a copy for which
    a sequence waits ends before that step does."""
    pace, loop_us = executor.pace, executor.cost_model.loop_us
    flights = executor.in_flight
    if not state.tiers.jobs or not flights or not loop_us or executor.hello.stages > 1:
        return False
    runs_us = sum(flight.predicted_us for flight in flights)
    end_us = max(pace.last_us, flights[0].planned_us) + runs_us - OVERDUE * loop_us
    blocks_wanted = short_rows > 0 or bool(state.blocked_on)
    loads = {s.copies.load_job for s in executor.running if s.copies.load_job}
    for job in state.tiers.jobs.values():
        if job.number in loads:
            over_us = job.began_us + OVERDUE * job.predicted_us
        elif blocks_wanted and not job.up and executor_of(state, job) is executor:
            over_us = job.began_us + OVERDUE * executor.down.store_us
        else:
            continue
        if state.now_us < over_us < end_us:
            return True
    return False


def is_worth_waiting(state: State, executor: Executor, short_rows: int) -> bool:
    """True if the step should wait, with an idle device, for copies that free blocks for some of the
    `short_rows` rows that lack one. Compares the wait with what these rows would lose: their share of a step.
    Starts the copies that it would wait for."""
    pool = executor.pool
    if executor.in_flight or short_rows <= pool.unreserved_blocks or not pool.coming_blocks:
        return False
    store.copy_dirty(state, executor)
    soon = min(short_rows - pool.unreserved_blocks, pool.copying_blocks)
    began_us = [
        job.began_us
        for job in state.tiers.jobs.values()
        if not job.up and executor_of(state, job) is executor
    ]
    if soon <= 0 or not began_us:
        return False
    store_us, waited_us = executor.down.store_us, state.now_us - min(began_us)
    gain_us = executor.pace.step_us * soon // len(executor.running)
    return store_us - waited_us <= gain_us and waited_us < OVERDUE * store_us


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
    drafts: dict[int, int] = field(default_factory=dict)  # how many rows may have, by index
    found_drafts: int = 0  # of these, as many as are likely to be found
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
        executor.change_rows()
        if tail:
            child.reserved -= 1  # reserved at admission
            child.table += executor.pool.allocate(1)
            executor.fork_copies.append((parent.table[full], child.table[full]))
