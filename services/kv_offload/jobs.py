"""The jobs of schedulers: lookups, loads, stores, and the leases of ranges that loads and stores hold. Pure.

A lookup checks L1, and L2 and peers within `lookup_us` if needed. It is answered with the tier of each block.
A prefetch copies blocks from L2 or a peer to L1, and is answered with the leased blocks:

                  all in L1 ──▶ KvReady at once
    KvPrefetch ──┤
                  some below ──▶ gets ──▶ KvReady when all are in L1, or at the deadline with those in L1

Only the blocks before the first missing one are useful, so only these are leased. A value that comes
after the deadline stays in L1. A store reserves ranges, then commits the written ones.

Leases end by release, by expiry, or by a new incarnation of their scheduler. The end of a read lease unpins
its entries. An expired write reservation goes to quarantine, since its executor may still be copying. Its
ranges are free after a late release or commit, after the executor has unmapped the arena, or QUARANTINE_US
after the executor is gone. If the executor lives, the scheduler has died, and the ranges are free after
LIVE_US: far longer than the executor's watchdog lets a copy take. Leases of a silent scheduler last until
their deadlines: it may live.
"""

from __future__ import annotations

from dataclasses import replace

from services.kv_offload.events import Fill, Name
from services.kv_offload.l1_cache import Entry, Range
from services.kv_offload.state import (
    MOST_LEASE_US,
    LeaseId,
    Load,
    Lookup,
    Quarantined,
    ReadLease,
    State,
    Want,
    WriteLease,
    names_of,
)
from shared import messages

NOT_HERE = -1
LOOKUP_US, MOST_LOOKUP_US = 10_000, 50_000  # for the answer of L2, while the request is in a queue
REPEATED_COMMITS = 256  # last commits, to answer a repeated message
QUARANTINE_US = 60_000_000
LIVE_US = 600_000_000


def on_lookup(state: State, lease: LeaseId, message: messages.KvLookup, trace: str) -> None:
    """Answer now, or within `lookup_us` if L2 or peers must be asked."""
    if lease in state.lookups:
        return  # a repeated lookup: the answer will come
    names = names_of(message.fingerprint, message.keys)
    found = [state.l1.entries[name] for name in names if name in state.l1.entries]
    state.l1.touch(found)
    lookup = Lookup(names, message.prefix, message.promote, trace)
    state.lookups[lease] = lookup
    unknown = tuple(name for name in names if not state.found_in(name))
    if unknown and state.peers is not None:
        lookup.answers = state.peers.look_up(lease, unknown)
    if unknown and state.l2.is_usable:
        state.l2.wants.append(Want(lease, unknown))
        lookup.answers += 1
    if lookup.answers:
        state.due.set(("lookup", lease), state.now_us + lookup_us(state))
    else:
        finish_lookup(state, lease)


def lookup_us(state: State) -> int:
    """How long a lookup waits for L2 and peers: twice the usual time of their answers, which may come from
    far away. The scheduler itself waits no longer than the answer can save."""
    usual_us = max(state.l2.answer_us, state.peers.answer_us if state.peers is not None else 0)
    return min(max(LOOKUP_US, 2 * usual_us), MOST_LOOKUP_US)


def on_lookup_answered(state: State, lease: LeaseId) -> None:
    """L2 or a peer has answered a lookup: finish it after the last answer, or when nothing is missing."""
    if (lookup := state.lookups.get(lease)) is not None:
        lookup.answers -= 1
        if lookup.answers < 1 or all(map(state.found_in, lookup.names)):
            finish_lookup(state, lease)


