"""What kv_offload tells about itself: beats, `headrace status`, `headrace kv` and metrics."""

from __future__ import annotations

from collections.abc import Iterator

from services.kv_offload.state import ReadLease, State, WriteLease
from shared.readings import Attributes, Reading, Readings

OURS = "headrace.kv_offload"


def load(state: State) -> tuple[tuple[str, int], ...]:
    """Numbers for the beat."""
    l1, figures = state.l1, state.figures
    return (
        ("l1_bytes", l1.capacity_bytes),
        ("l1_used", l1.used_bytes),
        ("leased", l1.pinned_bytes + writing_bytes(state)),
        ("hits", figures.hits_l1 + figures.hits_l2),
    )


def tiers(state: State) -> tuple[str, ...]:
    """For the beat: those that a lookup may find something in."""
    return ("l1", "l2") if state.l2.usable else ("l1",)


def rates(state: State) -> tuple[int, int]:
    """For the beat: bytes a second to L2 and from it; 0 until learnt."""
    return (state.l2.put_rate.bytes_per_s, state.l2.get_rate.bytes_per_s)


def writing_bytes(state: State) -> int:
    """Of ranges that executors may be writing; those in quarantine are counted apart."""
    leases = (lease for lease in state.leases.values() if isinstance(lease, WriteLease))
    return sum(place.size_bytes for lease in leases for place in lease.ranges if place is not None)


def status(state: State) -> dict[str, object]:
    """Everything; what is open, leased and quarantined is 0 when nobody asks for anything."""
    return {
        "lookups": len(state.lookups),
        "loads": len(state.loads),
        "reads": sum(isinstance(lease, ReadLease) for lease in state.leases.values()),
        "writes": sum(isinstance(lease, WriteLease) for lease in state.leases.values()),
        "quarantine": len(state.quarantine),
        "tiers": {"l1": _l1(state), "l2": _l2(state)},
        "keys": {"asked": _asked(state), "moved": _moved(state)},
    }


def _l1(state: State) -> dict[str, object]:
    l1 = state.l1
    return {
        "capacity_bytes": l1.capacity_bytes,
        "used_bytes": l1.used_bytes,
        "entries": len(l1.entries),
        "read_bytes": l1.pinned_bytes,
        "written_bytes": writing_bytes(state),
        "quarantined_bytes": state.quarantined_bytes,
        "evictions": l1.evictions,
        "arena": l1.arena.name,
        "generation": l1.arena.generation,
    }


def _l2(state: State) -> dict[str, object]:
    l2, figures = state.l2, state.figures
    if not l2.enabled:
        return {"breaker": "none"}
    return {
        "breaker": "open" if l2.breaker.open else "closed",
        "opened": l2.breaker.opened,
        "known": len(l2.known),
        "in_flight": len(l2.calls),
        "queued": len(l2.wants) + len(l2.urgent) + len(l2.early) + len(l2.deletes) + len(l2.puts),
        "put_bytes_per_s": l2.put_rate.bytes_per_s,
        "get_bytes_per_s": l2.get_rate.bytes_per_s,
        "errors": figures.l2_errors,
        "timeouts": figures.l2_timeouts,
        "refused": figures.l2_refused,
        "corrupt": figures.corrupt,
    }


def _asked(state: State) -> dict[str, object]:
    figures = state.figures
    return {
        "lookups": figures.lookups,
        "hits_l1": figures.hits_l1,
        "hits_l2": figures.hits_l2,
        "misses": figures.lookups - figures.hits_l1 - figures.hits_l2,
        "hit_rate": round(figures.hit_rate, 4),
        "loaded": figures.loaded,
        "loads_late": figures.loads_late,
        "absent": figures.l2_absent,
    }


def _moved(state: State) -> dict[str, object]:
    figures = state.figures
    return {
        "stored": figures.stored,
        "no_room": figures.no_room,
        "late_commits": figures.late_commits,
        "expired_leases": figures.expired_leases,
        "promotions": figures.promotions,
        "l2_puts": figures.l2_puts,
        "l2_gets": figures.l2_gets,
    }


def readings(state: State) -> Readings:
    """Everything, for export."""
    return [*_counters(state), *_gauges(state)]


def _counters(state: State) -> Iterator[Reading]:
    figures = state.figures
    for name, value in (
        ("lookup_keys", figures.lookups),
        ("stored_keys", figures.stored),
        ("loaded_keys", figures.loaded),
        ("promoted_keys", figures.promotions),
        ("no_room_keys", figures.no_room),
        ("evicted_keys", state.l1.evictions),
        ("corrupt_keys", figures.corrupt),
    ):
        yield Reading(f"{OURS}.{name}", value, "{key}", grows=True)
    for tier, hits in (("l1", figures.hits_l1), ("l2", figures.hits_l2)):
        yield Reading(f"{OURS}.hit_keys", hits, "{key}", (("tier", tier),), grows=True)
    failures = {"error": figures.l2_errors, "timeout": figures.l2_timeouts, "refused": figures.l2_refused}
    for how, calls in failures.items():
        yield Reading(f"{OURS}.l2.failures", calls, "{call}", (("how", how),), grows=True)
    for name, count in (("loads_late", figures.loads_late), ("leases.expired", figures.expired_leases)):
        yield Reading(f"{OURS}.{name}", count, "1", grows=True)


def _gauges(state: State) -> Iterator[Reading]:
    l1, l2 = state.l1, state.l2
    for kind, size in (
        ("capacity", l1.capacity_bytes),
        ("used", l1.used_bytes),
        ("read", l1.pinned_bytes),
        ("written", writing_bytes(state)),
        ("quarantined", state.quarantined_bytes),
    ):
        where: Attributes = (("state", kind),)
        yield Reading(f"{OURS}.l1.size", size, "By", where)
    if l2.enabled:
        yield Reading(f"{OURS}.l2.known_keys", len(l2.known), "{key}")
        yield Reading(f"{OURS}.l2.breaker_open", int(l2.breaker.open), "1")
        for to, rate in (("put", l2.put_rate.bytes_per_s), ("get", l2.get_rate.bytes_per_s)):
            yield Reading(f"{OURS}.l2.rate", rate, "By/s", (("direction", to),))
