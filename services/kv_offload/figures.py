"""What is counted, for `headrace kv`, beats and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Figures:
    """Since the start. Keys are blocks that a scheduler asked for."""

    lookups: int = 0  # keys looked up
    hits_l1: int = 0
    hits_l2: int = 0
    stored: int = 0  # keys that became readable
    no_room: int = 0  # keys that found no room
    late_commits: int = 0  # of reservations that had expired
    expired_leases: int = 0
    loaded: int = 0  # keys leased to be read
    loads_late: int = 0  # loads that were answered at their deadline, without all
    promotions: int = 0  # values brought from L2
    corrupt: int = 0  # values of L2 that were not what their name says: deleted
    l2_puts: int = 0
    l2_gets: int = 0
    l2_absent: int = 0  # values that L2 had lost
    l2_errors: int = 0
    l2_timeouts: int = 0
    l2_refused: int = 0  # puts that it answered, and did not take: it is full

    @property
    def hit_rate(self) -> float:
        """Share of the keys looked up that some tier had."""
        return (self.hits_l1 + self.hits_l2) / self.lookups if self.lookups else 0.0
