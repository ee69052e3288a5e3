"""Loads blocks from a tier, if that is faster than computing them again. Admission calls `begin`.

A load is a prefix, since computing needs all tokens before. Loading takes the same time for each token,
computing takes more for each next one: so either all available blocks are loaded, or none. A sequence with a
load job is in no step, and delays no other.

Only a load measures what loads take. So an estimate from a moment in which the machine was busy would prevent
the loads that correct it: after a while without one a few blocks are loaded although computing looks faster,
and if that is far faster than predicted, it replaces the estimate.
"""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from services.scheduler import preemption, prefix_cache
from services.scheduler.kv_tiers import lookups
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state import transfers
from services.scheduler.state.cost_model import FAR
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import DECODE, Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.messages import KvCopied, KvCopy, KvPrefetch, KvReady, KvRelease, ints, longs

LEASE_US = 10_000_000
LEAST_DEADLINE_US, MOST_DEADLINE_US = 2_000, 500_000  # for the remote tier
GUESS_FETCH_BYTES_PER_US = 500.0  # rate of the remote tier until it has been measured


def begin(state: State, executor: Executor, sequence: Sequence, group: SequenceGroup) -> None:
    """Load what the device lacks of a sequence that has just been admitted, if that is faster."""
    offload = state.tiers.below(executor.hello, state.now_us)
    result = (
        group.lookup_results.get((offload.actor, executor.hello.fingerprint)) if offload is not None else None
    )
    if (
        offload is None
        or result is None
        or result.at_us < 0
        or sequence.computed % executor.hello.block_tokens
    ):
        return
    keys, valid = _available(executor, sequence, result)
    if not keys or sequence.reserved < len(keys):
        return
    first = len(sequence.table)
    remote = result.found[first : first + len(keys)].count(transfers.REMOTE)
    load_us = _load_us(executor, offload, len(keys), remote, state.now_us)
    costs = RecomputeCost.of(executor)
    compute_us = costs.tokens_us(sequence.computed, sum(valid))
    delay_us = load_us if executor.role == DECODE else 0  # of rows that decode there, if it computes
    if compute_us and load_us >= preemption.backlog_us(executor, sequence, costs) + compute_us + delay_us:
        sequence.record_decision(
            state.now_us,
            "recompute",
            f"loading {sum(valid)} tokens from {offload.source} would take longer",
            reload_us=load_us,
            recompute_us=compute_us,
        )
        state.counters.loads_declined += 1
        if not _may_try(state, executor):
            return
        keys, valid = keys[: transfers.TRY_BLOCKS], valid[: transfers.TRY_BLOCKS]
        remote = result.found[first : first + len(keys)].count(transfers.REMOTE)
        load_us = _load_us(executor, offload, len(keys), remote, state.now_us)
        executor.up.tried_us = state.now_us
    else:
        sequence.copies.found, sequence.copies.found_more = result.found, result.goes_on
    job = _send_prefetch(state, executor, offload, sequence, _Load(keys, valid, load_us, compute_us))
    if job is not None:
        job.fetched = [at in result.fetched for at in range(first, first + len(keys))]


def _may_try(state: State, executor: Executor) -> bool:
    """Whether it is time for a load that measures the present rate. One at a time: it may be slow indeed."""
    loads = (job for job in state.tiers.jobs.values() if job.up and job.executor == executor.hello.executor)
    return executor.up.may_try(state.now_us) and not any(loads)


def predicted(state: State, executor: Executor, group: SequenceGroup, held_blocks: int) -> tuple[int, int]:
    """How many blocks of a waiting group the tiers hold after those that the executor holds, and the
    predicted time to load them; (0, 0) if none."""
    offload = state.tiers.below(executor.hello, state.now_us)
    result = (
        group.lookup_results.get((offload.actor, executor.hello.fingerprint)) if offload is not None else None
    )
    if offload is None or result is None or result.at_us < 0:
        return 0, 0
    found = list(takewhile(bool, result.found[held_blocks:]))
    return len(found), _load_us(executor, offload, len(found), found.count(transfers.REMOTE), state.now_us)


