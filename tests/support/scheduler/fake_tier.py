"""A small kv_offload with an exact answer to everything: L1 in blocks with LRU and leases, L2 with a delay.

    tier = FakeTier(capacity=8, l2_us=500)          # 8 blocks of L1; l2_us=-1: no L2
    tier.handle("scheduler", message, now_us)       # answers go to tier.replies, as (source, message)
    tier.advance(now_us)                            # what L2 brings is there, leases end

The arena holds token ids, as the blocks of a PagedEngine do. A range that is not readable any more is
overwritten with WRONG at once, the earliest moment that the contract allows: a reader of a range without a
lease, or writes one that is not reserved for him, changes tokens somewhere.

Switches: `frozen` (nothing is answered, all is kept for the thaw), `no_room` (every KvReserve), `missing`
(every KvPrefetch finds nothing), `lossy` (every KvCommit stores nothing). `restart(generation, now_us)` is a
new incarnation: L1 empty, a new arena, what was under way forgotten; L2 stays.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.messages import (
    NO_ROOM,
    PRESENT,
    KvCommit,
    KvForget,
    KvFound,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    KvTouch,
    Message,
    ints,
    longs,
)

KEY_BYTES, MOST_KEYS = 32, 1_024
WRONG = -9
QUARANTINE_US = 60_000_000


@dataclass
class Arena:
    """Shared memory as executors map it: the token ids at each offset."""

    generation: int
    ranges: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Entry:
    """One key in L1."""

    offset: int
    valid: int
    lost: bool = False


@dataclass
class Lease:
    """A read lease (`offsets` empty) or a write reservation: offsets of its keys, or NO_ROOM, PRESENT."""

    source: str
    owner: str
    keys: list[bytes]
    deadline_us: int
    offsets: list[int] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)
    quarantined_us: int = 0

    @property
    def written(self) -> list[int]:
        return [offset for offset in self.offsets if offset >= 0]


@dataclass
class Waiting:
    """A KvPrefetch that waits for L2."""

    source: str
    asked: KvPrefetch
    arrived_us: int
    until_us: int


def keys_of(joined: bytes) -> list[bytes]:
    """The keys of a message. Raises AssertionError for what the contract forbids."""
    assert len(joined) % KEY_BYTES == 0, "half a key"
    keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
    assert 0 < len(keys) <= MOST_KEYS, "a job of no key, or of more than a message may have"
    assert len(set(keys)) == len(keys), "a key twice in a job"
    return keys


class FakeTier:
    """See the top of this file. `source` of a message is the receiver of its answer; each source numbers its
    jobs."""

    def __init__(
        self, capacity: int = 16, value_bytes: int = 256, l2_us: int = -1, generation: int = 1
    ) -> None:
        self.capacity, self.value_bytes, self.l2_us = capacity, value_bytes, l2_us
        self.frozen = self.no_room = self.missing = self.lossy = False
        self.replies: deque[tuple[str, Message]] = deque()
        self.l2: dict[bytes, tuple[list[int], int]] = {}
        self.kept: deque[tuple[str, Message]] = deque()  # what came while it was frozen
        self.schedulers: dict[str, None] = {}
        self.counts: dict[str, int] = {}
        self.restart(generation, 0)

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("l1", "l2") if self.l2_us >= 0 else ("l1",)

    def restart(self, generation: int, now_us: int) -> None:
        """A new incarnation: nothing of L1 is left, nor of what was under way."""
        self.arena, self.now_us = Arena(generation), now_us
        self.l1: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self.free = [at * self.value_bytes for at in range(self.capacity - 1, -1, -1)]
        self.leases: dict[tuple[str, int], Lease] = {}
        self.waiting: list[Waiting] = []
        self.coming: dict[bytes, int] = {}  # keys on their way from L2: when they are there
        self.replies.clear()
        self.kept.clear()

    def handle(self, source: str, message: Message, now_us: int) -> None:
        """Take a message; the answer is in `replies` now, or after a later `advance`."""
        self.advance(now_us)
        self.schedulers[source] = None
        name = type(message).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.frozen:
            self.kept.append((source, message))
            return
        match message:
            case KvLookup():
                self._lookup(source, message)
            case KvReserve():
                self._reserve(source, message)
            case KvPrefetch():
                self._prefetch(source, message)
            case KvCommit():
                self._commit(source, message)
            case KvForget():
                for key in keys_of(message.keys):
                    if key in self.l1 and not any(key in lease.keys for lease in self.leases.values()):
                        self.forget(key)
            case KvTouch():
                for key in reversed(keys_of(message.keys)):
                    if key in self.l1:
                        self.l1.move_to_end(key)
            case KvRelease(jobs=jobs):
                for job in jobs:
                    self._end((source, job), [])

    def thaw(self, now_us: int) -> None:
        """Answer everything that came while it was frozen."""
        self.frozen, kept = False, list(self.kept)
        self.kept.clear()
        for source, message in kept:
            self.handle(source, message, now_us)

    def advance(self, now_us: int) -> None:
        """Let time pass: leases end, keys arrive from L2, prefetches that waited for them are answered."""
        self.now_us = max(self.now_us, now_us)
        if self.frozen:
            return
        for key in [key for key, at_us in self.coming.items() if at_us <= self.now_us]:
            del self.coming[key]
            self._promote(key)
        for lease in self.leases.values():
            if lease.deadline_us <= self.now_us and lease.written and not lease.quarantined_us:
                lease.quarantined_us = lease.deadline_us
        over = [
            at for at, lease in self.leases.items() if lease.deadline_us <= self.now_us and not lease.written
        ]
        for at in over:
            del self.leases[at]
        for one in list(self.waiting):
            if one.until_us <= self.now_us or not any(key in self.coming for key in keys_of(one.asked.keys)):
                self.waiting.remove(one)
                self._ready(one)

    @property
    def next_us(self) -> int | None:
        """When `advance` would answer something that waits."""
        if self.frozen or not self.waiting:
            return None
        return min([*(one.until_us for one in self.waiting), *self.coming.values()])

    def owner_gone(self, owner: str) -> None:
        """An executor is a new incarnation, or gone for QUARANTINE_US: it writes nowhere any more."""
        for at, lease in list(self.leases.items()):
            if lease.owner == owner and lease.quarantined_us:
                self._end(at, [])

    @property
    def leased(self) -> int:
        """Blocks that cannot be evicted."""
        return len({key for lease in self.leases.values() if not lease.offsets for key in lease.keys}) + sum(
            len(lease.written) for lease in self.leases.values()
        )

    def check(self) -> None:
        """Every block of L1 is free, holds a key or is reserved, once."""
        written = [offset for lease in self.leases.values() for offset in lease.written]
        used = [*self.free, *(entry.offset for entry in self.l1.values()), *written]
        assert sorted(used) == [at * self.value_bytes for at in range(self.capacity)], (
            "a range is lost, or double"
        )

    def _reply(self, source: str, message: Message) -> None:
        self.replies.append((source, message))

    def _lookup(self, source: str, asked: KvLookup) -> None:
        keys = keys_of(asked.keys)
        tiers = [1 if key in self.l1 else 2 if self._in_l2(key) else 0 for key in keys]
        if asked.prefix and 0 in tiers:
            first = tiers.index(0)
            tiers[first:] = [0] * (len(tiers) - first)
        for key, tier in zip(keys, tiers, strict=True):
            if tier == 1:
                self.l1.move_to_end(key)
            elif tier == 2 and asked.promote:
                self._fetch(key)
        self._reply(source, KvFound(job=asked.job, tiers=ints(tiers)))

    def _reserve(self, source: str, asked: KvReserve) -> None:
        keys, at = keys_of(asked.keys), (source, asked.job)
        assert asked.value_bytes == self.value_bytes, "a block of another size"
        assert asked.owner.startswith("executor."), "a reservation without an owner"
        if at not in self.leases:
            valid = list(asked.valid_tokens) or [0] * len(keys)
            assert len(valid) == len(keys)
            offsets = [self._room(key) for key in keys]
            deadline_us = self.now_us + asked.lease_us
            self.leases[at] = Lease(source, asked.owner, keys, deadline_us, offsets, valid)
        lease = self.leases[at]
        assert lease.keys == keys, "one job, other keys"
        self._reply(
            source,
            KvReserved(
                job=asked.job,
                arena_generation=self.arena.generation,
                offsets=longs(lease.offsets),
                status="no_room" if NO_ROOM in lease.offsets else "ok",
            ),
        )

    def _room(self, key: bytes) -> int:
        if key in self.l1:
            self.l1.move_to_end(key)
            return PRESENT
        if self.no_room:
            return NO_ROOM
        return self._take_range()

    def _take_range(self) -> int:
        """A free range; NO_ROOM where everything is leased."""
        if not self.free:
            pinned = {key for lease in self.leases.values() if not lease.offsets for key in lease.keys}
            victim = next((key for key in self.l1 if key not in pinned), None)
            if victim is None:
                return NO_ROOM
            self.forget(victim)
        return self.free.pop()

    def forget(self, key: bytes) -> None:
        """Take a key out of L1, also while it is read; KvGone to every scheduler unless L2 has it."""
        entry = self.l1.pop(key)
        self._give_back(entry.offset)
        if not self._in_l2(key):
            for source in self.schedulers:
                self._reply(source, KvGone(keys=key))

    def _give_back(self, offset: int) -> None:
        self.free.append(offset)
        self.arena.ranges[offset] = [WRONG]

    def _commit(self, source: str, asked: KvCommit) -> None:
        lease = self.leases.get((source, asked.job))
        if lease is None or not lease.offsets:
            self._reply(source, KvStored(job=asked.job, tiers=ints([0] * len(asked.written))))
            return
        assert len(asked.written) == len(lease.keys), "KvCommit has one mark for each key of KvReserve"
        columns = zip(asked.written, lease.offsets, strict=True)
        assert all(offset >= 0 for mark, offset in columns if mark), "written to where there is no range"
        marks = [0] * len(asked.written) if lease.quarantined_us or self.lossy else list(asked.written)
        self._reply(source, KvStored(job=asked.job, tiers=ints(self._end((source, asked.job), marks))))

    def _end(self, at: tuple[str, int], marks: list[int]) -> list[int]:
        """A lease ends. If it is a reservation, the ranges with mark 1 become readable. The tier of each
        key."""
        lease = self.leases.pop(at, None)
        self.waiting = [one for one in self.waiting if (one.source, one.asked.job) != at]
        if lease is None:
            return []
        for index, (key, offset) in enumerate(zip(lease.keys, lease.offsets, strict=False)):
            if offset < 0:
                continue
            if index < len(marks) and marks[index] and key not in self.l1:
                self.l1[key] = Entry(offset, lease.valid[index])
                if self.l2_us >= 0:
                    self.l2[key] = (list(self.arena.ranges.get(offset, [WRONG])), lease.valid[index])
            else:
                self._give_back(offset)
        return [1 if key in self.l1 else 2 if self._in_l2(key) else 0 for key in lease.keys]

    def _prefetch(self, source: str, asked: KvPrefetch) -> None:
        keys = keys_of(asked.keys)
        assert asked.owner.startswith("executor."), "a prefetch without an owner"
        for key in keys:
            if key not in self.l1:
                if not self._in_l2(key) or self.missing:
                    break
                self._fetch(key)
        self.waiting.append(Waiting(source, asked, self.now_us, self.now_us + asked.deadline_us))
        self.advance(self.now_us)

    def _fetch(self, key: bytes) -> None:
        if key not in self.l1:
            self.coming.setdefault(key, self.now_us + max(self.l2_us, 0))

    def _promote(self, key: bytes) -> None:
        if key in self.l1 or not self._in_l2(key):
            return
        offset = self._take_range()
        if offset >= 0:
            tokens, valid = self.l2[key]
            self.arena.ranges[offset] = list(tokens)
            self.l1[key] = Entry(offset, valid)

    def _ready(self, one: Waiting) -> None:
        asked, keys = one.asked, keys_of(one.asked.keys)
        resident: list[bytes] = []
        for key in keys if not self.missing else []:
            if key not in self.l1:
                break
            resident.append(key)
            self.l1.move_to_end(key)
        if resident:
            deadline_us = self.now_us + asked.lease_us
            self.leases[one.source, asked.job] = Lease(one.source, asked.owner, resident, deadline_us)
        entries = [self.l1[key] for key in resident]
        short = len(keys) - len(resident)
        self._reply(
            one.source,
            KvReady(
                job=asked.job,
                arena_generation=self.arena.generation,
                offsets=longs([*(entry.offset for entry in entries), *[NO_ROOM] * short]),
                valid_tokens=ints([*(entry.valid for entry in entries), *[0] * short]),
                status="missing" if short else "ok",
                took_us=self.now_us - one.arrived_us,
                from_l2=len(resident) if self.now_us > one.arrived_us else 0,
            ),
        )

    def _in_l2(self, key: bytes) -> bool:
        return self.l2_us >= 0 and key in self.l2


def leased_jobs(tiers: Iterable[FakeTier]) -> list[int]:
    """Jobs that hold a lease or a reservation anywhere: none, once all is done."""
    return sorted(job for tier in tiers for _, job in tier.leases)
