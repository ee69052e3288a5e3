"""Brings the blocks of an idle session up before its next request, into blocks that nothing else wants.

A prefetch takes no block that a waiting or running request wants, nor one with content that may be used: only
empty ones and spent ones (../state/block_pool.py). It loads what the device lacks, if that is faster than
computing it.
"""

from __future__ import annotations

from services.scheduler import preemption
from services.scheduler.kv_tiers import load
from services.scheduler.kv_tiers.lookups import MAX_KEYS
from services.scheduler.sessions.table import Session
from services.scheduler.state.state import Executor, State
from services.scheduler.state.transfers import Job

UNUSED_US = 30_000_000  # a prefetch that no request has used by then is wasted
NO_ROOM, NOT_BELOW, COMPUTE, RUNS, THERE, DRAINS = (
    "no room",
    "not found below",
    "computing is faster",
    "a request of it runs",
    "on the device",
    "the executor drains",
)


def prefetch(state: State, executor: Executor | None, session: Session) -> tuple[int, str]:
    """Start to load what the executor lacks of a session. Returns how many blocks, or 0 and why none. No
    reason: all are on their way."""
    if session.running:
        return 0, RUNS
    if executor is None or state.tiers.below(executor.hello, state.now_us) is None:
        return 0, NOT_BELOW
    pool = executor.pool
    missing = [key for key in session.first_keys(session.blocks) if key not in pool.block_of]
    if not missing:
        return 0, THERE
    if state.draining or executor.draining:
        return 0, DRAINS  # the end would wait for a copy of no use
    coming = {key for job in state.tiers.jobs.values() if _is_rise_at(executor, job) for key in job.keys}
    missing = [key for key in missing if key not in coming]
    if not missing:
        return 0, ""
    if missing[0] in pool.lost:
        return 0, NOT_BELOW
    if state.waiting.groups or executor.awaited_blocks or load.rise_room(executor) < len(missing):
        return 0, NO_ROOM
    size = executor.hello.block_tokens
    compute_us = preemption.RecomputeCost.of(executor).tokens_us(
        (session.blocks - len(missing)) * size, len(missing) * size
    )
    if 0 < compute_us <= load.rise_us(state, executor, len(missing)):
        return 0, COMPUTE
    for first in range(0, len(missing), MAX_KEYS):
        load.begin_rise(state, executor, missing[first : first + MAX_KEYS])
    return len(missing), ""


def _is_rise_at(executor: Executor, job: Job) -> bool:
    return job.is_rise and job.executor == executor.hello.executor