def _available(
    executor: Executor, sequence: Sequence, result: transfers.LookupResult
) -> tuple[list[bytes], list[int]]:
    """Keys of the blocks that the tiers hold after those of the table, and the tokens in each."""
    first, full = len(sequence.table), (len(sequence.tokens) - 1) // executor.hello.block_tokens
    count = len(list(takewhile(bool, result.found[first:])))
    if result.goes_on and first + count >= len(result.found):
        count = lookups.MAX_KEYS  # the load will show how many are there
    count = min(count, lookups.MAX_KEYS)  # in one message; _load_next_part follows
    tail = sequence.tail
    keys = sequence.keys[first : min(first + count, full)]
    valid = [executor.hello.block_tokens] * len(keys)
    if len(keys) < count and tail.key and first + len(keys) == tail.at and tail.root == sequence.keyed[0]:
        keys.append(tail.key)
        valid.append(tail.valid)
    return keys, valid


def _load_next_part(state: State, executor: Executor, sequence: Sequence) -> None:
    """Load what follows the part that has just come, and blocks after it that the device has: a message has
    room for MAX_KEYS keys, and the device may have evicted blocks before others that no tier has."""
    prefix_cache.catch_up(executor, sequence)
    offload = state.tiers.below(executor.hello, state.now_us)
    if offload is None:
        return
    found, goes_on = sequence.copies.found, sequence.copies.found_more
    result = transfers.LookupResult(state.now_us, found, state.now_us, goes_on=goes_on)
    keys, valid = _available(executor, sequence, result)
    if keys and sequence.reserved >= len(keys):
        load_us = _load_us(executor, offload, len(keys), 0, state.now_us)
        _send_prefetch(state, executor, offload, sequence, _Load(keys, valid, load_us))


def _load_us(executor: Executor, offload: transfers.Offload, blocks: int, remote: int, now_us: int) -> int:
    size = executor.hello.bytes_per_block
    fetch_us = int(remote * size / (offload.fetch_bytes_per_us or GUESS_FETCH_BYTES_PER_US))
    # The link works on its queue until KvReady.
    ask_us = offload.answer_us + fetch_us + executor.up.trip_us // 2
    wait_us = max(executor.up.wait_us() - ask_us, 0)
    links = [executor.up]
    if not executor.up.is_known(now_us) and executor.down.copies_seen:
        # Stores show the rate, too. The faster of two doubtful estimates counts, since a load corrects it.
        links = [link for link in (executor.up, executor.down) if link.copies_seen]
    copy_us = min(link.copy_us(blocks * size) for link in links)
    return ask_us + wait_us + copy_us + executor.up.trip_us // 2


class _Load(NamedTuple):
    """Blocks to load, and the predicted times to load and to compute them."""

    keys: list[bytes]
    valid: list[int]  # tokens in each block
    load_us: int
    compute_us: int = 0  # 0: not predicted


def _send_prefetch(
    state: State, executor: Executor, offload: transfers.Offload, sequence: Sequence, load: _Load
) -> transfers.Job | None:
    keys, valid, load_us, compute_us = load
    sequence.reserved -= len(keys)
    blocks = executor.pool.allocate(len(keys))
    sequence.table.extend(blocks)
    sequence.copies.loads_until = sequence.most_computed if len(sequence.table) >= lookups.MAX_KEYS else 0
    executor.change_rows()  # and it has a job from here on
    if any(source in blocks for source, _ in executor.fork_copies):
        return None  # the next step reads one of them for a fork: compute instead
    deadline_us = min(max(compute_us or MOST_DEADLINE_US, LEAST_DEADLINE_US), MOST_DEADLINE_US)
    job = lookups.start_job(state, executor, offload, blocks, keys)
    job.up, job.valid, job.seq = True, valid, sequence.seq
    job.predicted_us, job.recompute_us = load_us, compute_us
    sequence.copies.load_job = job.number
    _ask_for(state, executor, offload, job, deadline_us, sequence.request.trace)
    return job


