"""The index of L1: ranges of the arena, readable entries and their order of eviction. Pure.

A range of the arena is *taken* (an executor writes it), then *published* under a name (readable) or given
back. Readers pin published entries; the others are in order of their last use. `allocate` evicts on demand.
The keys of one request are touched tail first, so a prefix is evicted after its tail, which needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from services.kv_offload.backends.arena import Arena, pages
from services.kv_offload.events import Name

URGENT_PERCENT = 10  # of the arena, only for stores of preempted requests
COLDEST = 32  # among so many coldest entries, one that L2 holds is evicted first
FRAGMENTED = 8  # most evictions for one range if the arena is fragmented
SLOT_BYTES = 32


@dataclass(slots=True)
class Range:
    """Room for one value. `slot` is its unique name in the arena: a range in quarantine and the same block
    stored again are two slots."""

    slot: bytes
    offset: int
    size_bytes: int

    @property
    def room_bytes(self) -> int:
        """Its size in whole pages."""
        return pages(self.size_bytes)


@dataclass(slots=True)
class Entry:
    """One readable value."""

    name: Name
    range: Range
    valid_tokens: int
    urgent: bool  # of a preempted request
    uses: int = 1
    pins: int = 0
    sending: bool = False  # a put reads it: it cannot be evicted, and this is no use
    is_dead: bool = False  # no request needs it: its range is free after its last reader


class L1:
    """Entries by name over an arena."""

    def __init__(self, arena: Arena, in_l2: Callable[[Name], bool] | None) -> None:
        self.arena = arena
        self.capacity_bytes = arena.capacity_bytes
        self.taken_bytes = 0  # being written, or in quarantine
        self.pinned_bytes = 0
        self.used_bytes = 0
        self.evictions = 0
        self.evicted: list[Name] = []  # since the last KvGone
        self._in_l2 = in_l2
        self.entries: dict[Name, Entry] = {}  # only this class changes it
        self._unpinned: OrderedDict[Name, Entry] = OrderedDict()  # coldest first
        self._sending_bytes = 0
        self._slots = 0

    def limit_bytes(self, *, urgent: bool) -> int:
        """The most used bytes after a store."""
        return self.capacity_bytes if urgent else self.capacity_bytes * (100 - URGENT_PERCENT) // 100

    # ---- writing --------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, *, urgent: bool) -> Range | None:
        """Room for a value, with evictions if needed; None, without evictions, if there cannot be enough."""
        need, limit = pages(size_bytes), self.limit_bytes(urgent=urgent)
        if size_bytes < 1 or self.used_bytes - self._evictable_bytes() + need > limit:
            return None
        while self.used_bytes + need > limit:
            self._evict()
        self._slots += 1
        slot = self._slots.to_bytes(SLOT_BYTES, "big")
        for _ in range(FRAGMENTED):
            if (offset := self.arena.allocate(slot, size_bytes)) is not None:
                self.used_bytes += need
                self.taken_bytes += need
                return Range(slot, offset, size_bytes)
            if not self._evictable_bytes():
                break
            self._evict()
        return None

    def publish(self, name: Name, range_: Range, valid_tokens: int, *, urgent: bool) -> Entry:
        """Make a written range the value of `name`, which must have none."""
        self.arena.seal(range_.slot)
        self.taken_bytes -= range_.room_bytes
        entry = self.entries[name] = Entry(name, range_, valid_tokens, urgent)
        self._unpinned[name] = entry
        return entry

    def give(self, range_: Range) -> None:
        """Free a range that was taken and not published."""
        self.taken_bytes -= range_.room_bytes
        self._free(range_)

    # ---- reading --------------------------------------------------------------------------------

    def touch(self, entries: Sequence[Entry]) -> None:
        """Move these entries, in the order of their request, to the end that is evicted last."""
        for entry in reversed(entries):
            entry.is_dead = False
            if not entry.pins:
                self._unpinned.move_to_end(entry.name)

    def pin(self, entry: Entry) -> None:
        """Prevent its eviction until `unpin`."""
        if not entry.pins:
            del self._unpinned[entry.name]
            self.pinned_bytes += entry.range.room_bytes
        entry.pins += 1
        entry.is_dead = False

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Remove one pin from these entries, in the order of their request."""
        for entry in reversed(entries):
            entry.pins -= 1
            if not entry.pins:
                self._unpinned[entry.name] = entry
                self.pinned_bytes -= entry.range.room_bytes
                if entry.is_dead:
                    self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Free its range now, or after the readers that it has. A new reader revives it."""
        entry.is_dead = True
        if not entry.pins and not entry.sending:
            self._remove(entry)

    # ---- what L2 should have --------------------------------------------------------------------

    def coldest(self, count: int) -> Iterator[Entry]:
        """The next entries to evict."""
        return islice(self._unpinned.values(), count)

    def set_sending(self, entry: Entry, on: bool) -> None:
        """A put starts or ends to read it; its position in the order of eviction stays."""
        entry.sending = on
        self._sending_bytes += entry.range.room_bytes * (1 if on else -1)
        if entry.is_dead and not on and not entry.pins:
            self._remove(entry)

    # ---- internals ------------------------------------------------------------------------------

    def _evictable_bytes(self) -> int:
        """A lower bound of the bytes that can be evicted: a pinned entry that is being sent counts twice."""
        return self.used_bytes - self.taken_bytes - self.pinned_bytes - self._sending_bytes

    def _evict(self) -> None:
        victim, lowest = None, 4
        for entry in self.coldest(COLDEST):
            in_l2 = self._in_l2 is not None and self._in_l2(entry.name)
            rank = entry.urgent + (0 if in_l2 else 2)
            if rank < lowest and not entry.sending:
                victim, lowest = entry, rank
            if lowest == (0 if self._in_l2 is not None else 2):
                break  # no other can rank lower
        assert victim is not None, "an entry can be evicted"
        self.evictions += 1
        self._remove(victim)

    def _remove(self, entry: Entry) -> None:
        del self.entries[entry.name], self._unpinned[entry.name]
        self.evicted.append(entry.name)
        self._free(entry.range)

    def _free(self, range_: Range) -> None:
        self.used_bytes -= range_.room_bytes
        self.arena.discard(range_.slot)
