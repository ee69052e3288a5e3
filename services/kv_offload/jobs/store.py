"""Stores blocks from device memory in L1: reserve ranges, then commit the written ones. Pure."""

from __future__ import annotations

from services.kv_offload.jobs import leases
from services.kv_offload.l1_cache import Entry, Range
from services.kv_offload.l2.state import LeaseId
from services.kv_offload.state import State, WriteLease, names_of
from shared.messages import KvCommit, KvReserve, KvReserved, KvStored, ints, longs

NO_ROOM, PRESENT = -1, -2
REPEATED_COMMITS = 256  # last commits, to answer a repeated message


def reserve(state: State, lease: LeaseId, message: KvReserve, trace: str) -> None:
    """Answer with a range for each key that is not in L1. A repeated job gets the same ranges. A job with
    ranges in quarantine gets none."""
    names = names_of(message.fingerprint, message.keys)
    before = state.leases.get(lease)
    if isinstance(before, WriteLease) and before.names == names:
        leases.extend(state, lease, message.lease_us)
        offsets = before.offsets
    elif before is not None or lease in state.quarantine:
        offsets = [NO_ROOM] * len(names)
    else:
        made = _places(state, message)
        leases.open_lease(state, lease, made, message.lease_us)
        offsets = made.offsets
    status = "no_room" if NO_ROOM in offsets else "ok"
    generation = state.l1.arena.generation
    answer = KvReserved(job=message.job, arena_generation=generation, offsets=longs(offsets), status=status)
    state.send(lease, answer, trace)


def commit(state: State, lease: LeaseId, message: KvCommit, trace: str) -> None:
    """Publish the written ranges, free the others, and answer with the tier of each key. An expired
    reservation stores nothing, but its ranges are free now: its copies have ended."""
    names = []
    if isinstance(state.leases.get(lease), WriteLease):
        made = leases.close(state, lease)
        assert isinstance(made, WriteLease)
        _publish(state, made, list(message.written))
        names = made.names
        state.committed[lease] = names
        if len(state.committed) > REPEATED_COMMITS:
            del state.committed[next(iter(state.committed))]
    elif (late := leases.end_quarantine(state, lease)) is not None:
        state.counters.late_commits += 1
        names = late.names
    else:
        names = state.committed.get(lease, [])
    state.send(lease, KvStored(job=message.job, tiers=ints(map(state.tier_of, names))), trace)


def _places(state: State, message: KvReserve) -> WriteLease:
    names = names_of(message.fingerprint, message.keys)
    there = [state.l1.entries.get(name) for name in names]
    held = [entry for entry in there if entry is not None]
    for entry in held:
        state.l1.pin(entry)  # so that room for the tail does not evict the prefix
        state.use(entry)
    urgent = message.priority > 0
    ranges: list[Range | None] = []
    full = False
    for present in there:
        range_ = None if present or full else state.l1.take(message.value_bytes, urgent=urgent)
        full = full or (present is None and range_ is None)
        ranges.append(range_)
    if any(ranges):
        state.l2.sizes[message.fingerprint] = message.value_bytes
    offsets = [_offset(*row) for row in zip(there, ranges, strict=True)]
    state.counters.no_room += offsets.count(NO_ROOM)
    valid = [*message.valid_tokens, *[0] * len(names)][: len(names)]
    epoch = state.executors.get(message.owner, 0)
    return WriteLease(message.owner, epoch, names, ranges, offsets, held, valid, urgent)


def _offset(entry: Entry | None, range_: Range | None) -> int:
    if entry is not None:
        return PRESENT
    return NO_ROOM if range_ is None else range_.offset


def _publish(state: State, made: WriteLease, written: list[int]) -> None:
    marks = [*written, *[0] * len(made.names)]
    rows = list(zip(made.names, made.ranges, made.valid_tokens, marks, strict=False))
    for name, range_, valid_tokens, done in reversed(rows):  # the head becomes the most recently used
        if range_ is None:
            continue
        if done and name not in state.l1.entries:
            state.l1.publish(name, range_, valid_tokens, urgent=made.urgent)
            state.counters.stored += 1
        else:
            state.l1.give(range_)
