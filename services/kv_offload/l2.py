"""What the core knows of L2 and wants of it: queues, calls in flight, remembered names. Pure.

`calls.py` makes commands of it. Order: lookups first (two places are theirs), then values that somebody
waits for, then values asked for at arrival, deletes, and last copies of L1 (write-behind).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from services.kv_offload.breaker import Breaker
from services.kv_offload.deadlines import Deadlines
from services.kv_offload.events import Name
from services.kv_offload.known import Known
from services.kv_offload.l1 import Entry
from services.kv_offload.rates import Rate

WAITING = 4_096  # names in each queue; beyond it the oldest is dropped

LeaseId = tuple[str, int, int]  # scheduler (kind.id), its epoch, job
Queue = OrderedDict[Name, None]


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
    known: Known = field(default_factory=Known)
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
        return self.usable and name in self.known

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
