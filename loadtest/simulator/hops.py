"""The delay of a message between scheduler and executor: constant, sometimes longer; never out of order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Hop:
    """How long one message takes one way."""

    delay_us: int = 200
    jitter_us: int = 0  # uniform, added
    stall_pm: int = 0  # per mille of messages that are held up
    stall_us: int = 0


@dataclass(slots=True)
class Way:
    """One direction of a stream, in order."""

    hop: Hop
    rng: random.Random
    last_us: int = field(default=0, init=False)

    def arrival_us(self, sent_us: int) -> int:
        """When a message sent at `sent_us` is there."""
        hop = self.hop
        at_us = sent_us + hop.delay_us
        if hop.jitter_us:
            at_us += self.rng.randrange(hop.jitter_us + 1)
        if hop.stall_pm and self.rng.randrange(1_000) < hop.stall_pm:
            at_us += hop.stall_us
        self.last_us = max(self.last_us, at_us)
        return self.last_us
