"""The state of the remote tier: queues, calls in flight, known names, circuit breaker and rates. Pure.

l2/dispatch.py makes commands from it, in this order: lookups (two calls are reserved for them), gets that a
load waits for, gets from lookups (promotion), deletes, and last copies of L1 values (write-back).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from services.kv_offload.events import Deadlines, Name
from services.kv_offload.l1_cache import Entry

WAITING = 4_096  # names in each queue; beyond it the oldest is dropped

LeaseId = tuple[str, int, int]  # scheduler (kind.id), its epoch, job
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

    def succeeded(self) -> None:
        """A call worked."""
        self._failures = 0

    def failed(self, now_us: int) -> bool:
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

    def probed(self, call: int, ok: bool, now_us: int) -> bool:
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

    def began(self, now_us: int) -> None:
        """A transfer starts."""
        self._account(now_us)
        self._running += 1

    def ended(self, moved_bytes: int, now_us: int) -> None:
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
    serial: int = 0
    refuses: bool = False  # the last put was refused
    puts_from_us: int = 0  # no put before

    @property
    def usable(self) -> bool:
        """There is an L2, and its breaker is closed."""
        return self.enabled and not self.breaker.open

    def holds(self, name: Name) -> bool:
        """Whether L2 is usable and known to hold this name."""
        return self.usable and name in self.presence

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
