"""Copies blocks down to a tier before they are given out, or drops them, like a kernel's page write-back.

An unheld block without a copy below is dirty until free blocks are needed; then `choose_blocks` decides.
Blocks of a preempted sequence are copied while the steps that still name them run. `core.decide` and the step
planner call `copy_dirty`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from services.scheduler import headroom, preemption, prefix_cache
from services.scheduler.kv_tiers import load, lookups
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state.policies import EAGER_COPY_PM, OffloadView
from services.scheduler.state.requests import Phase as SequencePhase
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import Executor, State
from services.scheduler.state.transfers import (
    ANSWER_US,
    LONG_COPY_US,
    MISSES,
    TRY_BLOCKS,
    Job,
    JobPhase,
    Offload,
)
from shared import messages
from shared.kv_blocks import KEY_BYTES

LEASE_US = 10_000_000
EAGER_BYTES = 8 << 20  # of an eager copy: on a CPU it takes a core from the steps for 2 ms
JOB_BYTES = 64 << 20  # 1.3 ms of a PCIe link: the next copy does not wait long
JOB_BLOCKS = 128
MAX_JOBS = 2  # at once: one is copied while the next is requested
MAX_JUDGED = 256  # blocks at one time, beside those that are dropped or copied
JUDGED_TOGETHER = 16  # blocks of a sequence with one verdict
EAGER_US = 20_000  # between two calls of the policy while no free blocks are needed
EAGER_SHARE = 20  # eager copies take at most 1 / 20 of the time
IDLE_US = 200_000  # without a request before eager copies: the next turn of a chat may come at once
BUSY_US = 1_000  # as EAGER_US, if free blocks are needed but MAX_JOBS run
CUSHION_ROWS, CUSHION_BLOCKS, CUSHION_SHARE = 2, 16, 8
LEFT_TOKENS = 32  # of a sequence that moves: they are computed again in a part of one step
PREEMPTING_PM = 600  # headroom (../headroom.py) that only recent preemptions cause


def copy_dirty(state: State, executor: Executor) -> bool:
    """Start the copies that should be made now, and drop blocks. True if blocks have become free."""
    pool = executor.pool
    if not pool.write_back:
        return False
    dirty = pool.dirty_blocks or pool.stable_blocks
    pressed = _pressed(state, executor) if dirty or executor.headroom_pm >= PREEMPTING_PM else 0
    if state.draining and pressed <= 0:
        return False  # the drain would wait for a useless copy
    busy = executor.down.pending_jobs >= MAX_JOBS
    if pressed <= 0 and not _may_be_eager(state, executor):
        return False
    if pressed > 0 and busy and state.now_us - executor.store_pace.judged_us < BUSY_US:
        return False
    executor.store_pace.judged_us = state.now_us
    offload = state.tiers.below(executor.hello, state.now_us)
    if offload is None:
        return _give_up(executor, pressed)
    swaps = state.limits.policy.leaves
    room = 0 if busy else most_blocks(executor, JOB_BYTES if pressed > 0 or swaps else EAGER_BYTES)
    if executor.down.copies_seen and not executor.down.is_fresh(state.now_us):
        room = min(room, TRY_BLOCKS)
    free_before = pool.free_blocks
    tries = pressed > 0 and not executor.down.is_known(state.now_us) and not executor.down.pending_jobs
    chosen = choose_blocks(state, executor, max(pressed, room) if tries else pressed, room)
    if chosen and pressed <= 0 and not swaps:
        copy_us = executor.down.copy_us(len(chosen) * executor.hello.bytes_per_block)
        executor.store_pace.next_eager_us = state.now_us + EAGER_SHARE * copy_us
    if chosen:
        _store(state, executor, offload, chosen, leaves=swaps)
    elif pressed > 0 and room and not executor.down.pending_jobs and _is_preemption_likely(state, executor):
        _store_ahead(state, executor, offload, room)
    return pool.free_blocks > free_before


def needs_ticks(state: State) -> bool:
    """True while there is no request and eager copies are possible: the actor then sends ticks."""
    if state.sessions.needs_ticks():
        return True
    idle = not state.requests and not state.draining and state.reuse.most_pm >= EAGER_COPY_PM
    return idle and any(executor.pool.dirty_blocks for executor in state.executors.values())


def _may_be_eager(state: State, executor: Executor) -> bool:
    """Eager copies run after IDLE_US without a request. Otherwise they take a small part of the time: on a
    CPU they slow down the steps."""
    if not state.requests:
        return state.now_us - state.idle_since_us >= IDLE_US
    return (
        state.now_us - executor.store_pace.judged_us >= EAGER_US
        and state.now_us >= executor.store_pace.next_eager_us
    )


def _pressed(state: State, executor: Executor) -> int:
    """Blocks that are or will soon be needed beyond those that are free or being copied."""
    pool = executor.pool
    if executor.sleep_by_us:  # what is worth a copy goes down, the rest is dropped
        return 0 if executor.running else pool.blocks
    most = max(1, pool.blocks // CUSHION_SHARE)
    wanted = min(CUSHION_ROWS * len(executor.running) + CUSHION_BLOCKS, most)
    if not (executor.draining or state.draining):
        wanted += executor.awaited_blocks
    group = state.waiting.groups.get(state.blocked_on[0]) if state.blocked_on else None
    if group is not None and group.request.tokenized.model == executor.hello.model:
        wanted += sum(headroom.reservations(state, executor, group))
        wanted += headroom.headroom_blocks(state, executor, group.sequences)
        if group.resumes:  # its cached blocks are used again
            hits = prefix_cache.lookup(executor, group.sequences[0])
            wanted -= len(hits) - pool.free_taken_by(hits)
    return wanted - pool.unreserved_blocks - pool.copied_blocks


def _give_up(executor: Executor, pressed: int) -> bool:
    """Drop blocks, since there is no tier. True if there were any."""
    blocks = list(islice(executor.pool.dirty, max(pressed, 0)))
    for block in blocks:
        executor.pool.give_up(block)
    return bool(blocks)


def _store(
    state: State,
    executor: Executor,
    offload: Offload,
    blocks: list[int],
    *,
    leaves: bool = False,
    after_step: int = 0,
    urgent: bool = False,
) -> int:
    """Start a store job: ask kv_offload to reserve ranges for these blocks. Returns its number. `urgent`: a
    sequence will load them soon."""
    pool, hello = executor.pool, executor.hello
    keys = [key for block in blocks if (key := pool.key_of[block]) is not None]
    preempted = any(is_preempted(state, pool.owner_of[block][0]) for block in blocks)
    job = lookups.start_job(state, executor, offload, blocks, keys)
    job.due_us, job.lease_us = state.now_us + ANSWER_US, state.now_us + LEASE_US
    job.leaves, job.after_step = leaves, after_step
    lookups.count_queued(executor, job, len(blocks) * hello.bytes_per_block)
    message = messages.KvReserve(
        job=job.number,
        owner=executor.source,
        keys=b"".join(keys),
        value_bytes=hello.bytes_per_block,
        lease_us=LEASE_US,
        priority=int(preempted or urgent),
        valid_tokens=messages.ints(pool.valid_tokens.get(block, hello.block_tokens) for block in blocks),
        fingerprint=hello.fingerprint,
    )
    state.send(offload.source, message)
    return job.number


def _is_preemption_likely(state: State, executor: Executor) -> bool:
    """Whether a preemption is likely soon, and the policy copies the next victim's blocks ahead."""
    may = executor.headroom_pm >= PREEMPTING_PM and state.now_us >= executor.store_pace.next_ahead_us
    return may and state.limits.policy.ahead


