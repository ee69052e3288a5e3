"""Answers lookups with the tier of each block, and prefetches with leases on blocks of L1. Pure.

A lookup checks L1, and L2 within LOOKUP_US if needed. A prefetch copies blocks from L2 to L1, and is answered
with the leased blocks:

                  all in L1 ──▶ KvReady at once
    KvPrefetch ──┤
                  some in L2 ──▶ gets ──▶ KvReady when all are in L1, or at the deadline with those in L1

Only the blocks before the first missing one are useful, so only these are leased. A value that comes from L2
after the deadline stays in L1.
"""

from __future__ import annotations

from services.kv_offload.events import Name
from services.kv_offload.jobs import leases
from services.kv_offload.l1_cache import Entry
from services.kv_offload.l2.state import LeaseId, Want
from services.kv_offload.state import MOST_LEASE_US, Load, Lookup, ReadLease, State, names_of
from shared.messages import KvFound, KvLookup, KvPrefetch, KvReady, ints, longs

NOT_HERE = -1

LOOKUP_US = 10_000  # for the answer of L2: the request waits in the scheduler's queue meanwhile


def look_up(state: State, lease: LeaseId, message: KvLookup, trace: str) -> None:
    """Answer now, or within LOOKUP_US if L2 must be checked."""
    if lease in state.lookups:
        return  # a repeated lookup: the answer will come
    names = names_of(message.fingerprint, message.keys)
    found = [state.l1.entries[name] for name in names if name in state.l1.entries]
    state.l1.touch(found)
    lookup = Lookup(names, message.prefix, message.promote, trace)
    state.lookups[lease] = lookup
    tiers = [state.tier_of(name) for name in names]
    if 0 not in tiers or not state.l2.usable:
        finish_lookup(state, lease)
        return
    first = tiers.index(0)
    unknown = tuple(name for name, tier in zip(names[first:], tiers[first:], strict=True) if not tier)
    state.l2.wants.append(Want(lease, unknown))
    state.due.set(("lookup", lease), state.now_us + LOOKUP_US)


def finish_lookup(state: State, lease: LeaseId) -> None:
    """Answer with the known tiers, and with `promote` start to copy values from L2 to L1."""
    if (lookup := drop_lookup(state, lease)) is None:
        return
    tiers = [state.tier_of(name) for name in lookup.names]
    if lookup.prefix and 0 in tiers:
        miss = tiers.index(0)
        tiers[miss:] = [0] * (len(tiers) - miss)
    state.counters.lookups += len(tiers)
    state.counters.hits_l1 += tiers.count(1)
    state.counters.hits_l2 += tiers.count(2)
    if lookup.promote:
        for name, tier in zip(lookup.names, tiers, strict=True):
            if tier == 2:
                state.l2.get(name, urgent=False)
    state.send(lease, KvFound(job=lease[2], tiers=ints(tiers)), lookup.trace)


def drop_lookup(state: State, lease: LeaseId) -> Lookup | None:
    """Remove a lookup."""
    lookup = state.lookups.pop(lease, None)
    if lookup is not None:
        state.due.drop(("lookup", lease))
    return lookup


def prefetch(state: State, lease: LeaseId, message: KvPrefetch, trace: str) -> None:
    """Pin the blocks in L1, and get the rest from L2. A repeated job has one lease."""
    names = names_of(message.fingerprint, message.keys)
    before = state.leases.get(lease)
    if lease in state.loads:
        return  # the answer will come
    if isinstance(before, ReadLease) and before.names == names:
        leases.extend(state, lease, message.lease_us)
        state.send(lease, _answer(state, lease[2], names, before.entries), trace)
        return
    if before is not None:
        state.send(lease, _answer(state, lease[2], names, []), trace)
        return
    load = Load(names, [], {}, state.now_us, message.lease_us, trace)
    state.loads[lease] = load
    for name in names:
        entry = state.l1.entries.get(name)
        if entry is None and (message.deadline_us <= 0 or not state.l2.holds(name)):
            break
        if entry is not None:
            _pin(state, entry)
        else:
            load.waiting[name] = len(load.entries)
            state.l2.get(name, urgent=True)
        load.entries.append(entry)
    if load.waiting:
        state.due.set(("load", lease), state.now_us + min(message.deadline_us, MOST_LEASE_US))
    else:
        finish(state, lease)


def arrived(state: State, name: Name, entry: Entry | None) -> None:
    """A get has ended, with an entry or without (None): pin it for waiting loads, and answer complete
    ones."""
    for lease, load in list(state.loads.items()):
        if (range_ := load.waiting.pop(name, None)) is None:
            continue
        if entry is not None and range_ < len(load.entries):
            _pin(state, entry)
            load.entries[range_] = entry
            load.from_l2 += 1
        elif entry is None:
            _cut(state, load, range_)
        if not load.waiting:
            finish(state, lease)


def finish(state: State, lease: LeaseId) -> None:
    """Lease the resident prefix and answer."""
    if (load := _taken(state, lease)) is None:
        return
    state.counters.loads_late += bool(load.waiting)
    if None in load.entries:
        _cut(state, load, load.entries.index(None))
    entries = [entry for entry in load.entries if entry is not None]
    state.counters.loaded += len(entries)
    if entries:
        leases.open_lease(state, lease, ReadLease(load.names, entries), load.lease_us)
    answer = _answer(state, lease[2], load.names, entries, load)
    state.send(lease, answer, load.trace)


def drop(state: State, lease: LeaseId) -> None:
    """Remove a load, and unpin its entries."""
    if (load := _taken(state, lease)) is not None:
        _cut(state, load, 0)


def _taken(state: State, lease: LeaseId) -> Load | None:
    """Remove a load, and the queued gets that no other load waits for."""
    load = state.loads.pop(lease, None)
    if load is None:
        return None
    state.due.drop(("load", lease))
    for name in load.waiting:
        if not any(name in other.waiting for other in state.loads.values()):
            state.l2.urgent.pop(name, None)
    return load


def _pin(state: State, entry: Entry) -> None:
    state.l1.pin(entry)
    state.use(entry)


def _cut(state: State, load: Load, at: int) -> None:
    """Block `at` is missing: unpin the blocks after it, which are of no use."""
    state.l1.unpin([entry for entry in load.entries[at:] if entry is not None])
    del load.entries[at:]
    load.waiting = {name: range_ for name, range_ in load.waiting.items() if range_ < at}


def _answer(
    state: State, job: int, names: list[Name], entries: list[Entry], load: Load | None = None
) -> KvReady:
    missing = len(names) - len(entries)
    return KvReady(
        job=job,
        arena_generation=state.l1.arena.generation,
        offsets=longs([*(entry.range.offset for entry in entries), *[NOT_HERE] * missing]),
        valid_tokens=ints([*(entry.valid_tokens for entry in entries), *[0] * missing]),
        status="missing" if missing else "ok",
        took_us=state.now_us - load.began_us if load else 0,
        from_l2=min(load.from_l2, len(entries)) if load else 0,
    )
