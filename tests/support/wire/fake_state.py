"""What the fake scheduler knows: sequences and their block tables."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from support.wire.fakes import BLOCK

from shared.kv_blocks import blocks_for
from shared.messages import Tokenized, Usage


@dataclass(slots=True, kw_only=True)
class FakeSequence:
    """One choice of one request, by the scheduler's record."""

    seq: int
    choice: int
    request: Tokenized
    tokens: list[int]
    shard: str = ""
    left: set[str] = field(default_factory=set)  # shards that had it before
    state: str = "running"  # grammar, running, pausing, paused, restoring, closed, ended
    slot: int = 0
    generation: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    sent_entries: int = 0  # table entries the executor knows
    wait_jobs: list[int] = field(default_factory=list)
    fresh: bool = True
    final: int = -1
    usage: Usage | None = None
    reason: str = ""

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.tokens) :]


def sequence_keys(sequence: FakeSequence) -> bytes:
    """One key of 32 bytes for each block of what is computed."""
    ends = range(BLOCK, blocks_for(sequence.computed, BLOCK) * BLOCK + 1, BLOCK)
    prefixes = [repr(sequence.tokens[: min(end, sequence.computed)]) for end in ends]
    return b"".join(hashlib.blake2b(p.encode(), digest_size=32).digest() for p in prefixes)


class Tables:
    """Blocks with owner counts, and the columns of a plan's deltas and copies."""

    def __init__(self) -> None:
        self.owners: Counter[int] = Counter()
        self._fresh = count(10)

    def new(self) -> int:
        block = next(self._fresh)
        self.owners[block] = 1
        return block

    def share(self, sequence: FakeSequence, other: FakeSequence) -> None:
        sequence.table, sequence.sent_entries, sequence.computed = list(other.table), 0, other.computed
        self.owners.update(sequence.table)

    def free(self, sequence: FakeSequence) -> None:
        self.owners.subtract(sequence.table)
        sequence.table, sequence.sent_entries, sequence.computed = [], 0, 0

    def make_room(self, sequence: FakeSequence) -> list[tuple[int, int]]:
        """Cover every token; copy a shared block before it is written. Returns (from, to) pairs."""
        copies = []
        at = sequence.computed // BLOCK
        if at < len(sequence.table) and self.owners[old := sequence.table[at]] > 1:
            self.owners[old] -= 1
            sequence.table[at] = self.new()
            sequence.sent_entries = min(sequence.sent_entries, at)
            copies.append((old, sequence.table[at]))
        while len(sequence.table) < blocks_for(len(sequence.tokens), BLOCK):
            sequence.table.append(self.new())
        return copies
