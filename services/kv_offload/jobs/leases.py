"""Leases of ranges: they end by release, by expiry, or by a new incarnation of their scheduler. Pure.

The end of a read lease unpins its entries. An expired write reservation goes to quarantine, since its
executor may still be copying. Its ranges are free after a late release or commit, after the executor has
unmapped the arena, or QUARANTINE_US after the executor is gone. If the executor lives, the scheduler has
died, and the ranges are free after LIVE_US: far longer than the executor's watchdog lets a copy take.

Leases of a silent scheduler last until their deadlines: it may live.
"""

from __future__ import annotations

from services.kv_offload.l2.state import LeaseId
from services.kv_offload.state import MOST_LEASE_US, Quarantined, ReadLease, State, WriteLease
from shared.messages import ArenaReleased, KvRelease

QUARANTINE_US = 60_000_000
LIVE_US = 600_000_000


def open_lease(state: State, lease: LeaseId, what: WriteLease | ReadLease, lease_us: int) -> None:
    """Add a lease that ends `lease_us` from now."""
    state.leases[lease] = what
    state.urgent_stores += isinstance(what, WriteLease) and what.urgent
    extend(state, lease, lease_us)


def extend(state: State, lease: LeaseId, lease_us: int) -> None:
    """Move the end of a lease to `lease_us` from now, at most MOST_LEASE_US."""
    state.due.set(("lease", lease), state.now_us + min(max(lease_us, 0), MOST_LEASE_US))


def close(state: State, lease: LeaseId) -> WriteLease | ReadLease | None:
    """Remove a lease and unpin its entries. The caller must free or keep the ranges of a write lease."""
    what = state.leases.pop(lease, None)
    if what is not None:
        state.due.drop(("lease", lease))
    if isinstance(what, WriteLease):
        state.urgent_stores -= what.urgent
        state.l1.unpin(what.held)
    elif what is not None:
        state.l1.unpin(what.entries)
    return what


def release(state: State, source: str, epoch: int, message: KvRelease) -> None:
    """The scheduler releases jobs with no copy in flight: free their ranges."""
    for job in message.jobs:
        lease = (source, epoch, job)
        if isinstance(what := close(state, lease), WriteLease):
            for range_ in filter(None, what.ranges):
                state.l1.give(range_)
        end_quarantine(state, lease)


def expire(state: State, lease: LeaseId) -> None:
    """End a lease at its deadline; ranges that may still be written go to quarantine."""
    state.counters.expired_leases += 1
    what = close(state, lease)
    if not isinstance(what, WriteLease):
        return
    ranges = [range_ for range_ in what.ranges if range_ is not None]
    if not ranges:
        return
    epoch = what.owner_epoch
    alive = state.executors.get(what.owner, 0)
    gone = not alive or epoch not in (0, alive)
    held = Quarantined(what.owner, epoch, what.names, ranges, state.now_us, owner_gone=gone)
    state.quarantine[lease] = held
    state.due.set(("quarantine", lease), state.now_us + (QUARANTINE_US if gone else LIVE_US))


def end_quarantine(state: State, lease: LeaseId) -> Quarantined | None:
    """Free the quarantined ranges of a lease; None if there are none."""
    held = state.quarantine.pop(lease, None)
    if held is not None:
        state.due.drop(("quarantine", lease))
        for range_ in held.ranges:
            state.l1.give(range_)
    return held


def scheduler_restarted(state: State, source: str) -> None:
    """Expire all leases of a scheduler's last incarnation."""
    for lease in [lease for lease in state.leases if lease[0] == source]:
        expire(state, lease)


def executor_seen(state: State, source: str, epoch: int) -> None:
    """An executor lives: its copies may still run, those of an earlier incarnation have ended."""
    state.executors[source] = epoch
    for lease, held in state.quarantine.items():
        if held.owner == source and held.owner_epoch in (0, epoch):
            held.owner_epoch, held.owner_gone = epoch, False
            state.due.set(("quarantine", lease), held.since_us + LIVE_US)
        elif held.owner == source:
            _gone(state, lease, held)


def executor_lost(state: State, source: str) -> None:
    """An executor is dead or cut off."""
    state.executors.pop(source, None)
    for lease, held in state.quarantine.items():
        if held.owner == source:
            _gone(state, lease, held)


def arena_released(state: State, message: ArenaReleased) -> None:
    """An executor has unmapped an arena. If it is this one, free the executor's quarantined ranges."""
    if message.arena_generation == state.l1.arena.generation:
        owner = f"executor.{message.executor}"
        for lease in [lease for lease, held in state.quarantine.items() if held.owner == owner]:
            end_quarantine(state, lease)


def _gone(state: State, lease: LeaseId, held: Quarantined) -> None:
    """Free the ranges QUARANTINE_US after the executor was first found gone."""
    if not held.owner_gone:
        held.owner_gone = True
        state.due.set(("quarantine", lease), state.now_us + QUARANTINE_US)