def finish_lookup(state: State, lease: LeaseId) -> None:
    """Answer with the known tiers, and with `promote` start to copy values from L2 to L1."""
    if (lookup := drop_lookup(state, lease)) is None:
        return
    tiers = [state.found_in(name) for name in lookup.names]
    if lookup.prefix and 0 in tiers:
        miss = tiers.index(0)
        tiers[miss:] = [0] * (len(tiers) - miss)
    state.counters.lookups += len(tiers)
    state.counters.hits_l1 += tiers.count(1)
    in_l2 = [
        name for name, tier in zip(lookup.names, tiers, strict=True) if tier == 2 and state.l2.has_value(name)
    ]
    state.counters.hits_l2 += len(in_l2)
    state.counters.hits_peer += tiers.count(2) - len(in_l2)
    if (
        lookup.promote
    ):  # not from peers: the scheduler asks all hosts, and each would copy what one of them has
        for name in in_l2:
            state.l2.get(name, urgent=False)
    state.send(lease, messages.KvFound(job=lease[2], tiers=messages.ints(tiers)), lookup.trace)


def drop_lookup(state: State, lease: LeaseId) -> Lookup | None:
    """Remove a lookup."""
    lookup = state.lookups.pop(lease, None)
    if lookup is not None:
        state.due.drop(("lookup", lease))
    return lookup


def on_prefetch(state: State, lease: LeaseId, message: messages.KvPrefetch, trace: str) -> None:
    """Pin the blocks in L1, and get the rest from L2. A repeated job has one lease."""
    names = names_of(message.fingerprint, message.keys)
    before = state.leases.get(lease)
    if lease in state.loads:
        return  # the answer will come
    if isinstance(before, ReadLease) and before.names == names:
        extend_lease(state, lease, message.lease_us)
        state.send(lease, _ready(state, lease[2], names, before.entries), trace)
        return
    if before is not None:
        state.send(lease, _ready(state, lease[2], names, []), trace)
        return
    load = Load(names, [], {}, state.now_us, message.lease_us, trace)
    state.loads[lease] = load
    for name in names:
        entry = state.l1.entries.get(name)
        if entry is None and (message.deadline_us <= 0 or not state.found_in(name)):
            break
        if entry is not None:
            _pin(state, entry)
        else:
            load.waiting[name] = len(load.entries)
            state.get(name)
        load.entries.append(entry)
    if load.waiting:
        state.due.set(("load", lease), state.now_us + min(message.deadline_us, MOST_LEASE_US))
    else:
        finish_load(state, lease)


def bring_up(state: State, name: Name, fill: Fill, value_bytes: int, valid_tokens: int) -> Entry | None:
    """Put a verified value into L1 by `fill`, whose slot is not set yet; None if there is no room."""
    entry = state.l1.entries.get(name)
    if entry is None and (range_ := state.l1.allocate(value_bytes, urgent=False)) is not None:
        state.out.append(replace(fill, slot=range_.slot))
        entry = state.l1.publish(name, range_, valid_tokens, urgent=False)
    return entry


def on_value(state: State, name: Name, entry: Entry | None) -> None:
    """A get has ended, with an entry or without (None): pin it for waiting loads, and answer complete
    ones."""
    for lease, load in list(state.loads.items()):
        if (at := load.waiting.pop(name, None)) is None:
            continue
        if entry is not None and at < len(load.entries):
            _pin(state, entry)
            load.entries[at] = entry
            load.from_l2 += 1
        elif entry is None:
            _cut(state, load, at)
        if not load.waiting:
            finish_load(state, lease)


def finish_load(state: State, lease: LeaseId) -> None:
    """Lease the resident prefix and answer."""
    if (load := _taken_load(state, lease)) is None:
        return
    state.counters.loads_late += bool(load.waiting)
    if None in load.entries:
        _cut(state, load, load.entries.index(None))
    entries = [entry for entry in load.entries if entry is not None]
    state.counters.loaded += len(entries)
    if entries:
        open_lease(state, lease, ReadLease(load.names, entries), load.lease_us)
    state.send(lease, _ready(state, lease[2], load.names, entries, load), load.trace)


def drop_load(state: State, lease: LeaseId) -> None:
    """Remove a load, and unpin its entries."""
    if (load := _taken_load(state, lease)) is not None:
        _cut(state, load, 0)