def _ask_for(
    state: State,
    executor: Executor,
    offload: transfers.Offload,
    job: transfers.Job,
    deadline_us: int,
    trace: str,
) -> None:
    job.due_us, job.lease_us = state.now_us + deadline_us + transfers.ANSWER_US, state.now_us + LEASE_US
    message = KvPrefetch(
        job=job.number,
        owner=executor.source,
        keys=b"".join(job.keys),
        deadline_us=deadline_us,
        lease_us=LEASE_US,
        fingerprint=executor.hello.fingerprint,
    )
    state.send(offload.source, message, trace)


def begin_rise(state: State, executor: Executor, keys: list[bytes]) -> transfers.Job | None:
    """Load blocks for a request that is expected, if there are as many empty or spent ones. None if not."""
    offload, keys = state.tiers.below(executor.hello, state.now_us), keys[: lookups.MAX_KEYS]
    if offload is None or rise_room(executor) < len(keys):
        return None
    blocks = executor.pool.try_allocate(len(keys)) or []
    job = lookups.start_job(state, executor, offload, blocks, keys)
    executor.pool.release(blocks, [], 0)  # the copy alone has them
    job.up, job.valid = True, [executor.hello.block_tokens] * len(keys)
    job.predicted_us = rise_us(state, executor, len(keys))
    _ask_for(state, executor, offload, job, MOST_DEADLINE_US, "")
    return job


def rise_room(executor: Executor) -> int:
    """How many blocks may be loaded for a request that has not come: unreserved ones, empty or spent."""
    return max(executor.pool.unreserved_blocks - executor.pool.cached_blocks, 0)


def rise_us(state: State, executor: Executor, blocks: int) -> int:
    """The predicted time to load so many blocks; 0 without a tier."""
    offload = state.tiers.below(executor.hello, state.now_us)
    return _load_us(executor, offload, blocks, 0, state.now_us) if offload is not None else 0


def on_ready(state: State, source: str, message: KvReady) -> None:
    """A prefix of the job's keys is in the arena, and stays there for the lease: copy it up."""
    job, offload = state.tiers.jobs.get(message.job), state.tiers.named(source)
    if offload is None:
        return
    if (
        job is None
        or job.phase is not transfers.JobPhase.REQUESTED
        or not job.up
        or job.offload != offload.actor
    ):
        state.send(source, KvRelease(jobs=ints([message.job])))
        return
    executor, sequence = lookups.executor_of(state, job), _sequence(state, job)
    offload.on_answered(0 if message.from_l2 else state.now_us - job.began_us)
    there = _usable(job, message)
    wanted = sequence is not None or job.is_rise
    if executor is None or not wanted or not there or message.arena_generation != offload.generation:
        lookups.finish(state, job)
        if sequence is not None:
            _end(state, job, sequence, "no tier has its blocks any more", came=False)
        return
    size = executor.hello.bytes_per_block
    if message.from_l2 and message.took_us:
        rate = message.from_l2 * size / message.took_us
        offload.fetch_bytes_per_us += (rate - offload.fetch_bytes_per_us) / (
            4 if offload.fetch_bytes_per_us else 1
        )
    fetched = job.from_l2 = max(sum(job.fetched[:there]), min(message.from_l2, there))
    state.counters.l2_hit_blocks += fetched
    state.counters.l1_hit_blocks += there - fetched
    executor.pool.end_copy(job.blocks[there:])
    job.blocks, job.keys, job.valid = job.blocks[:there], job.keys[:there], job.valid[:there]
    job.phase, job.sent_us = transfers.JobPhase.COPYING, state.now_us
    lookups.count_queued(executor, job, there * size)
    copy = KvCopy(
        job=job.number,
        to_arena=False,
        after_step=executor.forked_step,
        arena_generation=message.arena_generation,
        blocks=ints(job.blocks),
        offsets=longs(message.offsets[:there]),
        block_bytes=size,
    )
    state.send(executor.source, copy, sequence.request.trace if sequence is not None else "")


