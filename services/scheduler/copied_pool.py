"""The pool as the tiers below see it: which blocks have copies there, and which are being copied.

Clean blocks can be dropped for nothing, dirty ones cost a copy or a recompute. `dirty` lists them in the
order in which they should be dealt with: the oldest release first, in it the tail of a table first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from services.scheduler.block_pool import BlockPool


@dataclass(kw_only=True)
class CopiedPool(BlockPool):
    """Adds to the pool what a copy begins, ends and leaves behind."""

    @property
    def dirty_blocks(self) -> int:
        """Unheld blocks that wait to be copied or given up."""
        return len(self._dirty)

    @property
    def copying_blocks(self) -> int:
        """Unheld blocks that are being copied."""
        return len(self._copying)

    def dirty(self, most: int) -> list[int]:
        """The first of them."""
        return list(islice(self._dirty, most))

    def key_of(self, block: int) -> bytes | None:
        """The key of a block, if it has one."""
        return self._key_of[block]

    def owner_of(self, block: int) -> tuple[int, int]:
        """The sequence that released a block last, and the block's place in its table."""
        return self._owner[block]

    def register_tail(self, block: int, key: bytes, valid_tokens: int) -> None:
        """Note that the first tokens of a held block are those of a paused sequence."""
        if self._key_of[block] is None and self.register(block, key):
            self._valid[block] = valid_tokens

    def valid_of(self, block: int) -> int:
        """How many tokens a partial block holds; 0 for a full one."""
        return self._valid.get(block, 0)

    def writable(self, key: bytes) -> int | None:
        """The block with this key, if nobody holds it, and no step in flight and no copy names it."""
        block = self._block_of.get(key)
        if block is None or self._refs[block] or block in self.copies:
            return None
        if self._last_step[block] > self.acked_step:
            return None
        return block

    def own(self, table: list[int], seq: int) -> None:
        """A sequence is about to release these blocks of its table."""
        for at, block in enumerate(table):
            self._owner[block] = (seq, at)

    def alone(self, blocks: Iterable[int]) -> int:
        """How many of these held blocks one holder alone holds: what its leaving would free."""
        return sum(self._refs[block] == 1 for block in blocks)

    def begin_copy(self, blocks: Sequence[int]) -> None:
        """A copy reads or writes these blocks from now on. Nobody gets them before its end."""
        for block in blocks:
            self.copies[block] = self.copies.get(block, 0) + 1
            if block in self._dirty:
                del self._dirty[block]
                self._copying[block] = None
            elif block in self._cached:
                del self._cached[block]
                self._copying[block] = None

    def end_copy(self, blocks: Iterable[int]) -> None:
        """That copy is over."""
        for block in blocks:
            self.copies[block] -= 1
            if not self.copies[block]:
                del self.copies[block]
                if block in self._copying:
                    del self._copying[block]
                    self._give_back(block)

    def mark_clean(self, block: int, key: bytes) -> None:
        """A tier below holds what this block holds, if it still has that key: it may go."""
        if self._key_of[block] == key and self.write_back:
            self.clean.add(block)
            if block in self._dirty:
                del self._dirty[block]
                self._cached[block] = None

    def lost_below(self, keys: Iterable[bytes], spare: int) -> None:
        """No tier below holds these keys any more. Of the blocks that were free for that, at most `spare` are
        dirty from now on: the others are promised to somebody."""
        for key in keys:
            block = self._block_of.get(key)
            if block is not None and block in self.clean:
                self.clean.discard(block)
                if spare > 0 and self.write_back and block in self._cached:
                    del self._cached[block]
                    self._dirty[block] = None
                    spare -= 1

    def give_up(self, block: int) -> None:
        """A dirty block is not worth a copy: it may go, after those that may go already."""
        if block in self._dirty:
            del self._dirty[block]
            self._cached[block] = None

    def tier_ready(self) -> None:
        """There is a tier below, and it holds nothing. What is free now stays free: it may be promised."""
        self.tier_lost()
        self.write_back = True

    def tier_lost(self) -> None:
        """There is none: every copy is gone, and nothing can be stored."""
        self.write_back = False
        self.clean.clear()
        self._cached.update(self._dirty)
        self._dirty.clear()
