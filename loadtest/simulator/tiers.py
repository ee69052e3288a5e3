"""The protocol of a kv_offload in a virtual world.

    scheduler ──message──▶ handle ──▶ answers, each after a delay
                           advance(now) at due_us: what L2 has brought by then

The core of kv_offload fits the protocol. It belongs to another service, so the caller that runs a world
passes it in (loadtest/scenarios/real_tier.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared.messages import Message

Answer = tuple[int, str, Message]  # after so many us, receiver, message


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The size and speed of a tier."""

    l1_bytes: int
    l2_bytes_s: int = 0  # all calls together; 0: there is none
    l2_delay_us: int = 500  # of a call, beside its bytes
    name: str = "k0"
    host_id: str = "virtual"


@dataclass(slots=True)
class Moved:
    """What a tier has done."""

    l2_put_bytes: int = 0
    l2_get_bytes: int = 0
    stored_blocks: int = 0
    refused_blocks: int = 0  # no room in L1
    evicted_blocks: int = 0
    messages: int = 0


class Tier(Protocol):
    """A kv_offload of a virtual world."""

    @property
    def name(self) -> str:
        """Its actor id."""

    @property
    def host_id(self) -> str:
        """Executors of this host share its L1."""

    @property
    def generation(self) -> int:
        """Of its arena."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """What works: ("l1",) or ("l1", "l2")."""

    @property
    def moved(self) -> Moved:
        """Its counters."""

    @property
    def due_us(self) -> int | None:
        """When something is to happen by itself."""

    def handle(self, source: str, message: Message, now_us: int) -> list[Answer]:
        """Take a message of the actor `source`."""

    def advance(self, now_us: int) -> list[Answer]:
        """Time has come to `due_us`."""