def _store_ahead(state: State, executor: Executor, offload: Offload, room: int) -> None:
    """Copy blocks of the next victim, so that its preemption does not have to. Skipped if the copy takes less
    than a step: most running sequences end before they are preempted."""
    victim = _next_victim(state, executor)
    if victim is None:
        return
    size_bytes = len(victim.table) * executor.hello.bytes_per_block
    if executor.down.copy_us(size_bytes) <= executor.pace.step_us:
        return
    prefix_cache.register(executor, victim, min(victim.computed, len(victim.tokens)))
    pool = executor.pool
    blocks = [
        block
        for block in victim.table[: victim.registered]
        if pool.key_of[block] is not None and block not in pool.clean and block not in pool.copies
    ][:room]
    if blocks:
        state.counters.stored_ahead_blocks += len(blocks)
        _store(state, executor, offload, blocks, after_step=executor.step)


def keep_below(state: State, executor: Executor, sequence: Sequence) -> bool:
    """Copy the full blocks of a running sequence, a part of them at a call. True once the copies have ended
    and at most LEFT_TOKENS are not below: they grow while it runs. Also if computing the blocks again takes
    less time. Each block is tried once: kv_offload may have no room for it."""
    pool = executor.pool
    offload = state.tiers.below(executor.hello, state.now_us)
    if offload is None or not pool.write_back:
        return True
    if sequence.copies.store_job in state.tiers.jobs:
        return False
    computed = min(sequence.computed - _in_flight(executor, sequence), len(sequence.tokens))
    prefix_cache.extend_keys(executor, sequence)
    prefix_cache.register(executor, sequence, computed)
    full, blocks = computed // pool.block_tokens, list[int]()
    left = full - sequence.copies.stored
    if left * pool.block_tokens <= LEFT_TOKENS or _is_recompute_faster(executor, left, computed):
        return True
    if executor.down.pending_jobs >= MAX_JOBS:
        return False
    after_step = pool.acked_step  # it has filled the blocks; a step that fails later does not harm them
    for key in sequence.keys[sequence.copies.stored : full]:
        block = pool.block_of.get(key)
        if sequence.copies.stored < sequence.adopted or block != sequence.table[sequence.copies.stored]:
            after_step = executor.step  # a step in flight may fill it, for another sequence
        if block in pool.copies or len(blocks) == most_blocks(executor):
            break  # another job copies the block, or the next one will
        sequence.copies.stored += 1
        if block is not None and block not in pool.clean:
            blocks.append(block)
    if blocks:
        sequence.copies.store_job = _store(
            state, executor, offload, blocks, after_step=after_step, urgent=True
        )
    return not blocks and sequence.copies.stored == full  # copied for others, or refused


