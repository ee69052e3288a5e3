"""L2 holds what the core knows of the remote tier and wants of it. Pure.

It has queues, calls in flight and remembered names; l2/dispatch.py makes commands of it. Order: lookups first
(two places are theirs), then values that somebody waits for, then values asked for at arrival, deletes, and
last copies of L1 (write-behind).
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
HANGING_PROBES = 3  # beyond these the next one waits PATIENCE_US
PATIENCE_US = 60_000_000
PROMPT_US = 500_000  # a canary slower than this says that L2 is back, not that it is well


class Breaker:
    """Counts failures, and says when L2 is not asked and when to probe.

        closed ──3 failures in a row──▶ open ──a canary that works──▶ closed

    While it is open nothing of a request touches L2. A canary (put, get, compare, over new connections) goes
    out about once a second. One that hangs keeps its thread, so few may hang at a time: a server that wakes
    up answers one of those, and the next canary goes out at once.
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
        """A call failed or took too long; True when that opened the breaker."""
        self._failures += 1
        if self.open or self._failures < FAILURES:
            return False
        self.open = True
        self.opened += 1
        self._next_us = now_us + PROBE_US
        return True

    def next_us(self) -> int | None:
        """When the next canary is due, None while none is."""
        return self._next_us if self.open else None

    def probing(self, call: int, now_us: int) -> None:
        """Canary `call` goes out."""
        self._probes[call] = now_us
        self._next_us = now_us + (PROBE_US if len(self._probes) < HANGING_PROBES else PATIENCE_US)

    def probed(self, call: int, ok: bool, now_us: int) -> bool:
        """Canary `call` has ended; True when that closed the breaker."""
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
    """Names that L2 is known to hold: put there by this process, or found there.

    Bounded, since L2 may hold far more than this host ever asks for: the set forgets what was not asked for
    longest, and of names not in it L2 itself is asked. It may be wrong (L2 evicts as it likes): then a get
    finds nothing, and the name is forgotten.
    """

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._names: OrderedDict[Name, None] = OrderedDict()

    def __contains__(self, name: Name) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: Name) -> None:
        """L2 holds it, as of now."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def forget(self, name: Name) -> None:
        """L2 does not hold it."""
        self._names.pop(name, None)

    def clear(self) -> None:
        """L2 may have started afresh."""
        self._names.clear()


WINDOW_US = 50_000  # of busy time; shorter samples say more about the clock than about the tier
WEIGHT = 4  # a new sample counts 1/4


class Rate:
    """How fast a tier moves bytes, learnt from what was moved: bytes a second while a transfer runs."""

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
        """One has ended and moved this much; 0 where it failed."""
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
    """A lookup that waits for its turn to ask which of `names`, all of one fingerprint, L2 holds."""

    lookup: LeaseId
    names: tuple[Name, ...]


@dataclass(slots=True)
class Call:
    """A command on its way."""

    kind: str  # has, get, put or delete
    names: tuple[Name, ...]
    size_bytes: int = 0
    entry: Entry | None = None  # put: what it reads
    lookup: LeaseId | None = None  # has: whose


@dataclass(slots=True)
class L2:
    """Everything about L2 but its bytes."""

    enabled: bool
    presence: PresenceCache = field(default_factory=PresenceCache)
    breaker: Breaker = field(default_factory=Breaker)
    sizes: dict[str, int] = field(default_factory=dict)  # fingerprint -> bytes of its values
    announced: set[str] = field(default_factory=set)  # fingerprints whose size L2 was told
    wants: deque[Want] = field(default_factory=deque)
    urgent: Queue = field(default_factory=OrderedDict)  # gets that somebody waits for
    early: Queue = field(default_factory=OrderedDict)  # gets that somebody will want soon
    deletes: Queue = field(default_factory=OrderedDict)
    puts: Queue = field(default_factory=OrderedDict)
    calls: dict[int, Call] = field(default_factory=dict)
    getting: set[Name] = field(default_factory=set)  # gets in flight
    deadlines: Deadlines[int] = field(default_factory=Deadlines)  # of calls
    put_rate: Rate = field(default_factory=Rate)
    get_rate: Rate = field(default_factory=Rate)
    serial: int = 0
    refuses: bool = False  # the last put was not taken
    puts_from_us: int = 0  # none begins before

    @property
    def usable(self) -> bool:
        """There is an L2 and it answers."""
        return self.enabled and not self.breaker.open

    def holds(self, name: Name) -> bool:
        """As far as is known, and within reach."""
        return self.usable and name in self.presence

    def get(self, name: Name, *, urgent: bool) -> None:
        """Bring this value, unless it is on its way."""
        if name in self.getting:
            return
        if urgent:
            self.early.pop(name, None)
            self.urgent[name] = None
        elif name not in self.urgent:
            queue(self.early, name)

    def forget_wants(self) -> None:
        """L2 is out of reach: nothing waits for it any more."""
        for waiting in (self.wants, self.urgent, self.early, self.deletes, self.puts):
            waiting.clear()


def queue(names: Queue, name: Name) -> None:
    """Append, dropping the oldest where too many wait."""
    names[name] = None
    if len(names) > WAITING:
        names.popitem(last=False)
