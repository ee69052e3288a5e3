"""Looks up the blocks of waiting groups in the tiers, and starts and ends jobs for load.py and store.py.

A group is looked up at its arrival, so that the remote tier can start to fetch missing blocks. It is looked
up again at its turn if the result is old and the device does not hold all blocks. A message has room for
MAX_KEYS keys: where the last of them is there, the keys after them are looked up next.

A job is a copy of blocks up (load.py) or down (store.py). `start_job` starts it, and `finish` ends it, with
or without success.
"""

from __future__ import annotations

from services.scheduler import prefix_cache
from services.scheduler.preemption import RecomputeCost
from services.scheduler.state import transfers
from services.scheduler.state.requests import Sequence
from services.scheduler.state.state import PREFILL, Executor, State
from services.scheduler.state.waiting_queue import SequenceGroup
from shared.messages import KvFound, KvLookup, KvRelease, ints

WAIT_US, MOST_WAIT_US = 20_000, 200_000  # how long an admission waits for answers, by what they may save
STALE_US = 2_000_000
FEW_BLOCKS = 3  # missing blocks of a prompt that are computed before an answer comes
MAX_KEYS = 1_000  # 32 of the 64 KiB of a message


def on_request(state: State, group: SequenceGroup) -> None:
    """Look up a new group at every kv_offload of its model's executors. Also if the device holds all its
    blocks: keys that are often looked up are kept, and copied to the remote tier."""
    for executor, offload in _targets(state, group):
        if _target(executor, offload) not in group.lookup_results:
            _send_lookup(state, executor, offload, group)