def _taken_load(state: State, lease: LeaseId) -> Load | None:
    """Remove a load, and the queued gets that no other load waits for."""
    load = state.loads.pop(lease, None)
    if load is None:
        return None
    state.due.drop(("load", lease))
    for name in load.waiting:
        if not any(name in other.waiting for other in state.loads.values()):
            state.l2.urgent.pop(name, None)
            if state.peers is not None:
                state.peers.drop(name)
    return load


def _pin(state: State, entry: Entry) -> None:
    state.l1.pin(entry)
    state.use(entry)


def _cut(state: State, load: Load, at: int) -> None:
    """Block `at` is missing: unpin the blocks after it, which are of no use."""
    state.l1.unpin([entry for entry in load.entries[at:] if entry is not None])
    del load.entries[at:]
    load.waiting = {name: index for name, index in load.waiting.items() if index < at}


def _ready(
    state: State, job: int, names: list[Name], entries: list[Entry], load: Load | None = None
) -> messages.KvReady:
    missing = len(names) - len(entries)
    return messages.KvReady(
        job=job,
        arena_generation=state.l1.arena.generation,
        offsets=messages.longs([*(entry.range.offset for entry in entries), *[NOT_HERE] * missing]),
        valid_tokens=messages.ints([*(entry.valid_tokens for entry in entries), *[0] * missing]),
        status="missing" if missing else "ok",
        took_us=state.now_us - load.began_us if load else 0,
        from_l2=min(load.from_l2, len(entries)) if load else 0,
    )


def on_reserve(state: State, lease: LeaseId, message: messages.KvReserve, trace: str) -> None:
    """Answer with a range for each key that is not in L1. A repeated job gets the same ranges. A job with
    ranges in quarantine gets none."""
    names = names_of(message.fingerprint, message.keys)
    before = state.leases.get(lease)
    if isinstance(before, WriteLease) and before.names == names:
        extend_lease(state, lease, message.lease_us)
        offsets = before.offsets
    elif before is not None or lease in state.quarantine:
        offsets = [messages.NO_ROOM] * len(names)
    else:
        made = _reservation(state, message)
        open_lease(state, lease, made, message.lease_us)
        offsets = made.offsets
    status = "no_room" if messages.NO_ROOM in offsets else "ok"
    generation = state.l1.arena.generation
    answer = messages.KvReserved(
        job=message.job, arena_generation=generation, offsets=messages.longs(offsets), status=status
    )
    state.send(lease, answer, trace)


def on_commit(state: State, lease: LeaseId, message: messages.KvCommit, trace: str) -> None:
    """Publish the written ranges, free the others, and answer with the tier of each key. An expired
    reservation stores nothing, but its ranges are free now: its copies have ended."""
    names = []
    if isinstance(state.leases.get(lease), WriteLease):
        made = close_lease(state, lease)
        assert isinstance(made, WriteLease)
        _publish(state, made, list(message.written))
        names = made.names
        state.committed[lease] = names
        if len(state.committed) > REPEATED_COMMITS:
            del state.committed[next(iter(state.committed))]
    elif (late := end_quarantine(state, lease)) is not None:
        state.counters.late_commits += 1
        names = late.names
    else:
        names = state.committed.get(lease, [])
    state.send(
        lease, messages.KvStored(job=message.job, tiers=messages.ints(map(state.tier_of, names))), trace
    )


def _reservation(state: State, message: messages.KvReserve) -> WriteLease:
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
        range_ = None if present or full else state.l1.allocate(message.value_bytes, urgent=urgent)
        full = full or (present is None and range_ is None)
        ranges.append(range_)
    if any(ranges):
        state.l2.sizes[message.fingerprint] = message.value_bytes
    offsets = [_offset(*row) for row in zip(there, ranges, strict=True)]
    state.counters.no_room += offsets.count(messages.NO_ROOM)
    valid = [*message.valid_tokens, *[0] * len(names)][: len(names)]
    epoch = state.executors.get(message.owner, 0)
    return WriteLease(message.owner, epoch, names, ranges, offsets, held, valid, urgent)