def _in_flight(executor: Executor, sequence: Sequence) -> int:
    """Tokens of the sequence that steps without a result compute."""
    plans = [flight.plan for flight in executor.in_flight]
    return sum(plan.counts[plan.slots.index(sequence.slot)] for plan in plans if sequence.slot in plan.slots)


def _is_recompute_faster(executor: Executor, blocks: int, computed: int) -> bool:
    """Whether a sequence of so many computed tokens is computed again before these blocks are copied down and
    up. False while the costs are not known, and where others only decode: computing there delays them."""
    size = blocks * executor.hello.bytes_per_block
    again_us = 0 if executor.role else RecomputeCost.of(executor).tokens_us(0, computed)
    return 0 < again_us < executor.down.copy_us(size) + executor.up.copy_us(size)


def _next_victim(state: State, executor: Executor) -> Sequence | None:
    candidates = list(filter(preemption.is_preemptible, executor.running))
    return preemption.in_order(state, executor, candidates)[0] if len(candidates) > 1 else None


def on_reserved(state: State, source: str, message: messages.KvReserved) -> None:
    """A kv_offload has reserved a range for each block, or none. Blocks that it has already are clean, blocks
    without a range are given up."""
    job, offload = state.tiers.jobs.get(message.job), state.tiers.named(source)
    if (
        offload is None
        or job is None
        or job.phase is not JobPhase.REQUESTED
        or job.up
        or job.offload != offload.actor
    ):
        if offload is not None:
            state.send(source, messages.KvRelease(jobs=messages.ints([message.job])))
        return
    offload.on_answered(state.now_us - job.began_us)
    executor = lookups.executor_of(state, job)
    fits = len(message.offsets) == len(job.blocks) and message.arena_generation == offload.generation
    job.written = [int(offset >= 0) for offset in message.offsets] if fits else []
    if executor is None or not any(job.written):
        _end(state, job, [fits and offset == messages.PRESENT for offset in message.offsets])
        return
    offsets = [(b, offset) for b, offset in zip(job.blocks, message.offsets, strict=True) if offset >= 0]
    job.phase = JobPhase.COPYING
    size = executor.hello.bytes_per_block
    lookups.count_queued(executor, job, len(offsets) * size)
    copy = messages.KvCopy(
        job=job.number,
        to_arena=True,
        after_step=job.after_step,
        arena_generation=message.arena_generation,
        blocks=messages.ints(block for block, _ in offsets),
        offsets=messages.longs(offset for _, offset in offsets),
        block_bytes=size,
    )
    state.send(executor.source, copy)


