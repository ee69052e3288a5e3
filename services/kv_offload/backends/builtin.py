"""An arena and a remote store without LMCache, for tests and for machines without it.

The arena is a shared-memory segment that executors map; the remote store is a dictionary in this process.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from services.kv_offload.backends.interface import DamagedValue
from services.kv_offload.backends.shared_memory import PAGE_BYTES, Segment, check_room, segment_name


def pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class FreeList:
    """Free ranges of a segment, in order and never adjacent; takes the first that fits."""

    def __init__(self, size_bytes: int) -> None:
        self._ranges = [(0, size_bytes)]  # (offset, bytes)

    def take(self, size_bytes: int) -> int | None:
        """Take a free range of that size and return its offset; None if there is none."""
        for i, (offset, room) in enumerate(self._ranges):
            if room >= size_bytes:
                rest = (offset + size_bytes, room - size_bytes)
                self._ranges[i : i + 1] = [rest] if rest[1] else []
                return offset
        return None

    def give(self, offset: int, size_bytes: int) -> None:
        """Free a taken range, and join it with free neighbours."""
        i = bisect_left(self._ranges, (offset, 0))
        end = offset + size_bytes
        if i < len(self._ranges) and self._ranges[i][0] == end:
            end += self._ranges.pop(i)[1]
        if i > 0 and sum(self._ranges[i - 1]) == offset:
            offset = self._ranges.pop(i - 1)[0]
        insort(self._ranges, (offset, end - offset))

    def free_bytes(self) -> int:
        return sum(room for _, room in self._ranges)


class PlainArena:
    """See `interface.Arena`. `capacity_bytes` is a multiple of 4096."""

    def __init__(self, host: str, generation: int, capacity_bytes: int) -> None:
        self.name = segment_name(host, generation)
        self.generation = generation
        self.capacity_bytes = capacity_bytes
        check_room(capacity_bytes)
        self._segment = Segment(self.name, capacity_bytes, create=True)
        self._counting = CountingArena(capacity_bytes)

    def allocate(self, key: bytes, size_bytes: int) -> int | None:
        return self._counting.allocate(key, size_bytes)

    def seal(self, key: bytes) -> None:
        self._counting.seal(key)

    def discard(self, key: bytes) -> None:
        self._counting.discard(key)

    def view(self, key: bytes) -> memoryview:
        return self._segment.view(*self._counting.placed[key])

    def free_bytes(self) -> int:
        return self._counting.free_bytes()

    def close(self) -> None:
        self._segment.close()


class CountingArena:
    """See `interface.Arena`. Offsets without memory: `view` raises KeyError. The other arenas allocate with
    it. kv_offload starts with one of 0 bytes, and keeps it if L1 is off."""

    name = ""

    def __init__(self, capacity_bytes: int, generation: int = 1) -> None:
        self.capacity_bytes = capacity_bytes
        self.generation = generation
        self._free = FreeList(capacity_bytes)
        self.placed: dict[bytes, tuple[int, int]] = {}  # key -> (offset, bytes)
        self._reserved: set[bytes] = set()

    def allocate(self, key: bytes, size_bytes: int) -> int | None:
        if key in self.placed or size_bytes < 1:
            raise ValueError(f"a key has one range of at least 1 byte: {key.hex()}, {size_bytes}")
        offset = self._free.take(pages(size_bytes))
        if offset is not None:
            self.placed[key] = (offset, size_bytes)
            self._reserved.add(key)
        return offset

    def seal(self, key: bytes) -> None:
        self._reserved.remove(key)

    def discard(self, key: bytes) -> None:
        offset, size_bytes = self.placed.pop(key)
        self._reserved.discard(key)
        self._free.give(offset, pages(size_bytes))

    def view(self, key: bytes) -> memoryview:
        raise KeyError(key)

    def free_bytes(self) -> int:
        return self._free.free_bytes()

    def close(self) -> None:
        self.placed.clear()


class MemoryRemote:
    """See `interface.Remote`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, name: str, value: memoryview) -> None:
        self._values[name] = bytes(value)

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")
        value = self._values.get(name)
        if value is None:
            return 0
        if len(value) != len(into):
            raise DamagedValue(f"the value of {name} has {len(value)} bytes, not {len(into)}: delete it")
        into[:] = value
        return len(value)

    def delete(self, name: str) -> None:
        self._values.pop(name, None)

    def has(self, names: list[str]) -> list[bool]:
        return [name in self._values for name in names]

    def close(self) -> None:
        self._values.clear()
