"""The pool once more: fenced blocks that a tier below may take before their fence is lifted.

A fenced block is *settled* where what its key names was there before the steps that fence it: they read it,
or write behind it. A copy of it is made while they run, so that it is free as soon as they are back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from services.scheduler.copied_pool import CopiedPool


@dataclass(kw_only=True)
class SettledPool(CopiedPool):
    """Adds to the pool which fenced blocks are settled."""

    _settled: dict[int, None] = field(init=False, default_factory=dict)  # the tail of a table first

    @property
    def copied_blocks(self) -> int:
        """Unheld blocks that are being copied, fenced ones among them."""
        return sum([not self._refs[block] for block in self.copies])

    @property
    def settled_blocks(self) -> int:
        """Fenced blocks that may be copied now."""
        return len(self._settled)

    def settled(self, most: int) -> list[int]:
        """The first of them."""
        return [block for block in islice(self._settled, most) if self._key_of[block] is not None]

    def is_fenced(self, block: int) -> bool:
        """Whether a step in flight may still name an unheld block."""
        return self._last_step[block] > self.acked_step

    def settle(self, table: Sequence[int]) -> None:
        """All that the keys of this table name was computed by steps that are acknowledged, and a holder has
        just released it."""
        if self.write_back:
            for block in reversed(table):
                fenced = not self._refs[block] and self.is_fenced(block)
                if fenced and self._key_of[block] and block not in self.clean and block not in self.copies:
                    self._settled[block] = None

    def adopt(self, blocks: Sequence[int]) -> None:
        """One more hold on each block, see BlockPool; a held one is not settled."""
        super().adopt(blocks)
        self._unsettle(blocks)

    def begin_copy(self, blocks: Sequence[int]) -> None:
        """See CopiedPool; one that is being copied needs no other copy."""
        super().begin_copy(blocks)
        self._unsettle(blocks)

    def tier_lost(self) -> None:
        """See CopiedPool; nobody takes what is settled."""
        super().tier_lost()
        self._settled.clear()

    def _give_back(self, block: int) -> None:
        self._settled.pop(block, None)
        super()._give_back(block)

    def _unsettle(self, blocks: Iterable[int]) -> None:
        for block in blocks if self._settled else ():
            self._settled.pop(block, None)
