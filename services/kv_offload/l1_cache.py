"""The index of L1: what lies where, what may be read, and what goes first when room is needed. Pure.

A range of the arena is *taken* (somebody writes it), then *published* under a name (readable) or given
back. Published entries are pinned by readers; those nobody pins stand in order of their last use. Eviction is
on demand, inside `take`. The keys of one request are touched tail first, so a prefix outlives its tail:
a tail without its prefix is of no use to anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from services.kv_offload.backends.interface import Arena
from services.kv_offload.backends.shared_memory import PAGE_BYTES
from services.kv_offload.events import Name

URGENT_PERCENT = 10  # of the arena: stores of preempted requests alone may use it
COLDEST = 32  # of these, the next to go is one that L2 holds as well, if there is one
FRAGMENTED = 8  # evictions for one range that the arena cannot place although it is small enough
SLOT_BYTES = 32


@dataclass(slots=True)
class Range:
    """Room for one value. `slot` names it in the arena, once: a range in quarantine and the same block stored
    again are two slots."""

    slot: bytes
    offset: int
    size_bytes: int

    @property
    def room_bytes(self) -> int:
        """What it takes up: whole pages."""
        return _pages(self.size_bytes)


@dataclass(slots=True)
class Entry:
    """One readable value."""

    name: Name
    range: Range
    valid_tokens: int
    urgent: bool  # of a preempted request
    uses: int = 1
    pins: int = 0
    sending: bool = False  # a put reads it: not to be evicted, yet no use of it


class L1:
    """Entries by name over an arena."""

    def __init__(self, arena: Arena, in_l2: Callable[[Name], bool] | None) -> None:
        self.arena = arena
        self.capacity_bytes = arena.capacity_bytes
        self.taken_bytes = 0  # being written, quarantine included
        self.pinned_bytes = 0
        self.used_bytes = 0
        self.evictions = 0
        self.evicted: list[Name] = []  # since the core looked last
        self._in_l2 = in_l2
        self.entries: dict[Name, Entry] = {}  # read by others, changed here alone
        self._unpinned: OrderedDict[Name, Entry] = OrderedDict()  # coldest first
        self._sending_bytes = 0
        self._slots = 0

    def limit_bytes(self, *, urgent: bool) -> int:
        """How full the arena may be after a store."""
        return self.capacity_bytes if urgent else self.capacity_bytes * (100 - URGENT_PERCENT) // 100

    # ---- writing --------------------------------------------------------------------------------

    def take(self, size_bytes: int, *, urgent: bool) -> Range | None:
        """Room for a value, evicting what it must; None where there is none, and then nothing is evicted
        in vain."""
        need, limit = _pages(size_bytes), self.limit_bytes(urgent=urgent)
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
        """The range is written: from now on it is the value of `name`, which had none."""
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
        """These, in the order of their request, were asked for."""
        for entry in reversed(entries):
            if not entry.pins:
                self._unpinned.move_to_end(entry.name)

    def pin(self, entry: Entry) -> None:
        """Keep it until `unpin`."""
        if not entry.pins:
            del self._unpinned[entry.name]
            self.pinned_bytes += entry.range.room_bytes
        entry.pins += 1

    def unpin(self, entries: Sequence[Entry]) -> None:
        """One reader of these, in the order of their request, has ended."""
        for entry in reversed(entries):
            entry.pins -= 1
            if not entry.pins:
                self._unpinned[entry.name] = entry
                self.pinned_bytes -= entry.range.room_bytes

    # ---- what L2 should have --------------------------------------------------------------------

    def coldest(self, count: int) -> Iterator[Entry]:
        """The next to go."""
        return islice(self._unpinned.values(), count)

    def set_sending(self, entry: Entry, on: bool) -> None:
        """A put reads it from now on, or no more; its place in the order stays."""
        entry.sending = on
        self._sending_bytes += entry.range.room_bytes * (1 if on else -1)

    # ---- internals ------------------------------------------------------------------------------

    def _evictable_bytes(self) -> int:
        """At least this much can go (an entry that is both pinned and sent counts twice, and briefly)."""
        return self.used_bytes - self.taken_bytes - self.pinned_bytes - self._sending_bytes

    def _evict(self) -> None:
        victim, lowest = None, 4
        for entry in self.coldest(COLDEST):
            in_l2 = self._in_l2 is not None and self._in_l2(entry.name)
            rank = entry.urgent + (0 if in_l2 else 2)
            if rank < lowest and not entry.sending:
                victim, lowest = entry, rank
            if lowest == (0 if self._in_l2 is not None else 2):
                break  # there is no better one
        assert victim is not None, "whoever evicts knows that something can go"
        del self.entries[victim.name], self._unpinned[victim.name]
        self.evictions += 1
        self.evicted.append(victim.name)
        self._free(victim.range)

    def _free(self, range_: Range) -> None:
        self.used_bytes -= range_.room_bytes
        self.arena.discard(range_.slot)


def _pages(size_bytes: int) -> int:
    """Bytes that a range takes up."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