def on_copied(state: State, source: str, message: messages.KvCopied) -> None:
    """A copy has ended. `no_arena` and `stale_arena`: the executor has not mapped the arena yet."""
    job = state.tiers.jobs.get(message.job)
    if job is None or job.phase is not JobPhase.COPYING or source != f"executor.{job.executor}":
        return
    executor = lookups.executor_of(state, job)
    if executor is None:
        return
    if message.status in ("no_arena", "stale_arena"):
        for _ in range(MISSES):
            lookups.on_missed(state, job.offload)
    (load.end_copy if job.up else _end_copy)(state, job, executor, message)


def _end_copy(state: State, job: Job, executor: Executor, message: messages.KvCopied) -> None:
    """The copy has ended. Its bytes are valid if it succeeded within the lease, and all steps that wrote its
    blocks have succeeded."""
    offload = lookups.offload_of(state, job)
    ok = message.status == "ok" and state.now_us < job.lease_us and not job.void
    ok = ok and job.after_step <= executor.pool.acked_step
    if ok:
        executor.down.observe(job.queued_bytes, message.took_us, state.now_us)
        state.counters.stored_blocks += sum(job.written)
    lookups.uncount_queued(executor, job)
    if not ok or offload is None:
        state.counters.stores_failed += 1
        _end(state, job, [])
        return
    job.phase, job.due_us = JobPhase.STORING, state.now_us + ANSWER_US
    state.send(offload.source, messages.KvCommit(job=job.number, written=messages.ints(job.written)))


def on_stored(state: State, source: str, message: messages.KvStored) -> None:
    """A kv_offload reports which blocks can be read from it now."""
    job = state.tiers.jobs.get(message.job)
    if job is not None and job.phase is JobPhase.STORING and source == f"kv_offload.{job.offload}":
        held = [tier > 0 for tier in message.tiers]
        if (sender := state.tiers.named(source)) is not None:
            sender.stores += 1
        if (executor := lookups.executor_of(state, job)) is not None:
            executor.down.observe_store(state.now_us - job.began_us)
        _end(state, job, held, release=False)


def expire(state: State) -> None:
    """End lookups and jobs without an answer in time."""
    lookups.expire(state)
    for job in [job for job in state.tiers.jobs.values() if job.due_us <= state.now_us]:
        if job.phase is not JobPhase.COPYING:
            lookups.on_missed(state, job.offload)
            expire_job(state, job)


def expire_job(state: State, job: Job) -> None:
    """End a job without an answer in time, or without a kv_offload."""
    (load.expire if job.up else _expire)(state, job)


def _expire(state: State, job: Job) -> None:
    """The kv_offload has not answered in time."""
    _end(state, job, [])


