"""A plain kv_offload for virtual worlds: it answers at once, but for what L2 must bring first.

Leases do not expire: a virtual scheduler neither dies nor forgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.simulation.plain_index import Entry, PlainIndex, TierSpec
from services.scheduler.simulation.tiers import Answer, Moved
from shared.block_keys import KEY_BYTES
from shared.messages import (
    KvCommit,
    KvFound,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    ints,
    longs,
)

NO_ROOM, PRESENT = -1, -2
GONE_KEYS = 1_024  # in one message


@dataclass(slots=True)
class _Lease:
    keys: list[bytes]
    offsets: list[int] = field(default_factory=list)  # of a reservation; empty: it pins what it reads
    valid: Sequence[int] = ()
    size: int = 0


@dataclass(slots=True)
class _Asked:
    """A KvPrefetch that waits for L2."""

    source: str
    message: KvPrefetch
    since_us: int
    left: set[bytes]  # not here yet
    fetched: int

    @property
    def until_us(self) -> int:
        return self.since_us + self.message.deadline_us


class PlainTier:
    """See the top of this file."""

    def __init__(self, spec: TierSpec) -> None:
        self.name, self.host_id, self.generation = spec.name, spec.host_id, 1
        self.tiers = ("l1", "l2") if spec.l2_bytes_s else ("l1",)
        self.moved = Moved()
        self.index = PlainIndex(spec, self.moved)
        self._leases: dict[int, _Lease] = {}
        self._asked: list[_Asked] = []

    @property
    def due_us(self) -> int | None:
        """When L2 brings the next key, or a prefetch has waited long enough."""
        times = [asked.until_us for asked in self._asked]
        if self.index.coming:
            times.append(next(iter(self.index.coming.values()))[0])
        return min(times, default=None)

    @property
    def leases(self) -> int:
        """How many jobs have one."""
        return len(self._leases)

    def handle(self, source: str, message: Message, now_us: int) -> list[Answer]:
        """Take a message; the answers are due at once."""
        self.moved.messages += 1
        answers: list[Message] = []
        match message:
            case KvLookup():
                answers.append(self._lookup(message, now_us))
            case KvReserve():
                answers.append(self._reserve(message, now_us))
            case KvCommit():
                answers.append(self._commit(message, now_us))
            case KvRelease(jobs=jobs):
                for job in jobs:
                    self._release(job)
            case KvPrefetch():
                self._prefetch(source, message, now_us)
        gone, self.index.gone = self.index.gone, []
        parts = (gone[at : at + GONE_KEYS] for at in range(0, len(gone), GONE_KEYS))
        answers.extend(KvGone(keys=b"".join(part)) for part in parts)
        return [(0, source, answer) for answer in answers] + self.advance(now_us)

    def advance(self, now_us: int) -> list[Answer]:
        """Answer the prefetches that have all they asked for, or have waited long enough."""
        arrived = self.index.arrive(now_us)
        for asked in self._asked:
            asked.left.difference_update(arrived)
        ready = [asked for asked in self._asked if not asked.left or asked.until_us <= now_us]
        for asked in ready:
            self._asked.remove(asked)
        return [(0, asked.source, self._ready(asked, now_us)) for asked in ready]

    def _lookup(self, asked: KvLookup, now_us: int) -> KvFound:
        keys = keys_of(asked.keys)
        tiers = [self.index.tier_of(key, now_us) for key in keys]
        if asked.prefix and 0 in tiers:
            first = tiers.index(0)
            tiers[first:] = [0] * (len(tiers) - first)
        self.index.touch([key for key, tier in zip(keys, tiers, strict=True) if tier == 1])
        if asked.promote:
            for key, tier in zip(keys, tiers, strict=True):
                if tier == 2 and not self.index.fetch(key, now_us):
                    break
        return KvFound(job=asked.job, tiers=ints(tiers))

    def _reserve(self, asked: KvReserve, now_us: int) -> KvReserved:
        keys, index, offsets = keys_of(asked.keys), self.index, []
        index.touch([key for key in keys if key in index.l1])
        for key in keys:
            offset = PRESENT if key in index.l1 else index.take(asked.value_bytes, now_us)
            self.moved.refused_blocks += offset is None
            offsets.append(NO_ROOM if offset is None else offset)
        valid = asked.valid_tokens or ints([0]) * len(keys)
        self._leases[asked.job] = _Lease(keys, offsets, valid, asked.value_bytes)
        return KvReserved(
            job=asked.job,
            arena_generation=self.generation,
            offsets=longs(offsets),
            status="no_room" if NO_ROOM in offsets else "ok",
        )

    def _commit(self, asked: KvCommit, now_us: int) -> KvStored:
        lease, index = self._leases.pop(asked.job, None), self.index
        if lease is None:
            return KvStored(job=asked.job, tiers=ints([0] * len(asked.written)))
        columns = zip(lease.keys, lease.offsets, asked.written, lease.valid, strict=True)
        for key, offset, written, valid in columns:
            if offset < 0:
                continue
            if written and key not in index.l1:
                index.put(key, Entry(lease.size, valid, offset), now_us)
            else:
                index.free_bytes += lease.size
        index.touch([key for key in lease.keys if key in index.l1])
        return KvStored(job=asked.job, tiers=ints(index.tier_of(key, now_us) for key in lease.keys))

    def _release(self, job: int) -> None:
        lease = self._leases.pop(job, None)
        self._asked = [asked for asked in self._asked if asked.message.job != job]
        if lease is None:
            return
        self.index.free_bytes += lease.size * sum(offset >= 0 for offset in lease.offsets)
        for key in lease.keys if not lease.offsets else ():
            self.index.l1[key].pins -= 1

    def _prefetch(self, source: str, asked: KvPrefetch, now_us: int) -> None:
        index, left, keys = self.index, set[bytes](), keys_of(asked.keys)
        index.touch([key for key in keys if key in index.l1])
        for key in keys:
            if key in index.l1:
                continue
            if not index.fetch(key, now_us):
                break
            left.add(key)
        self._asked.append(_Asked(source, asked, now_us, left, len(left)))

    def _ready(self, asked: _Asked, now_us: int) -> KvReady:
        keys, message, l1 = keys_of(asked.message.keys), asked.message, self.index.l1
        resident = keys[: next((at for at, key in enumerate(keys) if key not in l1), len(keys))]
        entries = [l1[key] for key in resident]
        for entry in entries:
            entry.pins += 1
        self.index.touch(resident)
        if resident:
            self._leases[message.job] = _Lease(resident)
        short = len(keys) - len(resident)
        return KvReady(
            job=message.job,
            arena_generation=self.generation,
            offsets=longs([*(entry.offset for entry in entries), *[NO_ROOM] * short]),
            valid_tokens=ints([*(entry.valid for entry in entries), *[0] * short]),
            status="missing" if short else "ok",
            took_us=now_us - asked.since_us,
            from_l2=min(asked.fetched, len(resident)),
        )


def keys_of(joined: bytes) -> list[bytes]:
    """The keys in a message."""
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
