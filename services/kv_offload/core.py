"""The tiers' answers. Pure. What no tier holds is answered at once with nothing: the scheduler
then computes it, and nobody waits."""

from __future__ import annotations

from typing import Protocol

from shared.messages import (
    KvCommit,
    KvFound,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvRenew,
    KvRenewed,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    ints,
    longs,
)

KEY_BYTES = 32


class Tiers(Protocol):
    """Where copies of KV blocks live below device memory."""

    names: tuple[str, ...]

    def tier_of(self, key: bytes) -> int:
        """0 nowhere, 1 DRAM, 2 remote."""

    def reserve(self, job: int, keys: list[bytes], value_bytes: int) -> list[int]:
        """Arena offset per key, -1 where there is no room, -2 where the key is in DRAM already. A job
        reserved before starts anew."""

    def fetch(self, job: int, keys: list[bytes]) -> list[int]:
        """Arena offset per key, -1 where it cannot be had."""

    def commit(self, job: int, written: list[int]) -> list[int]:
        """Tier reached per key of the job, 0 = lost. What is not written is free again."""

    def release(self, job: int) -> None:
        """End the job's lease. An unknown job does nothing."""

    def holds(self, job: int) -> bool:
        """True while the job has a lease."""


def keys_of(joined: bytes) -> list[bytes]:
    """The 32-byte keys in `joined`."""
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


class KvCore:
    """Requests of the scheduler in, answers out."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.lookups = 0
        self.hits = 0

    def handle(self, message: Message) -> Message | None:
        """The answer to a message, None where none is due."""
        match message:
            case KvLookup(job=job, keys=keys, prefix=prefix):
                return KvFound(job=job, tiers=ints(self._lookup(keys_of(keys), prefix)))
            case KvReserve(job=job, keys=keys, value_bytes=value_bytes):
                offsets = self._tiers.reserve(job, keys_of(keys), value_bytes)
                status = "no_room" if -1 in offsets else "ok"
                return KvReserved(job=job, arena_generation=0, offsets=longs(offsets), status=status)
            case KvPrefetch(job=job, keys=keys):
                offsets = self._tiers.fetch(job, keys_of(keys))
                status = "missing" if -1 in offsets else "ok"
                return KvReady(job=job, arena_generation=0, offsets=longs(offsets), status=status)
            case KvCommit(job=job, written=written):
                return KvStored(job=job, tiers=ints(self._tiers.commit(job, list(written))))
            case KvRenew(jobs=jobs):
                return KvRenewed(jobs=jobs, alive=ints(self._tiers.holds(job) for job in jobs))
            case KvRelease(jobs=jobs):
                for job in jobs:
                    self._tiers.release(job)
        return None

    def _lookup(self, keys: list[bytes], prefix: bool) -> list[int]:
        tiers = [self._tiers.tier_of(key) for key in keys]
        if prefix and 0 in tiers:
            miss = tiers.index(0)
            tiers[miss:] = [0] * (len(tiers) - miss)
        self.lookups += len(tiers)
        self.hits += sum(tier > 0 for tier in tiers)
        return tiers
