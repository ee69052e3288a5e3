"""Peers learns from beats which actors live. Pure: time comes in as an argument.

To succeed a request needs a ready service of each kind that it passes (NEEDED), and proof by a real one
(shared.client.probe). kv_offload is not among them, since without it requests are merely recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Beat

MISSED_BEATS = 3

NEEDED = ("tokenizer", "scheduler", "executor", "detokenizer")


@dataclass(slots=True)
class Peer:
    """One living actor."""

    source: str  # kind.id
    epoch: int
    beat: Beat
    heard_us: int


class Peers:
    """The living actors of the fleet."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def hear(self, epoch: int, beat: Beat, now_us: int) -> bool:
        """Take a beat; True when it is from a new actor, a new incarnation, in a new state, or
        with another arena."""
        source = f"{beat.kind}.{beat.actor}"
        known = self._peers.get(source)
        if known is not None and epoch < known.epoch:
            return False
        self._peers[source] = Peer(source, epoch, beat, now_us)
        return known is None or known.epoch != epoch or _news(known.beat) != _news(beat)

    def expire(self, now_us: int) -> list[Peer]:
        """Forget and return the actors that missed MISSED_BEATS of their own beats."""
        gone = [p for p in self._peers.values() if now_us - p.heard_us > MISSED_BEATS * p.beat.interval_us]
        gone += [p for p in self._peers.values() if p.beat.state in ("stopped", "failed") and p not in gone]
        for peer in gone:
            del self._peers[peer.source]
        return sorted(gone, key=lambda p: p.source)

    def pardon(self, now_us: int, but: str = "") -> None:
        """We were stopped or cut off ourselves: nobody's silence until now counts, `but` our own."""
        for peer in self._peers.values():
            if peer.source != but:
                peer.heard_us = now_us

    def get(self, source: str) -> Peer | None:
        """The actor `kind.id`, if alive."""
        return self._peers.get(source)

    def ready(self, kind: str, model: str = "") -> list[str]:
        """Ids of the ready actors of a kind (and model), sorted."""
        return sorted(
            p.beat.actor
            for p in self._peers.values()
            if p.beat.kind == kind and p.beat.state == "ready" and model in ("", p.beat.model)
        )

    def models(self, kind: str) -> list[str]:
        """Models that the ready actors of a kind are for, sorted."""
        beats = (p.beat for p in self._peers.values())
        return sorted({b.model for b in beats if b.kind == kind and b.state == "ready" and b.model})

    def most(self, kind: str, figure: str, model: str) -> int:
        """The largest figure of this name in the loads of the ready actors of a kind and model; 0 without
        any."""
        ready = [self._peers[f"{kind}.{actor}"].beat.load for actor in self.ready(kind, model)]
        return max((dict(load).get(figure, 0) for load in ready), default=0)


def _news(beat: Beat) -> tuple[str, str, int]:
    return beat.state, beat.arena, beat.arena_generation


def missing(peers: Peers) -> list[str]:
    """The kinds of which no actor is ready."""
    return [kind for kind in NEEDED if not peers.ready(kind)]
