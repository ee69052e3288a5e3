"""Where each key of a plain tier is: L1 with an exact LRU, L2 behind a queue each way.

Keys that are used together are touched in reverse, head last: of one chain the tail is evicted first. A put
to L2 that does not begin within PUT_WAIT_US is left out, and one that eviction overtakes is lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.simulation.tiers import Moved

PUT_WAIT_US = 1_000_000


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The size and speed of a plain tier."""

    l1_bytes: int
    l2_bytes_s: int = 0  # each way; 0: there is none
    l2_delay_us: int = 500  # of a get, beside its bytes
    name: str = "k0"
    host_id: str = "virtual"


@dataclass(slots=True)
class Entry:
    """A key in L1. `valid`: tokens of its block that count."""

    size: int
    valid: int
    offset: int
    pins: int = 0


@dataclass(slots=True)
class Lane:
    """One way, first come first served."""

    bytes_s: int
    free_us: int = 0

    def done_us(self, size: int, ready_us: int) -> int:
        """When a value that can start at `ready_us` is through."""
        self.free_us = max(self.free_us, ready_us) + size * 1_000_000 // self.bytes_s
        return self.free_us


@dataclass(slots=True)
class PlainIndex:
    """See the top of this file."""

    spec: TierSpec
    moved: Moved
    free_bytes: int = 0
    l1: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)  # next to evict first
    coming: dict[bytes, tuple[int, Entry]] = field(default_factory=dict)  # when; the next one first
    gone: list[bytes] = field(default_factory=list)  # evicted, and in no tier
    _l2: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)  # there from (us), size, valid
    _puts: Lane = field(init=False)
    _gets: Lane = field(init=False)
    _offset: int = 0

    def __post_init__(self) -> None:
        self.free_bytes = self.spec.l1_bytes
        self._puts, self._gets = Lane(self.spec.l2_bytes_s), Lane(self.spec.l2_bytes_s)

    def tier_of(self, key: bytes, now_us: int) -> int:
        """0 nowhere, 1 L1, 2 L2."""
        if key in self.l1:
            return 1
        return 2 if key in self._l2 and self._l2[key][0] <= now_us else 0

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used now, as one chain. All are in L1."""
        for key in reversed(keys):
            self.l1.move_to_end(key)

    def take(self, size: int, now_us: int) -> int | None:
        """The offset of `size` bytes of L1: free ones, or those of keys that nobody reads."""
        while self.free_bytes < size:
            key = next((key for key, entry in self.l1.items() if not entry.pins), None)
            if key is None:
                return None
            self.free_bytes += self.l1.pop(key).size
            self.moved.evicted_blocks += 1
            if not self.tier_of(key, now_us):
                self._l2.pop(key, None)
                self.gone.append(key)
        self.free_bytes -= size
        self._offset += size  # nobody writes there: it is enough that it is another one each time
        return self._offset

    def put(self, key: bytes, entry: Entry, now_us: int) -> None:
        """A key is written to L1, and begins its way to L2."""
        self.l1[key] = entry
        self.moved.stored_blocks += 1
        if self.spec.l2_bytes_s and key not in self._l2 and self._puts.free_us <= now_us + PUT_WAIT_US:
            self._l2[key] = (self._puts.done_us(entry.size, now_us), entry.size, entry.valid)
            self.moved.l2_put_bytes += entry.size

    def fetch(self, key: bytes, now_us: int) -> bool:
        """Begin to bring a key from L2. False where it is not there, or L1 has no room."""
        if key in self.l1 or key in self.coming:
            return True
        if self.tier_of(key, now_us) != 2:
            return False
        _, size, valid = self._l2[key]
        offset = self.take(size, now_us)
        if offset is None:
            return False
        at_us = self._gets.done_us(size, now_us) + self.spec.l2_delay_us
        self.coming[key] = (at_us, Entry(size, valid, offset))
        self.moved.l2_get_bytes += size
        return True

    def arrive(self, now_us: int) -> list[bytes]:
        """Keys that L2 has brought by now; they are in L1."""
        arrived = []
        for key, (at_us, entry) in self.coming.items():
            if at_us > now_us:
                break
            arrived.append(key)
            if key in self.l1:  # stored again meanwhile
                self.free_bytes += entry.size
            else:
                self.l1[key] = entry
        for key in arrived:
            del self.coming[key]
        return arrived
