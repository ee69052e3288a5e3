"""Lookups say which tier has which block, and prefetches lease blocks of L1 to be read. Pure.

A lookup asks L1 first and alone, and L2 under a short deadline of its own, LOOKUP_US. A prefetch brings what
is in L2 to L1, and is answered with what is leased:

                  all in L1 ──▶ KvReady at once
    KvPrefetch ──┤
                  some in L2 ──▶ gets ──▶ KvReady when they are here, or at the deadline with what is here

Only the part up to the first missing block is of use, so only that is leased. A value that comes from L2
after the deadline stays in L1 like any other.
"""

from __future__ import annotations

from services.kv_offload.events import Name
from services.kv_offload.jobs import leases
from services.kv_offload.l1_cache import Entry
from services.kv_offload.l2.state import LeaseId, Want
from services.kv_offload.state import MOST_LEASE_US, Load, Lookup, ReadLease, State, names_of
from shared.messages import KvFound, KvLookup, KvPrefetch, KvReady, ints, longs

NOT_HERE = -1

LOOKUP_US = 10_000  # for L2 to say what it holds: the request waits in the scheduler's line meanwhile


def look_up(state: State, lease: LeaseId, message: KvLookup, trace: str) -> None:
    """Answer now, or, where L2 must be asked, within LOOKUP_US."""
    if lease in state.lookups:
        return  # asked again: the answer is on its way
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
    """Answer with what is known now, and begin to bring what L2 has if the request asked for that."""
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
    """Nobody waits for this one any more."""
    lookup = state.lookups.pop(lease, None)
    if lookup is not None:
        state.due.drop(("lookup", lease))
    return lookup


def prefetch(state: State, lease: LeaseId, message: KvPrefetch, trace: str) -> None:
    """Pin what L1 has, ask L2 for the rest. The same job asked again has one lease."""
    names = names_of(message.fingerprint, message.keys)
    before = state.leases.get(lease)
    if lease in state.loads:
        return  # the answer is on its way
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
    """What L2 was asked for has come, or will not (None): pin it for those who wait, answer those who have
    all they can get."""
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
    """Nobody waits for this one any more."""
    if (load := _taken(state, lease)) is not None:
        _cut(state, load, 0)


def _taken(state: State, lease: LeaseId) -> Load | None:
    """Take the load out; what nobody else waits for is not asked for any more."""
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
    """Block `at` cannot be had: those after it are of no use."""
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