def _usable(job: transfers.Job, message: KvReady) -> int:
    """How many blocks from the first on are there with enough valid tokens."""
    count = 0
    for at, (offset, valid) in enumerate(zip(message.offsets, message.valid_tokens, strict=False)):
        if offset < 0 or at >= len(job.blocks) or valid < job.valid[at]:
            break
        count += 1
    return count


def end_copy(state: State, job: transfers.Job, executor: Executor, message: KvCopied) -> None:
    """A load has ended. If it took longer than the lease, it may have read other bytes."""
    ok = message.status == "ok" and state.now_us < job.lease_us and not job.void
    if ok:
        if executor.up.is_unused(state.now_us) and FAR * (state.now_us - job.began_us) < job.predicted_us:
            executor.up.forget()
        executor.up.observe(job.queued_bytes, message.took_us, state.now_us)
        executor.up.observe_trip(state.now_us - job.sent_us - message.wait_us - message.took_us)
    if ok and job.is_rise and lookups.offload_of(state, job) is not None:
        for block, key in zip(job.blocks, job.keys, strict=True):
            executor.pool.mark_clean(block, key, filled=True)
    lookups.finish(state, job)
    sequence = _sequence(state, job)
    if sequence is None:
        return
    if not ok:
        state.counters.loads_failed += 1
        late = state.now_us >= job.lease_us
        why = "the copy took longer than its lease" if late else f"the copy ended with {message.status}"
        _end(state, job, sequence, why, came=False)
        return
    _adopt(state, executor, sequence, job)
    state.counters.loads += 1
    state.counters.add_restore(state.now_us - job.began_us, job.predicted_us)
    _end(state, job, sequence, f"{sum(job.valid)} tokens from {job.offload}")
    if sequence.computed == len(sequence.table) * executor.hello.block_tokens:
        _load_next_part(state, executor, sequence)


def _adopt(state: State, executor: Executor, sequence: Sequence, job: transfers.Job) -> None:
    """Treat the loaded blocks as computed ones."""
    pool, block_tokens = executor.pool, executor.hello.block_tokens
    start = sequence.computed
    sequence.computed += sum(job.valid)
    new = max(0, sequence.computed - max(sequence.most_computed, start))
    state.counters.restored_tokens += sequence.computed - start
    sequence.most_computed = max(sequence.most_computed, sequence.computed)
    sequence.cached_tokens += new
    full = job.valid.count(block_tokens)  # all but a tail
    blocks, keys = job.blocks[:full], job.keys[:full]
    pool.register(blocks, keys)
    if lookups.offload_of(state, job) is not None:
        for block, key in zip(blocks, keys, strict=True):
            pool.mark_clean(block, key)
    sequence.registered = max(sequence.registered, sequence.computed // block_tokens)


def expire(state: State, job: transfers.Job) -> None:
    """The kv_offload has not answered in time."""
    lookups.finish(state, job)
    sequence = _sequence(state, job)
    if sequence is not None:
        _end(state, job, sequence, "no answer in time", came=False)


def _end(state: State, job: transfers.Job, sequence: Sequence, why: str, *, came: bool = True) -> None:
    """The sequence continues with the tokens that it has."""
    sequence.copies.load_job = 0
    executor = lookups.executor_of(state, job)
    if executor is not None:
        executor.change_rows()
        if sequence.turn.preemptions:
            preemption.start_debt(executor, sequence)
    came_tokens = sum(job.valid) if came else 0
    per_block = executor.hello.block_tokens if executor is not None else 0
    l2_tokens = min(job.from_l2 * per_block, came_tokens)
    sequence.record_decision(
        state.now_us,
        "restore",
        why,
        tokens=came_tokens,
        predicted_us=job.predicted_us,
        took_us=state.now_us - job.began_us,
        recompute_us=job.recompute_us,
        **({"l2_tokens": l2_tokens} if l2_tokens else {}),
    )


def _sequence(state: State, job: transfers.Job) -> Sequence | None:
    """The sequence of a load, if it still waits for it."""
    sequence = state.sequences.get(job.seq)
    return sequence if sequence is not None and sequence.copies.load_job == job.number else None
