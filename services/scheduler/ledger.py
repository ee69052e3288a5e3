"""The ledger of one executor: the one place where its blocks and slots are given out.

It adds to the pool what admission needs: slots, fenced like blocks, and *promises*. A promised block
is free but spoken for, so `allocate` out of a promise never fails; `try_allocate` takes only what
nobody was promised. A sequence that starts on cached blocks is promised those it lacks; the ones it
adopts may stop being free by that (`free_taken_by`), which `can_admit` has to count too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.settled_pool import SettledPool


@dataclass(kw_only=True)
class Ledger(SettledPool):
    """Block ids 0..blocks-1, slot ids 0..slots-1."""

    slots: int
    block_tokens: int
    reserved: int = 0  # blocks promised and not yet allocated
    _free_slots: list[int] = field(init=False)
    _slot_fences: dict[int, list[int]] = field(init=False, default_factory=dict)  # step -> its slots

    def __post_init__(self) -> None:
        super().__post_init__()
        self._free_slots = list(range(self.slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def fenced_slots(self) -> int:
        """Slots that a step in flight may still name."""
        return sum(len(slots) for slots in self._slot_fences.values())

    def can_admit(self, blocks: int, slots: int, taken: int = 0) -> bool:
        """True when `blocks` can be promised beside the promises already made, once adopting a prefix
        has made `taken` blocks less free."""
        return self.free_blocks - self.reserved - taken >= blocks and self.free_slots >= slots

    def reserve(self, blocks: int) -> None:
        """Promise blocks. Check `can_admit` first."""
        self.reserved += blocks

    def unreserve(self, blocks: int) -> None:
        """Take a promise back."""
        self.reserved -= blocks

    def allocate(self) -> int:
        """One block out of a promise."""
        self.reserved -= 1
        return self._take(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """Blocks out of a promise."""
        self.reserved -= count
        return self._take(count)

    def try_allocate(self) -> int | None:
        """One block without a promise; None when all that are free are promised."""
        return self._take(1)[0] if self.free_blocks > self.reserved else None

    def try_allocate_many(self, count: int, promised: int) -> list[int] | None:
        """Blocks of which so many are out of a promise; None when all others that are free are promised."""
        if self.free_blocks - self.reserved < count - promised:
            return None
        self.reserved -= promised
        return self._take(count)

    def claim(self, block: int) -> None:
        """Hold a block alone, to write on: its key is forgotten. Only for one that nobody holds."""
        self.adopt((block,))
        self._forget_keys((block,))

    def share(self, block: int) -> None:
        """One more holder of a block."""
        self.adopt((block,))

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def release(self, blocks: Sequence[int], slots: Sequence[int], last_step: int) -> None:
        """Give up one hold on each block of a table, and the slots; `last_step` is the last that may
        name them."""
        self._release(blocks, last_step)
        if last_step > self.acked_step:
            self._slot_fences.setdefault(last_step, []).extend(slots)
        else:
            self._free_slots.extend(slots)

    def acknowledge(self, step: int) -> None:
        """The executor has finished every step up to `step`."""
        super().acknowledge(step)
        for at in sorted(at for at in self._slot_fences if at <= step):
            self._free_slots.extend(self._slot_fences.pop(at))

    def check(self) -> None:
        """Raise AssertionError unless every block is empty, cached, held or fenced exactly once, every
        key and its block know each other, no slot is free twice and every promise can be kept."""
        empty, cached = set(self._empty), set(self._cached) | set(self._dirty)
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        fenced = [block for fence in self._fences.values() for block in fence]
        slots = [*self._free_slots, *(slot for fence in self._slot_fences.values() for slot in fence)]
        known = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert min(self._refs, default=0) >= 0, "a block was released twice"
        assert len(empty) == len(self._empty), "a block is free twice"
        assert len(set(slots)) == len(slots), "a slot is free twice"
        copying = set(self._copying)
        states = len(empty) + len(self._cached) + len(self._dirty) + len(held) + len(fenced) + len(copying)
        assert len(empty | cached | held | set(fenced) | copying) == states, "a block is in two states"
        assert states == self.blocks, "a block is lost"
        assert known == self._block_of, "a key and its block do not know each other"
        assert not empty & set(known.values()), "an empty block has a key"
        assert cached <= set(known.values()), "a cached block has no key"
        assert copying <= set(self.copies), "a block waits for a copy that is over"
        assert not (empty | cached) & set(self.copies), "a block is free while it is copied"
        assert self.clean <= set(known.values()), "a block without a key has a copy"
        assert not self.clean & set(self._dirty), "a block is clean and dirty"
        assert self.write_back or not self._dirty, "a block waits for a tier that is not there"
        assert all(step > self.acked_step for step in self._fences), "a fence outlived its step"
        assert 0 <= self.reserved <= self.free_blocks, "more is promised than there is"
