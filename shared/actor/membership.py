"""Peers learns from heartbeats which actors live. Pure: time comes in as an argument.

To succeed a request needs a ready service of each kind that it passes (NEEDED), and proof by a real one
(shared.client.probe). kv_offload is not among them, since without it requests are merely recomputed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shared.messages import Heartbeat

MISSED_HEARTBEATS = 3
MIN_DETECTION_US = 5_000_000  # for a busy machine a death goes unnoticed at least so long
OWN_HEARTBEATS_LATE = (
    1.5  # an actor hears its own heartbeats; without them the silence of others says nothing
)

NEEDED = ("tokenizer", "scheduler", "executor", "detokenizer")


@dataclass(slots=True)
class Peer:
    """One living actor."""

    source: str  # kind.id
    epoch: int
    heartbeat: Heartbeat
    last_seen_us: int


class Peers:
    """The living actors of the fleet."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def update(self, epoch: int, heartbeat: Heartbeat, now_us: int) -> bool:
        """Take a heartbeat; True when it is from a new actor, a new incarnation, in a new state, or
        with another arena or scheduler."""
        source = f"{heartbeat.kind}.{heartbeat.actor}"
        known = self._peers.get(source)
        if known is not None and epoch < known.epoch:
            return False
        self._peers[source] = Peer(source, epoch, heartbeat, now_us)
        return (
            known is None
            or known.epoch != epoch
            or _visible_state(known.heartbeat) != _visible_state(heartbeat)
        )

    def expire(self, now_us: int) -> list[Peer]:
        """Forget and return the actors that missed MISSED_HEARTBEATS of their own heartbeats."""
        gone = [
            p
            for p in self._peers.values()
            if now_us - p.last_seen_us > MISSED_HEARTBEATS * p.heartbeat.interval_us
        ]
        gone += [
            p for p in self._peers.values() if p.heartbeat.state in ("stopped", "failed") and p not in gone
        ]
        for peer in gone:
            del self._peers[peer.source]
        return sorted(gone, key=lambda p: p.source)

    def restart_timeouts(self, now_us: int, but: str = "") -> None:
        """We were stopped or cut off ourselves: nobody's silence until now counts, `but` our own."""
        for peer in self._peers.values():
            if peer.source != but:
                peer.last_seen_us = now_us

    def is_cut_off(self, source: str, now_us: int) -> bool:
        """True when `source`, the actor that listens here, misses its own heartbeats: it is cut off, was
        stopped, or the broker is away."""
        own = self._peers.get(source)
        return own is not None and now_us - own.last_seen_us > OWN_HEARTBEATS_LATE * own.heartbeat.interval_us

    def get(self, source: str) -> Peer | None:
        """The actor `kind.id`, if alive."""
        return self._peers.get(source)

    def ready(self, kind: str, model: str = "") -> list[str]:
        """Ids of the ready actors of a kind (and model), sorted."""
        return self._in_state("ready", kind, model)

    def draining(self, kind: str, model: str) -> list[str]:
        """Ids of the actors of a kind and model that finish what they have, sorted."""
        return self._in_state("draining", kind, model)

    def executors_of(self, model: str) -> Counter[str]:
        """How many ready executors of a model each scheduler has, by its id."""
        heartbeats = (self._peers[f"executor.{actor}"].heartbeat for actor in self.ready("executor", model))
        return Counter(heartbeat.scheduler for heartbeat in heartbeats if heartbeat.scheduler)

    def serving(self, model: str) -> list[str]:
        """Ids of the schedulers to ask, sorted: those of a model that are ready and have an executor; all
        that are ready while none has."""
        ready, served = self.ready("scheduler", model), self.executors_of(model)
        return [actor for actor in ready if served[actor]] or ready

    def models(self, kind: str) -> list[str]:
        """Models that the ready actors of a kind are for, sorted."""
        heartbeats = (p.heartbeat for p in self._peers.values())
        return sorted({b.model for b in heartbeats if b.kind == kind and b.state == "ready" and b.model})

    def max_load(self, kind: str, figure: str, model: str) -> int:
        """The largest figure of this name in the loads of the ready actors of a kind and model; 0 without
        any."""
        ready = [self._peers[f"{kind}.{actor}"].heartbeat.load for actor in self.ready(kind, model)]
        return max((dict(load).get(figure, 0) for load in ready), default=0)

    def _in_state(self, state: str, kind: str, model: str) -> list[str]:
        heartbeats = (p.heartbeat for p in self._peers.values())
        found = (b for b in heartbeats if (b.kind, b.state) == (kind, state) and model in ("", b.model))
        return sorted(b.actor for b in found)


def _visible_state(heartbeat: Heartbeat) -> tuple[str, str, int, str]:
    return heartbeat.state, heartbeat.arena, heartbeat.arena_generation, heartbeat.scheduler


def detection_us(heartbeat_interval_us: int) -> int:
    """How long a death may go unnoticed: the heartbeat before it, MISSED_HEARTBEATS, and the look at them."""
    return max(MIN_DETECTION_US, (MISSED_HEARTBEATS + 2) * heartbeat_interval_us)


def missing(peers: Peers, model: str = "") -> list[str]:
    """The kinds of which no actor (of a model) is ready."""
    return [kind for kind in NEEDED if not peers.ready(kind, model)]
