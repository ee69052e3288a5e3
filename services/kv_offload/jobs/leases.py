"""How leases end: by release, by expiry, by a new incarnation of their scheduler. Pure.

A read lease that ends unpins. A write reservation whose end nobody told goes to quarantine, since its
executor may be copying still: until the scheduler says, late, that it has stopped, until the executor says
that it has unmapped the arena, or until the executor has been gone (or another process) for QUARANTINE_US.
What is left when it stays alive is of a scheduler that has died: nobody else knows the job, and LIVE_US is
far beyond what the executor's own watchdog lets a copy take.

A scheduler that is silent is not a dead one: its leases go on to their deadlines, which it knows, too.
"""

from __future__ import annotations

from services.kv_offload.l2.state import LeaseId
from services.kv_offload.state import MOST_LEASE_US, Quarantined, ReadLease, State, WriteLease
from shared.messages import ArenaReleased, KvRelease

QUARANTINE_US = 60_000_000
LIVE_US = 600_000_000


def open_lease(state: State, lease: LeaseId, what: WriteLease | ReadLease, lease_us: int) -> None:
    """Enter it."""
    state.leases[lease] = what
    state.urgent_stores += isinstance(what, WriteLease) and what.urgent
    extend(state, lease, lease_us)


def extend(state: State, lease: LeaseId, lease_us: int) -> None:
    """It ends at `lease_us` from now."""
    state.due.set(("lease", lease), state.now_us + min(max(lease_us, 0), MOST_LEASE_US))


def close(state: State, lease: LeaseId) -> WriteLease | ReadLease | None:
    """Take it out and unpin what it pinned. Whose ranges a write lease has is then the caller's business."""
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
    """The scheduler needs these no more, and their copies have stopped."""
    for job in message.jobs:
        lease = (source, epoch, job)
        if isinstance(what := close(state, lease), WriteLease):
            for range_ in filter(None, what.ranges):
                state.l1.give(range_)
        end_quarantine(state, lease)


def expire(state: State, lease: LeaseId) -> None:
    """Its deadline has passed."""
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
    """Nobody can write these ranges any more: they are free. None where there are none."""
    held = state.quarantine.pop(lease, None)
    if held is not None:
        state.due.drop(("quarantine", lease))
        for range_ in held.ranges:
            state.l1.give(range_)
    return held


def scheduler_restarted(state: State, source: str) -> None:
    """All leases of its last incarnation are void."""
    for lease in [lease for lease in state.leases if lease[0] == source]:
        expire(state, lease)


def executor_seen(state: State, source: str, epoch: int) -> None:
    """Its copies go on if it is who it was; those of an earlier incarnation have ended."""
    state.executors[source] = epoch
    for lease, held in state.quarantine.items():
        if held.owner == source and held.owner_epoch in (0, epoch):
            held.owner_epoch, held.owner_gone = epoch, False
            state.due.set(("quarantine", lease), held.since_us + LIVE_US)
        elif held.owner == source:
            _gone(state, lease, held)


def executor_lost(state: State, source: str) -> None:
    """It is dead or cut off."""
    state.executors.pop(source, None)
    for lease, held in state.quarantine.items():
        if held.owner == source:
            _gone(state, lease, held)


def arena_released(state: State, message: ArenaReleased) -> None:
    """An executor has no mapping of an arena any more; if it is this one, it writes nothing here."""
    if message.arena_generation == state.l1.arena.generation:
        owner = f"executor.{message.executor}"
        for lease in [lease for lease, held in state.quarantine.items() if held.owner == owner]:
            end_quarantine(state, lease)


def _gone(state: State, lease: LeaseId, held: Quarantined) -> None:
    """Its ranges are free in QUARANTINE_US from the first time that it is said to be gone."""
    if not held.owner_gone:
        held.owner_gone = True
        state.due.set(("quarantine", lease), state.now_us + QUARANTINE_US)