def _offset(entry: Entry | None, range_: Range | None) -> int:
    if entry is not None:
        return messages.PRESENT
    return messages.NO_ROOM if range_ is None else range_.offset


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


def on_forget(state: State, message: messages.KvForget) -> None:
    """Free the ranges of these blocks: at once, or after the last lease and put that read them. L2 evicts its
    values by itself: another host may use them."""
    for name in names_of(message.fingerprint, message.keys):
        state.l2.puts.pop(name, None)
        if (entry := state.l1.entries.get(name)) is not None:
            state.l1.forget(entry)


def on_touch(state: State, message: messages.KvTouch) -> None:
    """Evict these blocks after all others, the last of them first."""
    names = names_of(message.fingerprint, message.keys)
    state.l1.touch([state.l1.entries[name] for name in names if name in state.l1.entries])


def open_lease(state: State, lease: LeaseId, what: WriteLease | ReadLease, lease_us: int) -> None:
    """Add a lease that ends `lease_us` from now."""
    state.leases[lease] = what
    state.urgent_stores += isinstance(what, WriteLease) and what.urgent
    extend_lease(state, lease, lease_us)


def extend_lease(state: State, lease: LeaseId, lease_us: int) -> None:
    """Move the end of a lease to `lease_us` from now, at most MOST_LEASE_US."""
    state.due.set(("lease", lease), state.now_us + min(max(lease_us, 0), MOST_LEASE_US))


def close_lease(state: State, lease: LeaseId) -> WriteLease | ReadLease | None:
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


def on_release(state: State, source: str, epoch: int, message: messages.KvRelease) -> None:
    """The scheduler releases jobs with no copy in flight: free their ranges."""
    for job in message.jobs:
        lease = (source, epoch, job)
        if isinstance(what := close_lease(state, lease), WriteLease):
            for range_ in filter(None, what.ranges):
                state.l1.give(range_)
        end_quarantine(state, lease)


def expire_lease(state: State, lease: LeaseId) -> None:
    """End a lease at its deadline; ranges that may still be written go to quarantine."""
    state.counters.expired_leases += 1
    what = close_lease(state, lease)
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


def on_scheduler_restarted(state: State, source: str) -> None:
    """Expire all leases of a scheduler's last incarnation."""
    for lease in [lease for lease in state.leases if lease[0] == source]:
        expire_lease(state, lease)


def on_executor_seen(state: State, source: str, epoch: int) -> None:
    """An executor lives: its copies may still run, those of an earlier incarnation have ended."""
    state.executors[source] = epoch
    for lease, held in state.quarantine.items():
        if held.owner == source and held.owner_epoch in (0, epoch):
            held.owner_epoch, held.owner_gone = epoch, False
            state.due.set(("quarantine", lease), held.since_us + LIVE_US)
        elif held.owner == source:
            _on_owner_gone(state, lease, held)


def on_executor_lost(state: State, source: str) -> None:
    """An executor is dead or cut off."""
    state.executors.pop(source, None)
    for lease, held in state.quarantine.items():
        if held.owner == source:
            _on_owner_gone(state, lease, held)


def on_arena_released(state: State, message: messages.ArenaReleased) -> None:
    """An executor has unmapped an arena. If it is this one, free the executor's quarantined ranges."""
    if message.arena_generation == state.l1.arena.generation:
        owner = f"executor.{message.executor}"
        for lease in [lease for lease, held in state.quarantine.items() if held.owner == owner]:
            end_quarantine(state, lease)


def _on_owner_gone(state: State, lease: LeaseId, held: Quarantined) -> None:
    """Free the ranges QUARANTINE_US after the executor was first found gone."""
    if not held.owner_gone:
        held.owner_gone = True
        state.due.set(("quarantine", lease), state.now_us + QUARANTINE_US)
