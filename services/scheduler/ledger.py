"""The block and slot ledger of one executor: the one place where device memory is given out.

    free ──allocate──▶ held (refs > 0) ──release──▶ fenced until its last step is acknowledged ──▶ free

A block or slot is reused only when the last step that names it has been acknowledged: a step in
flight may still read or write it. A copy job keeps its blocks by a reference of its own. Reserve
admission promises a sequence all the blocks it may ever need, so allocation never fails later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Fence:
    step: int
    blocks: list[int]
    slots: list[int]


@dataclass(slots=True)
class Ledger:
    """Block ids 0..blocks-1, slot ids 0..slots-1."""

    blocks: int
    slots: int
    block_tokens: int
    reserved: int = 0
    acked_step: int = 0
    _free_blocks: list[int] = field(init=False)
    _free_slots: list[int] = field(init=False)
    _refs: list[int] = field(init=False)
    _fences: deque[_Fence] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self._free_blocks = list(range(self.blocks - 1, -1, -1))
        self._free_slots = list(range(self.slots - 1, -1, -1))
        self._refs = [0] * self.blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free_blocks)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def fenced_blocks(self) -> int:
        return sum(len(fence.blocks) for fence in self._fences)

    def can_admit(self, blocks: int, slots: int) -> bool:
        """True when `blocks` can be promised beside the promises already made."""
        return self.free_blocks - self.reserved >= blocks and self.free_slots >= slots

    def reserve(self, blocks: int) -> None:
        """Promise blocks. Check `can_admit` first."""
        self.reserved += blocks

    def unreserve(self, blocks: int) -> None:
        """Take a promise back."""
        self.reserved -= blocks

    def allocate(self) -> int:
        """One block out of a promise."""
        self.reserved -= 1
        block = self._free_blocks.pop()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block."""
        self._refs[block] += 1

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def release(self, blocks: list[int], slots: list[int], last_step: int) -> None:
        """Give up one hold on each block, and the slots; `last_step` is the last that may name them."""
        unheld = []
        for block in reversed(blocks):  # tails first: a prefix lives longest
            self._refs[block] -= 1
            if self._refs[block] == 0:
                unheld.append(block)
        if last_step <= self.acked_step:
            self._give_back(unheld, slots)
        else:
            self._fences.append(_Fence(last_step, unheld, list(slots)))

    def acknowledge(self, step: int) -> None:
        """The executor has finished every step up to `step`."""
        self.acked_step = step
        while self._fences and self._fences[0].step <= step:
            fence = self._fences.popleft()
            self._give_back(fence.blocks, fence.slots)

    def _give_back(self, blocks: list[int], slots: list[int]) -> None:
        self._free_blocks.extend(blocks)
        self._free_slots.extend(slots)

    def check(self) -> None:
        """Raise AssertionError unless every block and slot is free, held or fenced exactly once."""
        free, held = set(self._free_blocks), {b for b, refs in enumerate(self._refs) if refs > 0}
        fenced = [block for fence in self._fences for block in fence.blocks]
        assert len(free) == len(self._free_blocks), "a block is free twice"
        assert min(self._refs, default=0) >= 0, "a block was released twice"
        assert not free & held, "a held block is free"
        assert not held & set(fenced), "a held block is fenced"
        assert len(free) + len(held) + len(fenced) == self.blocks, "a block is lost"
        assert 0 <= self.reserved <= len(free) + len(fenced), "more is promised than there is"
