"""The events and commands of kv_offload's core, and `Deadlines`, its timers."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.messages import Message

Name = tuple[str, bytes]  # of a value: fingerprint of the KV layout, key of the block

T = TypeVar("T")


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message from the actor `source` (kind.id), incarnation `epoch`."""

    source: str
    epoch: int
    message: Message
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Restarted:
    """`source` is a new incarnation: leases of the one before are void."""

    source: str


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """`source` lives, as incarnation `epoch`."""

    source: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """`source` missed its heartbeats or stopped. It may come back."""

    source: str


@dataclass(frozen=True, slots=True)
class L2Ended:
    """The call of a command has ended: ok, absent, corrupt, refused (L2Put: L2 is full) or failed."""

    call: int
    status: str = "ok"
    present: tuple[bool, ...] = ()  # L2Has: per name
    value_bytes: int = 0  # L2Has with `want_size`: length of a value, 0 if unknown; L2Get: bytes read
    valid_tokens: int = 0  # L2Get


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """The kv_offloads of other hosts whose L1 may be read, with generations. `address`: of our arena."""

    address: bytes
    peers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PeerSummed:
    """The headers of the blocks of a PeerSum."""

    lease: tuple[str, int, int]
    headers: bytes


@dataclass(frozen=True, slots=True)
class PeerReadEnded:
    """A PeerRead has ended. `valid_tokens` of each block, -1: its bytes are wrong; empty: the read failed."""

    call: int
    valid_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; deadlines may be due (`KvCore.due_us`)."""


Event = (
    Arrived | Restarted | PeerSeen | PeerLost | L2Ended | Ticked | PeersChanged | PeerSummed | PeerReadEnded
)  # fmt: skip


# ---- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to the actor `to` (kind.id)."""

    to: str
    message: Message
    trace: str = ""


@dataclass(frozen=True, slots=True)
class L2Has:
    """Check which of these keys L2 holds; with `want_size` also read the length of such values."""

    call: int
    fingerprint: str
    keys: tuple[bytes, ...]
    want_size: bool = False


@dataclass(frozen=True, slots=True)
class L2Get:
    """Read a value from L2 into scratch memory and verify it. `Fill` may follow its end."""

    call: int
    name: Name
    value_bytes: int


@dataclass(frozen=True, slots=True)
class L2Put:
    """Write the L1 value in `slot` to L2. `announce`: also the length of this fingerprint's values."""

    call: int
    name: Name
    slot: bytes
    value_bytes: int
    valid_tokens: int
    announce: bool = False


@dataclass(frozen=True, slots=True)
class L2Delete:
    """Delete a value in L2."""

    call: int
    name: Name


@dataclass(frozen=True, slots=True)
class L2Probe:
    """Put, get and compare a canary over a new connection; if that works, replace all connections."""

    call: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """The call timed out. Its result is void, and a put that has not started to send must not send."""

    call: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy the value that L2Get `call` has read to `slot` now, before the next command; of a PeerRead the
    value number `index`."""

    call: int
    slot: bytes
    index: int = 0


@dataclass(frozen=True, slots=True)
class PeerSum:
    """Make the headers of these pinned blocks: (name, slot, valid tokens). `PeerSummed` follows."""

    lease: tuple[str, int, int]
    blocks: tuple[tuple[Name, bytes, int], ...]


@dataclass(frozen=True, slots=True)
class PeerRead:
    """Read these blocks of a peer's arena within `limit_us` and verify them with their headers. One at a
    time; `PeerReadEnded` follows, and then Fill for each good one."""

    call: int
    address: bytes
    names: tuple[Name, ...]
    offsets: tuple[int, ...]
    headers: bytes
    value_bytes: int
    limit_us: int


L2Command = L2Has | L2Get | L2Put | L2Delete | L2Probe
PeerCommand = PeerSum | PeerRead
Command = Send | L2Command | Abandon | Fill | PeerCommand


class Deadlines(Generic[T]):
    """At most one deadline for each item; deadlines can be moved and dropped. Pure."""

    def __init__(self) -> None:
        self._due: dict[T, int] = {}
        self._heap: list[tuple[int, int, T]] = []
        self._serial = 0  # equal deadlines are due in the order in which they were set

    def set(self, what: T, due_us: int) -> None:
        """Set or move the deadline of `what`."""
        self._due[what] = due_us
        self._serial += 1
        heapq.heappush(self._heap, (due_us, self._serial, what))
        if len(self._heap) > 64 + 2 * len(self._due):  # most entries were moved or dropped
            kept = {entry[2]: entry for entry in reversed(self._heap) if self._due.get(entry[2]) == entry[0]}
            self._heap = sorted(kept.values(), key=lambda entry: entry[:2])

    def drop(self, what: T) -> None:
        """Remove the deadline of `what`, if it has one."""
        self._due.pop(what, None)

    def pop(self, now_us: int) -> T | None:
        """Remove and return the next item that is due; None if there is none."""
        while (next_us := self.next_us()) is not None and next_us <= now_us:
            what = heapq.heappop(self._heap)[2]
            del self._due[what]
            return what
        return None

    def next_us(self) -> int | None:
        """The earliest deadline."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
