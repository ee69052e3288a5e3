"""Which tier has which block. L1 is asked first and alone; L2 under a short deadline of its own. Pure."""

from __future__ import annotations

from services.kv_offload.l2 import LeaseId, Want
from services.kv_offload.state import Lookup, State, names_of
from shared.messages import KvFound, KvLookup, ints

LOOKUP_US = 10_000  # for L2 to say what it holds: the request waits in the scheduler's line meanwhile


def look_up(state: State, lease: LeaseId, asked: KvLookup, trace: str) -> None:
    """Answer now, or, where L2 must be asked, within LOOKUP_US."""
    if lease in state.lookups:
        return  # asked again: the answer is on its way
    names = names_of(asked.fingerprint, asked.keys)
    found = [state.l1.entries[name] for name in names if name in state.l1.entries]
    state.l1.touch(found)
    lookup = Lookup(names, asked.prefix, asked.promote, trace)
    state.lookups[lease] = lookup
    tiers = [state.tier_of(name) for name in names]
    if 0 not in tiers or not state.l2.usable:
        finish(state, lease)
        return
    first = tiers.index(0)
    unknown = tuple(name for name, tier in zip(names[first:], tiers[first:], strict=True) if not tier)
    state.l2.wants.append(Want(lease, unknown))
    state.due.set(("lookup", lease), state.now_us + LOOKUP_US)


def finish(state: State, lease: LeaseId) -> None:
    """Answer with what is known now, and begin to bring what L2 has if the request asked for that."""
    if (lookup := drop(state, lease)) is None:
        return
    tiers = [state.tier_of(name) for name in lookup.names]
    if lookup.prefix and 0 in tiers:
        miss = tiers.index(0)
        tiers[miss:] = [0] * (len(tiers) - miss)
    state.figures.lookups += len(tiers)
    state.figures.hits_l1 += tiers.count(1)
    state.figures.hits_l2 += tiers.count(2)
    if lookup.promote:
        for name, tier in zip(lookup.names, tiers, strict=True):
            if tier == 2:
                state.l2.get(name, urgent=False)
    state.send(lease, KvFound(job=lease[2], tiers=ints(tiers)), lookup.trace)


def drop(state: State, lease: LeaseId) -> Lookup | None:
    """Nobody waits for this one any more."""
    lookup = state.lookups.pop(lease, None)
    if lookup is not None:
        state.due.drop(("lookup", lease))
    return lookup
