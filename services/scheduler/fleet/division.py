"""`Division` divides the executors of a model among its schedulers. Pure.

Executors join one scheduler, which checks that they compute the same tokens (model_kinds.py). While the
scheduler with the most executors has two more than the one with the fewest, it gives that one an executor:

    welcomed here ──Drain──▶ gets no new sequences ──empty, or after DRAIN_US──▶ Give ──▶ welcomed there

Sequences that still run then are queued again with all their tokens. One executor moves at a time. With one
executor for two schedulers nothing moves: the second scheduler stands by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.actor.membership import Peers

DRAIN_US = 10_000_000  # most answers end within it; the others cost their recomputation
ARRIVE_US = 10_000_000  # until the next move if the executor does not arrive; it takes a heartbeat


@dataclass(frozen=True, slots=True)
class Drain:
    """Place no new sequences on this executor."""

    executor: str


@dataclass(frozen=True, slots=True)
class Give:
    """Make this executor join a scheduler: another one, or this one again if the move is not needed."""

    executor: str
    scheduler: str


class Division:
    """The move that one scheduler has under way."""

    def __init__(self) -> None:
        self._executor = ""  # that moves
        self._given = False
        self._until_us = 0

    def turn(
        self, me: str, model: str, peers: Peers, running: Mapping[str, int], now_us: int
    ) -> Drain | Give | None:
        """What to do now; call it once a heartbeat. `running`: sequences by executor of scheduler `me`."""
        served = peers.executors_of(model)
        counts = {actor: served[actor] for actor in peers.ready("scheduler", model)}
        fewest = min(counts, key=lambda actor: (counts[actor], actor), default=me)
        uneven = served[me] - counts.get(fewest, served[me]) >= 2
        if self._given:
            peer = peers.get(f"executor.{self._executor}")
            if peer is None or peer.heartbeat.scheduler not in ("", me) or now_us >= self._until_us:
                self._executor, self._given = "", False
        elif self._executor:
            left = running.get(self._executor)
            if left is None:  # it has died
                self._executor = ""
            elif not left or not uneven or now_us >= self._until_us:
                self._given, self._until_us = True, now_us + ARRIVE_US
                return Give(self._executor, fewest if uneven else me)
        elif uneven and me == max(counts, key=lambda actor: (counts[actor], actor)):
            ready = [executor for executor in peers.ready("executor", model) if executor in running]
            self._executor = min(ready, key=lambda executor: (running[executor], executor), default="")
            self._until_us = now_us + DRAIN_US
            return Drain(self._executor) if self._executor else None
        return None
