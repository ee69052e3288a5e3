"""Liveness: the beat of every actor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Every actor, about once a second: I live, in this state, under this load."""

    kind: str
    actor: str
    host_id: str
    state: str  # starting, ready, draining, stopped, failed
    model: str = ""
    load: tuple[tuple[str, int], ...] = ()
    interval_us: int = 1_000_000
    arena: str = ""  # kv_offload: shared memory name, carries the generation
    arena_generation: int = 0  # kv_offload: the present one; executor: the one it has mapped
    tiers: tuple[str, ...] = ()
    rates: tuple[int, ...] = ()  # bytes per second per tier
