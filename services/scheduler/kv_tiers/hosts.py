"""Tiers, and the executors above them, join and leave. Jobs and lookups of a lost one end at once.

`core` calls it with events and executors, `results` with executors. A host has one tier in use, others
stand by.
"""

from __future__ import annotations

from services.scheduler.kv_tiers import load, lookups, store
from services.scheduler.kv_tiers.lookups import executor_of, finish
from services.scheduler.state.state import Executor, State
from services.scheduler.state.transfers import MISSES, Job, JobPhase, Tier
from shared.kv_blocks import KEY_BYTES
from shared.messages import ArenaReleased, KvCopied, KvGone


def on_ready(state: State, tier: Tier) -> None:
    """A kv_offload with an arena is ready. A new generation has lost the content of the old one."""
    if state.limits.policy.no_tiers:
        state.tiers.standby[tier.actor] = tier  # another policy may use it: see use_tiers
        return
    known = state.tiers.by_host.get(tier.host_id)
    if known is not None and known.actor != tier.actor and known.epoch > tier.epoch:
        state.tiers.standby[tier.actor] = tier
        return  # of two on a host the later one is used: the executors map its arena
    if known is not None and (known.actor, known.generation) == (tier.actor, tier.generation):
        known.epoch = tier.epoch
        return
    if known is not None:
        _end(state, known)
        if known.actor != tier.actor:
            state.tiers.standby[known.actor] = known
    state.tiers.standby.pop(tier.actor, None)
    state.tiers.by_host[tier.host_id] = tier
    for executor in state.executors.values():
        if executor.hello.host_id == tier.host_id:
            on_joined(state, executor)


def on_lost(state: State, actor: str) -> None:
    """A kv_offload is gone, with its content. Running copies end later. A standby of its host replaces it,
    even one that seemed older: a clock may have gone back."""
    state.tiers.standby.pop(actor, None)
    tier = next((tier for tier in state.tiers.by_host.values() if tier.actor == actor), None)
    if tier is None:
        return
    _end(state, tier)
    others = [other for other in state.tiers.standby.values() if other.host_id == tier.host_id]
    if others:
        on_ready(state, max(others, key=lambda other: (other.epoch, other.actor)))


def use_tiers(state: State, use: bool) -> None:
    """The policy has changed: use the tiers of all hosts, or none of them."""
    if use:
        latest_first = sorted(state.tiers.standby.values(), key=lambda tier: (tier.epoch, tier.actor))[::-1]
        for tier in latest_first:
            on_ready(state, tier)
    else:
        for tier in list(state.tiers.by_host.values()):
            _end(state, tier)
            state.tiers.standby[tier.actor] = tier


def _end(state: State, tier: Tier) -> None:
    actor = tier.actor
    del state.tiers.by_host[tier.host_id]
    state.tiers.lookups = {job: lookup for job, lookup in state.tiers.lookups.items() if lookup.tier != actor}
    for group in state.waiting:
        results = group.lookup_results
        group.lookup_results = {target: results[target] for target in results if target[0] != actor}
    for job in [job for job in state.tiers.jobs.values() if job.tier == actor]:
        if job.phase is not JobPhase.COPYING:
            _expire(state, job)
    for executor in state.executors.values():
        if executor.hello.host_id == tier.host_id:
            executor.pool.set_tier(False)


def on_joined(state: State, executor: Executor) -> None:
    """An executor or a tier has joined: connect them if both are there."""
    hello = executor.hello
    if hello.bytes_per_block and hello.host_id in state.tiers.by_host:
        executor.pool.set_tier(True)


def on_executor_gone(state: State, executor: Executor) -> None:
    """An executor is gone, with its blocks. A copy that it may still make keeps its ranges of the arena until
    kv_offload frees them: the scheduler cannot see when it ends."""
    for job in [job for job in state.tiers.jobs.values() if job.executor == executor.hello.executor]:
        finish(state, job, release=job.up or job.phase is JobPhase.REQUESTED)


def on_arena_mapped(state: State, executor_id: str, generation: int) -> None:
    """Note which arena an executor maps, 0 for none: no copies before it is the tier's."""
    state.tiers.mapped[executor_id] = generation


def on_arena_released(state: State, source: str, message: ArenaReleased) -> None:
    """An executor has unmapped an arena: its kv_offload can free the ranges that it might have written."""
    if source != f"executor.{message.executor}":
        return
    for tier in state.tiers.by_host.values():
        if tier.generation == message.arena_generation:
            state.send(tier.source, message)


def on_step_failed(state: State, executor: Executor, step: int) -> None:
    """Void the stores of blocks that a failed step may have written."""
    for job in state.tiers.jobs.values():
        if job.executor == executor.hello.executor and not job.up and job.after_step >= step:
            job.void = True


def on_copied(state: State, source: str, message: KvCopied) -> None:
    """A copy has ended. `no_arena` and `stale_arena`: the executor has not mapped the arena yet."""
    job = state.tiers.jobs.get(message.job)
    if job is None or job.phase is not JobPhase.COPYING or source != f"executor.{job.executor}":
        return
    executor = executor_of(state, job)
    if executor is None:
        return
    if message.status in ("no_arena", "stale_arena"):
        for _ in range(MISSES):
            lookups.on_missed(state, job.tier)
    (load if job.up else store).on_copied(state, job, executor, message)


def on_evicted(state: State, source: str, message: KvGone) -> None:
    """No tier holds these keys any more. Blocks of preempted sequences become dirty again."""
    tier = state.tiers.named(source)
    if tier is None:
        return
    keys = [message.keys[at : at + KEY_BYTES] for at in range(0, len(message.keys), KEY_BYTES)]
    for executor in state.executors.values():
        if executor.hello.host_id == tier.host_id:
            pool = executor.pool
            mine = [key for key in keys if _is_preempted(state, executor, key)]
            pool.mark_lost_below(mine, pool.unreserved_blocks)
            pool.mark_lost_below(keys, 0)


def _is_preempted(state: State, executor: Executor, key: bytes) -> bool:
    """Whether the block with this key belongs to a preempted sequence. Other evicted blocks are too cold for
    the tier: a second copy would evict warmer ones, again and again."""
    block = executor.pool.block_of.get(key)
    return block is not None and store.is_preempted(state, executor.pool.owner_of[block][0])


def expire(state: State) -> None:
    """End lookups and jobs without an answer in time."""
    lookups.expire(state)
    for job in [job for job in state.tiers.jobs.values() if job.due_us <= state.now_us]:
        if job.phase is not JobPhase.COPYING:
            lookups.on_missed(state, job.tier)
            _expire(state, job)


def _expire(state: State, job: Job) -> None:
    (load if job.up else store).expire(state, job)