def _end(state: State, job: Job, held: list[bool], *, release: bool = True) -> None:
    """A store has ended. `held`: which of its blocks are in a tier, none if it has another length; the others
    are given up."""
    lookups.finish(state, job, release=release)
    executor = lookups.executor_of(state, job)
    if executor is None:
        return
    pool = executor.pool
    if len(held) != len(job.blocks):
        held = [False] * len(job.blocks)
    if job.after_step and not any(held):
        executor.store_pace.next_ahead_us = state.now_us + EAGER_US
    for block, key, there in zip(job.blocks, job.keys, held, strict=True):
        if there:
            pool.mark_clean(block, key)
            if job.leaves:
                pool.forget(block)
        else:
            pool.give_up(block)


@dataclass(frozen=True, slots=True)
class _Conditions:
    """The common input of the policy for all blocks."""

    pressed: int  # needed blocks beyond the free ones
    copy_us: int  # for a block, with its share of half the wait; 0: copy to measure the link
    preempted_us: int  # likewise for preempted sequences, which wait for the copy: never 0 to measure
    recompute: RecomputeCost


def choose_blocks(state: State, executor: Executor, pressed: int, room: int) -> list[int]:
    """The blocks to copy now: dirty ones, then stable ones. Dirty blocks that the policy drops become free.

    The policy of kind `tier` judges groups of blocks: the time of a copy (measured rate, with half the queue)
    against the time to compute it again (by the tokens before it) times the chance that it is used again.
    The chance is 1 for preempted sequences, and for ended ones the share of their tenant's prompts that
    caches had.

    A call looks at MAX_JUDGED blocks that stay dirty, and the next call goes on after them: while the link is
    busy, a large cache of blocks that wait for it costs no more than a small one.
    """
    pool = executor.pool
    conditions = _Conditions(
        pressed=pressed,
        copy_us=_copy_us(state, executor),
        preempted_us=_expected_us(executor),
        recompute=RecomputeCost.of(executor),
    )
    choice = _Choice(state, executor, conditions, room)
    for (
        block
    ) in pool.dirty:  # the oldest are copied: the end of a table, which a load brings back in one part
        if len(choice.chosen) == room or not choice.may_go_on:
            break
        choice.add(block)
    choice.drop()
    if len(choice.chosen) == room:
        waiting = pool.judge()
        while choice.may_go_on and (next_block := next(waiting, None)) is not None:
            choice.add(next_block)
        choice.drop()
    choice.kept = 0
    for block in islice(pool.stable, MAX_JUDGED if room and pressed > 0 else 0):
        if not choice.may_go_on:
            break
        choice.add(block, is_stable=True)
    return choice.chosen


@dataclass(slots=True)
class _Choice:
    """What the policy makes of the blocks that it has judged in one call."""

    state: State
    executor: Executor
    conditions: _Conditions
    room: int
    chosen: list[int] = field(default_factory=list)  # to copy
    dropped: list[int] = field(default_factory=list)  # to give up
    dealt: int = 0
    kept: int = 0
    verdicts: dict[tuple[int, int], tuple[str, bool]] = field(default_factory=dict)  # by sequence and group

    @property
    def may_go_on(self) -> bool:
        pressed = self.conditions.pressed
        enough = self.dealt >= pressed if pressed > 0 else len(self.chosen) >= self.room
        return not enough and self.kept < MAX_JUDGED

    def add(self, block: int, *, is_stable: bool = False) -> None:
        """Judge a block."""
        seq, at, tenant, length = self.executor.pool.owner_of[block]
        group = seq, at // JUDGED_TOGETHER
        if group not in self.verdicts:
            chance_pm = self.state.sessions.chance_pm(self.state, seq, at, tenant)
            view = _view(self.state, self.executor, self.conditions, seq, chance_pm, length)
            self.verdicts[group] = self.state.limits.policy.function("tier")(view), view.preempted
        what, preempted = self.verdicts[group]
        if what == "drop" and not is_stable:
            self.dropped.append(block)
            self.state.counters.dropped_preempted_blocks += preempted
        elif what == "copy" and len(self.chosen) < self.room:
            self.chosen.append(block)
        else:
            self.kept += 1
            return
        self.dealt += 1

    def drop(self) -> None:
        """Give up the blocks to drop: only now, since the caller went through them."""
        for block in self.dropped:
            self.executor.pool.give_up(block, spent=True)
        self.state.counters.dropped_blocks += len(self.dropped)
        self.dropped.clear()


