"""A tier store in a dictionary: for tests, and for a host without an arena, where it stays empty."""

from __future__ import annotations

from dataclasses import dataclass

NO_ROOM, PRESENT = -1, -2


@dataclass(frozen=True, slots=True)
class _Range:
    """The place of one key in a reservation. Only one with `place` >= 0 is the job's to fill or free."""

    key: bytes
    place: int
    offset: int


class MemoryTiers:
    """Keeps up to `capacity` keys, each in a place of its own; evicts nothing. Holds no KV bytes."""

    names: tuple[str, ...] = ()

    def __init__(self, capacity: int = 0) -> None:
        self._free = list(range(capacity - 1, -1, -1))
        self._stored: dict[bytes, int] = {}
        self._reserved: dict[int, list[_Range]] = {}

    def tier_of(self, key: bytes) -> int:
        return 1 if key in self._stored else 0

    def reserve(self, job: int, keys: list[bytes], value_bytes: int) -> list[int]:
        self.release(job)  # asked again: the answer may have been lost
        self._reserved[job] = [self._range(key, value_bytes) for key in keys]
        return [found.offset for found in self._reserved[job]]

    def fetch(self, job: int, keys: list[bytes]) -> list[int]:
        return [self._stored.get(key, NO_ROOM) for key in keys]

    def commit(self, job: int, written: list[int]) -> list[int]:
        ranges = self._reserved.pop(job, [])
        marks = [*written, *[0] * len(ranges)]
        for found, done in zip(ranges, marks, strict=False):
            if found.place >= 0 and done and found.key not in self._stored:
                self._stored[found.key] = found.offset
            elif found.place >= 0:
                self._free.append(found.place)
        return [self.tier_of(found.key) for found in ranges]

    def release(self, job: int) -> None:
        ranges = self._reserved.pop(job, [])
        self._free += [found.place for found in ranges if found.place >= 0]

    def holds(self, job: int) -> bool:
        return job in self._reserved

    def _range(self, key: bytes, value_bytes: int) -> _Range:
        if key in self._stored:
            return _Range(key, PRESENT, PRESENT)
        if not self._free:
            return _Range(key, NO_ROOM, NO_ROOM)
        place = self._free.pop()
        return _Range(key, place, place * value_bytes)
