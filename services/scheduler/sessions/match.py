"""Which session a prompt continues: the one with the deepest tip among the prefixes of the prompt.

A tip is found by digests of tokens, not by keys: the keys of a long prompt take most of its arrival, and
those before the tip are the session's. One pass makes a digest at each border of a span of blocks. From the
deepest border on that some tip has, those blocks after it are tried at which a tip ends: at most SPAN_BLOCKS.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b

from services.scheduler.sessions.table import SPAN_BLOCKS, Keyed, Table, Tip

DIGEST_BYTES = 16
WIDTH = 4  # bytes of a token


class Prefixes:
    """Digests of the prefixes of a prompt at the ends of blocks."""

    def __init__(self, keyed: Keyed, tokens: array[int], blocks: int) -> None:
        root, block_tokens = self._keyed = keyed
        self._block_bytes = block_tokens * WIDTH
        column = tokens[: blocks * block_tokens]
        if sys.byteorder == "big":
            column.byteswap()
        self._data = memoryview(column).cast("B")
        self.blocks = blocks
        span = SPAN_BLOCKS * self._block_bytes
        hasher = blake2b(root, digest_size=DIGEST_BYTES)
        self._spans = [hasher.copy()]
        for at in range(0, blocks // SPAN_BLOCKS * span, span):
            hasher.update(self._data[at : at + span])
            self._spans.append(hasher.copy())

    def border(self, span: int) -> bytes:
        """The digest at the start of a span."""
        return self._spans[span].digest()

    def tip(self, blocks: int) -> Tip:
        """The tip after so many blocks."""
        span = blocks // SPAN_BLOCKS
        hasher = self._spans[span].copy()
        hasher.update(self._part(span * SPAN_BLOCKS, blocks))
        return Tip(blocks, hasher.digest(), self.border(span))

    def find(self, table: Table) -> tuple[str, int]:
        """The name of the session with the deepest tip, and its blocks; ("", 0) if there is none."""
        if (index := table.tips.get(self._keyed)) is None:
            return "", 0
        for span in range(len(self._spans) - 1, -1, -1):
            at_border = index.borders.get(self.border(span))
            found = ("", 0)
            hasher, done = self._spans[span].copy(), span * SPAN_BLOCKS
            for blocks in sorted(at_border or ()):
                if blocks > self.blocks:
                    break
                hasher.update(self._part(done, blocks))
                done = blocks
                name = index.sessions.get(hasher.digest())
                found = (name, blocks) if name is not None else found
            if found[0]:
                return found
        return "", 0

    def _part(self, first: int, last: int) -> memoryview:
        return self._data[first * self._block_bytes : last * self._block_bytes]
