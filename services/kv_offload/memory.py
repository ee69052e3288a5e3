"""A tier store in a dictionary: for tests, and for a host without an arena, where it stays empty."""

from __future__ import annotations


class MemoryTiers:
    """Keeps up to `capacity` keys; offsets count values. Holds no KV bytes."""

    names: tuple[str, ...] = ()

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._stored: dict[bytes, int] = {}
        self._reserved: dict[int, dict[bytes, int]] = {}

    def tier_of(self, key: bytes) -> int:
        return 1 if key in self._stored else 0

    def reserve(self, job: int, keys: list[bytes], value_bytes: int) -> list[int]:
        used = len(self._stored) + sum(len(promised) for promised in self._reserved.values())
        granted = {key: (used + i) * value_bytes for i, key in enumerate(keys) if used + i < self._capacity}
        self._reserved[job] = granted
        return [granted.get(key, -1) for key in keys]

    def fetch(self, job: int, keys: list[bytes]) -> list[int]:
        return [self._stored.get(key, -1) for key in keys]

    def commit(self, job: int, written: list[int]) -> list[int]:
        granted = self._reserved.pop(job, {})
        for (key, offset), done in zip(granted.items(), written, strict=False):
            if done:
                self._stored[key] = offset
        return [1 if done else 0 for _, done in zip(granted, written, strict=False)]
