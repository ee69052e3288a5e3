"""The state of kv_offload's core. Only core.py, jobs.py and l2/dispatch.py change it."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.kv_offload.events import Command, Deadlines, Name, Send
from services.kv_offload.l1_cache import L1, Entry, Range
from services.kv_offload.l2.state import L2, LeaseId
from shared.kv_blocks import KEY_BYTES
from shared.messages import Message

MOST_LEASE_US = 600_000_000  # limits the leases of a scheduler that died

Due = tuple[str, LeaseId]  # the first is lookup, load, lease or quarantine


@dataclass(slots=True)
class WriteLease:
    """Ranges that executor `owner` may be writing. They are not read before the commit."""

    owner: str
    owner_epoch: int  # 0: not known yet
    names: list[Name]
    ranges: list[Range | None]  # per name; None: no room, or in L1 already
    offsets: list[int]  # as answered
    held: list[Entry]  # pinned entries that were in L1 already
    valid_tokens: list[int]
    urgent: bool


@dataclass(slots=True)
class ReadLease:
    """The pinned resident prefix of the requested names."""

    names: list[Name]  # as requested
    entries: list[Entry]


@dataclass(slots=True)
class Quarantined:
    """Ranges of a reservation that expired: executor `owner` may still write them."""

    owner: str
    owner_epoch: int
    names: list[Name]
    ranges: list[Range]
    since_us: int
    owner_gone: bool


@dataclass(slots=True)
class Lookup:
    """A lookup that waits for L2."""

    names: list[Name]
    prefix: bool
    promote: bool
    trace: str = ""


@dataclass(slots=True)
class Load:
    """A prefetch that waits for values from L2."""

    names: list[Name]  # as requested
    entries: list[Entry | None]  # pinned, of the first `len(entries)` names; None: not in L1 yet
    waiting: dict[Name, int]  # name in flight -> its index
    began_us: int
    lease_us: int
    trace: str = ""
    from_l2: int = 0


@dataclass(slots=True)
class Counters:
    """Counters since the start, for `headrace kv`, heartbeats and metrics. A key is a block in a message of a
    scheduler."""

    lookups: int = 0  # keys looked up
    hits_l1: int = 0
    hits_l2: int = 0
    stored: int = 0  # keys that became readable
    no_room: int = 0  # keys without room
    late_commits: int = 0  # commits of expired reservations
    expired_leases: int = 0
    loaded: int = 0  # keys leased for reading
    loads_late: int = 0  # loads answered at their deadline, with some values missing
    promotions: int = 0  # values copied from L2 to L1
    corrupt: int = 0  # values of L2 that failed verification, and were deleted
    l2_puts: int = 0
    l2_gets: int = 0
    l2_absent: int = 0  # values that L2 had lost
    l2_errors: int = 0
    l2_timeouts: int = 0
    l2_refused: int = 0  # puts that L2 refused, since it is full

    @property
    def hit_rate(self) -> float:
        """Share of the looked up keys that a tier had."""
        return (self.hits_l1 + self.hits_l2) / self.lookups if self.lookups else 0.0


@dataclass(slots=True)
class State:
    """The state of one kv_offload."""

    l1: L1
    l2: L2
    now_us: int = 0
    counters: Counters = field(default_factory=Counters)
    leases: dict[LeaseId, WriteLease | ReadLease] = field(default_factory=dict)
    quarantine: dict[LeaseId, Quarantined] = field(default_factory=dict)
    lookups: dict[LeaseId, Lookup] = field(default_factory=dict)
    loads: dict[LeaseId, Load] = field(default_factory=dict)
    committed: dict[LeaseId, list[Name]] = field(default_factory=dict)  # the last ones, for a repeated commit
    due: Deadlines[Due] = field(default_factory=Deadlines)
    executors: dict[str, int] = field(default_factory=dict)  # living ones: kind.id -> epoch
    schedulers: dict[str, None] = field(default_factory=dict)  # receivers of KvGone
    urgent_stores: int = 0  # open reservations of preempted requests
    out: list[Command] = field(default_factory=list)

    def send(self, lease: LeaseId, message: Message, trace: str = "") -> None:
        """Answer the scheduler of `lease`."""
        self.out.append(Send(lease[0], message, trace))

    def tier_of(self, name: Name) -> int:
        """1: in L1; 2: in L2, according to the presence cache; 0: in neither."""
        return 1 if name in self.l1.entries else 2 if self.l2.holds(name) else 0

    def use(self, entry: Entry) -> None:
        """Count a use of a value. From the second use on L2 should have it."""
        entry.uses += 1
        if self.l2.usable and entry.name not in self.l2.presence:
            self.l2.puts[entry.name] = None

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of ranges in quarantine."""
        return sum(range_.room_bytes for q in self.quarantine.values() for range_ in q.ranges)


def names_of(fingerprint: str, keys: bytes) -> list[Name]:
    """The 32-byte keys in `keys`, under their layout; an incomplete last one is left out."""
    return [(fingerprint, keys[i : i + KEY_BYTES]) for i in range(0, len(keys) - KEY_BYTES + 1, KEY_BYTES)]
