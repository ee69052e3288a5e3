"""The state of kv_offload's core. Only core.py, jobs.py, l2/dispatch.py and peers/book.py
change it.

The first half is the state of L2: queues, calls in flight, known names, circuit breaker and rates. Commands
are made from it in this order: lookups (two calls are reserved for them), gets that a load waits for, gets
from lookups (promotion), deletes, and last copies of L1 values (write-back).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.kv_offload.events import Command, Deadlines, Name, Send
from services.kv_offload.l1_cache import L1, Entry, Range
from shared.kv_blocks import KEY_BYTES
from shared.messages import Message

MOST_LEASE_US = 600_000_000  # limits the leases of a scheduler that died

LeaseId = tuple[str, int, int]  # scheduler (kind.id), its epoch, job
Due = tuple[str, LeaseId]  # the first is lookup, load, lease or quarantine

# ---- L2 -------------------------------------------------------------------------------------------

WAITING = 4_096  # names in `early`; beyond it the oldest is dropped

Queue = OrderedDict[Name, None]

FAILURES = 3
PROBE_US = 1_000_000
HANGING_PROBES = 3  # after so many the next canary waits PATIENCE_US
PATIENCE_US = 60_000_000
PROMPT_US = 500_000  # a slower canary does not close the breaker


class Breaker:
    """A circuit breaker: stops calls to L2 after failures, and decides when to probe.

        closed ──3 failures in a row──▶ open ──a canary that works──▶ closed

    While it is open no request uses L2. A canary (put, get, compare, over a new connection) is sent about
    once a second. A hanging canary keeps its thread, so only a few may hang: if the server recovers it
    answers one of them, and the next canary is sent at once.
    """

    def __init__(self) -> None:
        self.open = False
        self.opened = 0  # times
        self._failures = 0
        self._next_us = 0
        self._probes: dict[int, int] = {}  # call -> start

    def on_succeeded(self) -> None:
        """A call worked."""
        self._failures = 0

    def on_failed(self, now_us: int) -> bool:
        """A call failed or timed out; True if that opened the breaker."""
        self._failures += 1
        if self.open or self._failures < FAILURES:
            return False
        self.open = True
        self.opened += 1
        self._next_us = now_us + PROBE_US
        return True

    def next_us(self) -> int | None:
        """When the next canary is due; None while closed."""
        return self._next_us if self.open else None

    def probing(self, call: int, now_us: int) -> None:
        """Canary `call` is sent."""
        self._probes[call] = now_us
        self._next_us = now_us + (PROBE_US if len(self._probes) < HANGING_PROBES else PATIENCE_US)

    def on_probed(self, call: int, ok: bool, now_us: int) -> bool:
        """Canary `call` has ended; True if that closed the breaker."""
        began_us = self._probes.pop(call, None)
        if began_us is None or not self.open:
            return False
        if ok and now_us - began_us <= PROMPT_US:
            self.open, self._failures = False, 0
            return True
        self._next_us = now_us if ok else max(began_us + PROBE_US, now_us)
        return False


REMEMBERED = 262_144


class PresenceCache:
    """Names that L2 is known to hold: put by this process, or found by a lookup.

    Bounded, since L2 may hold far more than this host uses: the oldest names are dropped, and L2 itself is
    checked for names not in the cache. An entry may be wrong, since L2 evicts: then a get finds nothing, and
    the name is dropped.
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._names: OrderedDict[Name, None] = OrderedDict()

    def __contains__(self, name: Name) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: Name) -> None:
        """L2 holds this name now."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def forget(self, name: Name) -> None:
        """L2 does not hold this name."""
        self._names.pop(name, None)

    def clear(self) -> None:
        """L2 may have restarted, and be empty."""
        self._names.clear()


WINDOW_US = 50_000  # of busy time in a sample; shorter ones are too noisy
WEIGHT = 4  # a new sample counts 1/4


class Rate:
    """The measured rate of L2 in one direction: bytes a second while a transfer runs."""

    def __init__(self) -> None:
        self.bytes_per_s = 0
        self._running = 0
        self._since_us = 0
        self._busy_us = 0
        self._bytes = 0

    def on_began(self, now_us: int) -> None:
        """A transfer starts."""
        self._account(now_us)
        self._running += 1

    def on_ended(self, moved_bytes: int, now_us: int) -> None:
        """A transfer has ended and moved `moved_bytes`; 0 if it failed."""
        self._account(now_us)
        self._running -= 1
        self._bytes += moved_bytes
        if self._bytes and (self._busy_us >= WINDOW_US or (not self.bytes_per_s and not self._running)):
            sample = self._bytes * 1_000_000 // max(self._busy_us, 1)
            old = self.bytes_per_s or sample
            self.bytes_per_s = old + (sample - old) // WEIGHT
            self._busy_us = self._bytes = 0

    def _account(self, now_us: int) -> None:
        if self._running:
            self._busy_us += now_us - self._since_us
        self._since_us = now_us


@dataclass(frozen=True, slots=True)
class Want:
    """A queued check of which `names`, all of one fingerprint, L2 holds."""

    lookup: LeaseId
    names: tuple[Name, ...]


@dataclass(slots=True)
class Call:
    """A command in flight."""

    kind: str  # has, get, put or delete
    names: tuple[Name, ...]
    size_bytes: int = 0
    entry: Entry | None = None  # put: the entry that it reads
    lookup: LeaseId | None = None  # has: the lookup that waits for it
    began_us: int = 0


@dataclass(slots=True)
class L2:
    """The state of L2."""

    enabled: bool
    presence: PresenceCache = field(default_factory=PresenceCache)
    breaker: Breaker = field(default_factory=Breaker)
    sizes: dict[str, int] = field(default_factory=dict)  # fingerprint -> bytes of its values
    announced: set[str] = field(default_factory=set)  # fingerprints with their size stored in L2
    wants: deque[Want] = field(default_factory=deque)
    urgent: Queue = field(default_factory=OrderedDict)  # gets that a load waits for
    early: Queue = field(default_factory=OrderedDict)  # gets for promotion
    deletes: Queue = field(default_factory=OrderedDict)
    puts: Queue = field(default_factory=OrderedDict)
    calls: dict[int, Call] = field(default_factory=dict)
    getting: set[Name] = field(default_factory=set)  # gets in flight
    deadlines: Deadlines[int] = field(default_factory=Deadlines)  # of calls
    put_rate: Rate = field(default_factory=Rate)
    get_rate: Rate = field(default_factory=Rate)
    answer_us: int = 0  # of a check, a moving average
    serial: int = 0
    refuses: bool = False  # the last put was refused
    puts_from_us: int = 0  # no put before

    @property
    def is_usable(self) -> bool:
        """There is an L2, and its breaker is closed."""
        return self.enabled and not self.breaker.open

    def has_value(self, name: Name) -> bool:
        """Whether L2 is usable and known to hold this name."""
        return self.is_usable and name in self.presence

    def get(self, name: Name, *, urgent: bool) -> None:
        """Queue a get of this value, unless it is in flight."""
        if name in self.getting:
            return
        if urgent:
            self.early.pop(name, None)
            self.urgent[name] = None
        elif name not in self.urgent:
            queue(self.early, name)

    def forget_wants(self) -> None:
        """L2 cannot be reached: clear all queues."""
        for waiting in (self.wants, self.urgent, self.early, self.deletes, self.puts):
            waiting.clear()


def queue(names: Queue, name: Name) -> None:
    """Append a name, and drop the oldest of more than WAITING."""
    names[name] = None
    if len(names) > WAITING:
        names.popitem(last=False)


# ---- leases and the whole -------------------------------------------------------------------------


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
    """A lookup that waits for L2 and peers."""

    names: list[Name]
    prefix: bool
    promote: bool
    trace: str = ""
    answers: int = 0  # still to come


@dataclass(slots=True)
class Load:
    """A prefetch that waits for values from L2 and peers."""

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
    hits_peer: int = 0  # of keys that L2 is not known to have
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
    peer_gets: int = 0  # values read from peers
    peer_bytes: int = 0
    peer_absent: int = 0  # values that a peer had lost
    peer_corrupt: int = 0  # values of peers that failed verification
    peer_failures: int = 0  # lookups and reads that a peer did not answer in time, or failed
    peer_leased: int = 0  # keys leased to peers

    @property
    def hits(self) -> int:
        """Keys that a tier or a peer had."""
        return self.hits_l1 + self.hits_l2 + self.hits_peer

    @property
    def hit_rate(self) -> float:
        """Share of the looked up keys that a tier or a peer had."""
        return self.hits / self.lookups if self.lookups else 0.0


class Peers(Protocol):
    """L1 of other hosts, as lookups and loads use it: peers/book.py."""

    answer_us: int  # of a lookup, a moving average

    def look_up(self, lookup: LeaseId, names: Sequence[Name]) -> int:
        """Ask the peers which names they hold. Returns how many calls of `jobs.on_lookup_answered` follow."""

    def has_value(self, name: Name) -> bool:
        """Whether a peer is known to hold this value."""

    def get(self, name: Name) -> None:
        """Queue a read of this value. `jobs.on_value` follows."""

    def drop(self, name: Name) -> None:
        """No load waits for this value any more: take it out of the queue."""


@dataclass(slots=True)
class State:
    """The state of one kv_offload."""

    l1: L1
    l2: L2
    peers: Peers | None = None
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
        return 1 if name in self.l1.entries else 2 if self.l2.has_value(name) else 0

    def found_in(self, name: Name) -> int:
        """As `tier_of`; 2 also for a value that a peer holds, as long as that keeps it."""
        return self.tier_of(name) or (2 if self.peers is not None and self.peers.has_value(name) else 0)

    def get(self, name: Name) -> None:
        """Queue a get for a load: from a peer, else from L2."""
        if self.peers is not None and self.peers.has_value(name):
            self.peers.get(name)
        else:
            self.l2.get(name, urgent=True)

    def use(self, entry: Entry) -> None:
        """Count a use of a value, after its store, which was the first: L2 should have it now."""
        entry.uses += 1
        if self.l2.is_usable and entry.name not in self.l2.presence:
            self.l2.puts[entry.name] = None

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of ranges in quarantine."""
        return sum(range_.room_bytes for q in self.quarantine.values() for range_ in q.ranges)


def names_of(fingerprint: str, keys: bytes) -> list[Name]:
    """The 32-byte keys in `keys`, under their layout; an incomplete last one is left out."""
    return [(fingerprint, keys[i : i + KEY_BYTES]) for i in range(0, len(keys) - KEY_BYTES + 1, KEY_BYTES)]