def _copy_us(state: State, executor: Executor) -> int:
    """Time of a block's copy, with its share of half the wait; 0 if the rate is not known. So the link is
    measured, and no block is dropped during that copy, unless it takes longer than LONG_COPY_US."""
    link = executor.down
    if not link.is_known(state.now_us):
        mine = (job for job in state.tiers.jobs.values() if job.queued_bytes and not job.up)
        here = [job.began_us for job in mine if lookups.executor_of(state, job) is executor]
        if state.now_us - min(here, default=state.now_us) < LONG_COPY_US:
            return 0
    return _expected_us(executor)


def _expected_us(executor: Executor) -> int:
    """Predicted time of a block's copy, with its share of half the wait."""
    link = executor.down
    return link.block_us(executor.hello.bytes_per_block) + link.wait_us() // (2 * most_blocks(executor))


def _view(
    state: State, executor: Executor, conditions: _Conditions, seq: int, chance_pm: int, length: int
) -> OffloadView:
    """`length`: blocks of the sequence. Each of them has the price of the last one, since without the first
    the others are of no use: the first ones, computed fast, would be dropped after the others were copied."""
    preempted = is_preempted(state, seq)
    return OffloadView(
        preempted=preempted,
        pressed=conditions.pressed > 0,
        idle=not executor.down.pending_jobs,
        chance_pm=1000 if preempted else chance_pm,
        copy_us=conditions.preempted_us if preempted else conditions.copy_us,
        recompute_us=conditions.recompute.block_us(length - 1),
    )


def most_blocks(executor: Executor, most_bytes: int = JOB_BYTES) -> int:
    return max(1, min(JOB_BLOCKS, most_bytes // max(executor.hello.bytes_per_block, 1)))


def is_preempted(state: State, seq: int) -> bool:
    """Whether the sequence waits, and will use its computed blocks."""
    sequence = state.sequences.get(seq)
    return sequence is not None and sequence.phase is SequencePhase.WAITING


def on_step_failed(state: State, executor: Executor, step: int) -> None:
    """Void the stores of blocks that a failed step may have written, and the loads that run: what they have
    filled may be lost with the rest."""
    for job in state.tiers.jobs.values():
        if job.executor == executor.hello.executor:
            job.void |= job.phase is JobPhase.COPYING if job.up else job.after_step >= step


def on_evicted(state: State, source: str, message: messages.KvGone) -> None:
    """No tier holds these keys any more. Blocks of preempted sequences become dirty again."""
    offload = state.tiers.named(source)
    if offload is None:
        return
    keys = [message.keys[at : at + KEY_BYTES] for at in range(0, len(message.keys), KEY_BYTES)]
    for executor in state.executors.values():
        if executor.hello.host_id == offload.host_id:
            pool = executor.pool
            mine = [key for key in keys if _is_preempted(state, executor, key)]
            pool.mark_lost_below(mine, pool.unreserved_blocks)
            pool.mark_lost_below(keys, 0)


def _is_preempted(state: State, executor: Executor, key: bytes) -> bool:
    """Whether the block with this key belongs to a preempted sequence. Other evicted blocks are too cold for
    the tier: a second copy would evict warmer ones, again and again."""
    block = executor.pool.block_of.get(key)
    return block is not None and is_preempted(state, executor.pool.owner_of[block][0])