def refresh(state: State, group: SequenceGroup) -> None:
    """The group is next, and lacks room. Look it up again before its turn if the result would be old then."""
    for executor, offload in _targets(state, group):
        result = group.lookup_results.get(_target(executor, offload))
        old = result is None or _is_old(state, executor, offload, group, STALE_US // 2)
        if old and not _is_covered(executor, group):
            _send_lookup(state, executor, offload, group)


def must_wait(state: State, group: SequenceGroup) -> bool:
    """True while the group should wait for an answer, or for the end of a copy of its tail.

    Sends a new lookup if the result is old. Waits at most MOST_WAIT_US at its turn.
    """
    targets, head = _targets(state, group), group.sequences[0]
    if not group.lookup_since_us or state.now_us > group.lookup_since_us + STALE_US:
        group.lookup_since_us = state.now_us
    if any(prefix_cache.is_tail_copied(executor, head) for executor, _ in targets):
        return state.now_us < group.lookup_since_us + MOST_WAIT_US
    if all(_has_waited(state, executor, head, group.lookup_since_us) for executor, _ in targets):
        return False
    waits = False
    for executor, offload in targets:
        result = group.lookup_results.get(_target(executor, offload))
        ask = result is None or _is_old(state, executor, offload, group, STALE_US)
        silent = (
            result is not None
            and (result.at_us < 0 or result.goes_on)
            and not _has_waited(state, executor, head, result.sent_us)
        )
        if not (ask or silent) or _is_covered(executor, group):
            continue
        waits = not ask or _send_lookup(state, executor, offload, group) is not None or waits
    return waits


def _has_waited(state: State, executor: Executor, sequence: Sequence, since_us: int) -> bool:
    """True if the wait for an answer has lasted as long as the computation that it may save. After a burst of
    long prompts the answers wait in our mailbox."""
    waited_us = state.now_us - since_us
    if waited_us < WAIT_US or waited_us >= MOST_WAIT_US:
        return waited_us >= MOST_WAIT_US
    held = len(prefix_cache.lookup(executor, sequence)) * executor.hello.block_tokens
    return waited_us >= RecomputeCost.of(executor).tokens_us(held, len(sequence.tokens) - held)


def _is_old(
    state: State, executor: Executor, offload: transfers.Offload, group: SequenceGroup, stale_us: int
) -> bool:
    """Whether a result may be out of date: by its age; or by a store since then, if blocks of a preempted
    sequence are missing, or blocks of a prompt before others that are there: the device had them then."""
    result = group.lookup_results[_target(executor, offload)]
    if result.at_us < 0:
        return False
    if state.now_us - result.at_us > stale_us:
        return True
    if offload.stores == result.stores:
        return False
    found = result.found[len(prefix_cache.lookup(executor, group.sequences[0])) :]
    missing = found.index(0) if 0 in found else len(found)
    return missing < len(found) if group.resumes else any(found[missing:])


def on_found(state: State, source: str, message: KvFound) -> None:
    """Apply an answer, unless the group has started."""
    tiers = state.tiers
    lookup, offload = tiers.lookups.get(message.job), tiers.named(source)
    if lookup is None or offload is None or offload.actor != lookup.offload:
        return
    del tiers.lookups[message.job]
    offload.on_answered()
    group = state.waiting.groups.get(lookup.group)
    result = group.lookup_results.get(lookup.target) if group is not None else None
    if group is not None and result is not None and result.job == message.job:
        result.found, result.at_us = (*result.found[: lookup.first], *message.tiers), state.now_us
        remote = (at for at, where in enumerate(message.tiers, lookup.first) if where == transfers.REMOTE)
        result.fetched.update(remote)
        _go_on(state, group, lookup, result)


def _go_on(
    state: State, group: SequenceGroup, lookup: transfers.Lookup, result: transfers.LookupResult
) -> None:
    """Look up the keys after those that were answered, if the last of these is somewhere."""
    result.goes_on = False
    known = len(result.found)
    place = next((place for place in _targets(state, group) if _target(*place) == lookup.target), None)
    if place is None or not known or known % MAX_KEYS:
        return
    executor, offload = place
    keys = wanted_keys(executor, group.sequences[0])
    if known < len(keys) and (result.found[-1] or keys[known - 1] in executor.pool.block_of):
        result.goes_on = True
        _ask(state, executor, offload, group, result, keys[known : known + MAX_KEYS])


def expire(state: State) -> None:
    """Drop lookups without an answer in time; the oldest are first. Several of one kv_offload count as one
    miss: after a burst the answers may wait in our mailbox."""
    lookups, silent = state.tiers.lookups, dict[str, None]()
    while lookups:
        job, lookup = next(iter(lookups.items()))
        if state.now_us < lookup.sent_us + transfers.ANSWER_US:
            break
        del lookups[job]
        silent[lookup.offload] = None
    for actor in silent:
        on_missed(state, actor)


def on_missed(state: State, actor: str) -> None:
    """A kv_offload has not answered. After MISSES in a row it is not used for BACKOFF_US."""
    for offload in state.tiers.by_host.values():
        if offload.actor == actor:
            offload.misses += 1
            if offload.misses >= transfers.MISSES:
                offload.backoff_until_us = state.now_us + transfers.BACKOFF_US
                state.counters.tier_backoffs += 1


def _targets(state: State, group: SequenceGroup) -> list[tuple[Executor, transfers.Offload]]:
    """One executor of the model for each kv_offload and kind of engine that stores in it."""
    tiers = state.tiers
    if not tiers.by_host:
        return []
    targets: dict[transfers.LookupTarget, tuple[Executor, transfers.Offload]] = {}
    last = PREFILL if group.sequences[0].generated else ""  # it holds what has just moved away
    for executor in sorted(state.executors.values(), key=lambda e: e.role == last != ""):
        offload = tiers.below(executor.hello, state.now_us)
        if offload is None or not executor.pool.write_back or executor.draining:
            continue
        if executor.hello.model == group.request.tokenized.model:
            targets.setdefault(_target(executor, offload), (executor, offload))
    return list(targets.values())


def _target(executor: Executor, offload: transfers.Offload) -> transfers.LookupTarget:
    return offload.actor, executor.hello.fingerprint


def _send_lookup(
    state: State, executor: Executor, offload: transfers.Offload, group: SequenceGroup
) -> transfers.LookupResult | None:
    keys, target = wanted_keys(executor, group.sequences[0]), _target(executor, offload)
    if not keys:
        return None
    before = group.lookup_results.get(target)
    fetched = before.fetched if before is not None else set[int]()
    result = transfers.LookupResult(state.now_us, stores=offload.stores, fetched=fetched)
    group.lookup_results[target] = result
    _ask(state, executor, offload, group, result, keys[:MAX_KEYS])
    return result


def _ask(
    state: State,
    executor: Executor,
    offload: transfers.Offload,
    group: SequenceGroup,
    result: transfers.LookupResult,
    keys: list[bytes],
) -> None:
    """Send a lookup of the group's keys after those in `result`."""
    result.job, fingerprint = state.tiers.number(), executor.hello.fingerprint
    lookup = transfers.Lookup(group.number, _target(executor, offload), state.now_us, len(result.found))
    state.tiers.lookups[result.job] = lookup
    # Every key, not up to the first miss: blocks that the device still shares were never copied down.
    joined = b"".join(keys)
    message = KvLookup(job=result.job, keys=joined, prefix=False, fingerprint=fingerprint, promote=True)
    state.send(offload.source, message, group.request.trace)


def wanted_keys(executor: Executor, sequence: Sequence) -> list[bytes]:
    """Keys of all blocks of a sequence that the tiers may hold, in order, with the tail of a preempted one
    last. The last token is always computed, since the next one is sampled from it."""
    prefix_cache.extend_keys(executor, sequence)
    full = (len(sequence.tokens) - 1) // executor.hello.block_tokens
    keys = sequence.keys[:full]
    if sequence.tail.key and sequence.tail.at == len(keys) and sequence.tail.root == sequence.keyed[0]:
        keys.append(sequence.tail.key)
    return keys


def known_after(result: transfers.LookupResult, held: int, full: int) -> int:
    """How many of the `full` blocks of a prompt the tiers have after the first `held`."""
    coming = full - max(len(result.found), held) if result.goes_on else 0
    return sum(where > 0 for where in result.found[held:]) + max(coming, 0)


def _is_covered(executor: Executor, group: SequenceGroup) -> bool:
    """True if the device holds all blocks that a load could bring, except a few of a new prompt."""
    sequence, few = group.sequences[0], 0 if group.resumes else FEW_BLOCKS
    hits = prefix_cache.lookup(executor, sequence)
    if (len(hits) + few + 1) * executor.hello.block_tokens < len(sequence.tokens):
        return False
    return not sequence.tail.key or prefix_cache.tail_block(executor, sequence, len(hits)) is not None


def start_job(
    state: State, executor: Executor, offload: transfers.Offload, blocks: list[int], keys: list[bytes]
) -> transfers.Job:
    """A new job for these blocks, which are not given out until it ends."""
    job = transfers.Job(
        number=state.tiers.number(),
        offload=offload.actor,
        generation=offload.generation,
        executor=executor.hello.executor,
        epoch=executor.epoch,
        blocks=blocks,
        keys=keys,
        began_us=state.now_us,
    )
    executor.pool.begin_copy(blocks)
    state.tiers.jobs[job.number] = job
    return job


def executor_of(state: State, job: transfers.Job) -> Executor | None:
    """The executor incarnation of the job's blocks, if it lives."""
    executor = state.executors.get(job.executor)
    return executor if executor is not None and executor.epoch == job.epoch else None


def offload_of(state: State, job: transfers.Job) -> transfers.Offload | None:
    """The kv_offload of the job, if this incarnation lives."""
    offload = state.tiers.named(f"kv_offload.{job.offload}")
    return offload if offload is not None and offload.generation == job.generation else None


def count_queued(executor: Executor, job: transfers.Job, size_bytes: int) -> None:
    """Count `size_bytes` of the job as pending on its link."""
    uncount_queued(executor, job)
    job.queued_bytes = size_bytes
    (executor.up if job.up else executor.down).begin(size_bytes)


def uncount_queued(executor: Executor, job: transfers.Job) -> None:
    """Count the job as pending no longer."""
    if job.queued_bytes:
        (executor.up if job.up else executor.down).end(job.queued_bytes)
        job.queued_bytes = 0


def finish(state: State, job: transfers.Job, *, release: bool = True) -> None:
    """Remove a job: end the copy of its blocks, and with `release` free its ranges in the arena. Sent to a
    lost kv_offload, too: it may live, and would keep the lease for long."""
    del state.tiers.jobs[job.number]
    executor = executor_of(state, job)
    if executor is not None:
        executor.pool.end_copy(job.blocks)
        uncount_queued(executor, job)
    source = f"kv_offload.{job.offload}"
    offload = state.tiers.named(source)
    if release and (offload is None or offload.generation == job.generation):
        state.send(source, KvRelease(jobs=ints([job.number])))
