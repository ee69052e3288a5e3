"""What goes into the scheduler's core and what comes out. Time comes in with each event."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Message


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message from the actor `source` (kind.id)."""

    source: str
    message: Message
    trace: str = ""
    transit_us: int = 0  # on the way, by wall clocks: for spans, never for a decision


@dataclass(frozen=True, slots=True)
class PeerReady:
    """An actor is ready, or is a new incarnation (`epoch`) of itself."""

    kind: str
    actor: str
    epoch: int
    arena_generation: int = -1  # an executor: of the arena that it maps, 0 for none; -1: it does not say


@dataclass(frozen=True, slots=True)
class PeerLost:
    """An actor missed its beats or stopped."""

    kind: str
    actor: str


@dataclass(frozen=True, slots=True)
class PeerDraining:
    """An actor finishes what it has and takes nothing new."""

    kind: str
    actor: str


@dataclass(frozen=True, slots=True)
class StreamLost:
    """Messages from `source` are gone for good."""

    source: str


@dataclass(frozen=True, slots=True)
class TierReady:
    """A kv_offload is ready, or is a new incarnation of itself; its arena serves executors of its host."""

    actor: str
    epoch: int
    host_id: str
    generation: int  # of its arena
    tiers: tuple[str, ...]  # l1, l2: those that work now


@dataclass(frozen=True, slots=True)
class TierLost:
    """A kv_offload missed its beats or stopped."""

    actor: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; deadlines may be due."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take nothing new."""


@dataclass(frozen=True, slots=True)
class DrainOver:
    """There is no more time to drain: what is left ends here."""


Event = (
    Arrived
    | PeerReady
    | PeerDraining
    | PeerLost
    | StreamLost
    | TierReady
    | TierLost
    | Ticked
    | DrainAsked
    | DrainOver
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to the actor `to` (kind.id)."""

    to: str
    message: Message
    trace: str = ""
