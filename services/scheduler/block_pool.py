"""The blocks of one executor and what they hold: a pool that is a prefix cache of its own leavings.

            take ┌──────────────── empty ◀──────────────┐ no key
                 ▼                                       │
               held (refs > 0) ──release──▶ fenced ──acknowledge──▶ copying ──end_copy
                 ▲ ▲                          │          │ key
                 │ └──────────adopt───────────┘          ▼                   ┌── stored, or given up
                 └──────adopt, or take when nothing is empty──── cached ◀────┴── dirty

Every block is in exactly one of these states. A *key* names the tokens of a full block and all before
it (shared/block_keys.py). Empty blocks are given out first, then the least recently released cached
one, whose key is forgotten. Within a release the tail of a table goes first: a block without the
blocks before it is of no use, so heads must live longest.

A *fence* is the last step that may name a block: a step in flight may still read or write it, so an
unheld block waits until that step is acknowledged. A prefix hit may revive it meanwhile. A copy to or
from another tier is a fence, too: a block that is being copied is given to nobody else.

With `write_back` an unheld block with a key and without a copy below is *dirty*: it is given out only
once it has been copied, or somebody has judged that it is not worth it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

MOST_LOST = 65_536  # keys: 10 MB


@dataclass(kw_only=True)
class BlockPool:
    """Block ids 0..blocks-1. Steps are acknowledged in order."""

    blocks: int
    acked_step: int = 0
    evicted: int = 0  # cached blocks that had to make room, since the start
    write_back: bool = False  # a tier below takes copies
    lost: dict[bytes, None] = field(
        init=False, default_factory=dict
    )  # keys evicted without a copy, oldest first
    _empty: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # next to evict first
    _fences: dict[int, dict[int, None]] = field(init=False, default_factory=dict)  # step -> its blocks
    _refs: list[int] = field(init=False)
    _last_step: list[int] = field(init=False)  # the last that may name the block, of all who held it
    _key_of: list[bytes | None] = field(init=False)
    _block_of: dict[bytes, int] = field(init=False, default_factory=dict)
    _dirty: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # oldest first
    clean: set[int] = field(init=False, default_factory=set)  # with a key that a tier below holds, too
    copies: dict[int, int] = field(init=False, default_factory=dict)  # block -> copies in flight
    _copying: dict[int, None] = field(init=False, default_factory=dict)  # unheld, unfenced ones of them
    _valid: dict[int, int] = field(init=False, default_factory=dict)  # partial blocks with a key: tokens
    _owner: list[tuple[int, int]] = field(init=False)  # who released it last, and where in its table it was

    def __post_init__(self) -> None:
        self._empty = list(range(self.blocks - 1, -1, -1))
        self._refs = [0] * self.blocks
        self._last_step = [0] * self.blocks
        self._key_of = [None] * self.blocks
        self._owner = [(0, 0)] * self.blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken now: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def cached_blocks(self) -> int:
        """Evictable blocks with a key."""
        return len(self._cached)

    @property
    def fenced_blocks(self) -> int:
        """Blocks that nobody holds and that a step in flight may still name."""
        return sum(len(fence) for fence in self._fences.values())

    @property
    def coming_blocks(self) -> int:
        """Unheld blocks that will be free without anybody's giving up anything: fenced, copied, or dirty."""
        return self.fenced_blocks + len(self._copying) + len(self._dirty)

    @property
    def held_blocks(self) -> int:
        return self.blocks - self.free_blocks - self.coming_blocks

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is known, whoever holds them. Changes nothing."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, key: bytes) -> int | None:
        """The block with this key."""
        return self._block_of.get(key)

    def free_taken_by(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` would no longer be free once adopted."""
        return sum(block in self._cached for block in blocks)

    def adopt(self, blocks: Sequence[int]) -> None:
        """One more hold on each block: held, fenced or cached. Raises KeyError for an empty one."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._home_of(block)[block]
            self._refs[block] += 1

    def register(self, block: int, key: bytes) -> bool:
        """Note that a held block has all its tokens. False when another block already has the key:
        this one stays without. Raises ValueError for a block that is not held or has another key."""
        self.register_all((block,), (key,))
        return self._key_of[block] == key

    def register_all(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """`register` each of the blocks."""
        refs, key_of, block_of = self._refs, self._key_of, self._block_of
        for block, key in zip(blocks, keys, strict=True):
            if not refs[block] or (key_of[block] is not None and key_of[block] != key):
                raise ValueError(f"block {block} cannot take a key: it is not held, or has another one")
            if block_of.setdefault(key, block) == block:
                key_of[block] = key

    def forget_cache(self) -> None:
        """No key is valid any more, neither of cached blocks nor of held or fenced ones."""
        self._block_of.clear()
        self.clean.clear()
        self._valid.clear()
        self._key_of = [None] * self.blocks
        self._empty += [*self._cached, *self._dirty]
        self._cached.clear()
        self._dirty.clear()

    def forget(self, block: int) -> None:
        """What a fenced, cached or dirty block holds is of no use any more."""
        if block in self._fences.get(self._last_step[block], ()):
            self._forget_keys((block,))
        for home in (self._cached, self._dirty):
            if block in home:
                del home[block]
                self._forget_keys((block,))
                self._empty.append(block)

    def acknowledge(self, step: int) -> None:
        """The executor has finished every step up to `step`."""
        self.acked_step = max(self.acked_step, step)
        for at in sorted(at for at in self._fences if at <= step):
            for block in self._fences.pop(at):
                self._give_back(block)

    def _take(self, count: int) -> list[int]:
        """Free blocks, each held once. Raises KeyError when there are not that many."""
        blocks = self._empty[: -count - 1 : -1]
        del self._empty[len(self._empty) - len(blocks) :]
        if len(blocks) < count:
            evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(blocks))]
            if self.write_back:
                _note_lost(self.lost, (self._key_of[b] for b in evicted if b not in self.clean))
            self._forget_keys(evicted)
            self.evicted += len(evicted)
            blocks += evicted
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def _release(self, blocks: Sequence[int], last_step: int) -> None:
        """Give up one hold on each block of a table; the last hold leaves it to its fence."""
        refs, last_steps = self._refs, self._last_step
        for block in reversed(blocks):
            refs[block] -= 1
            if last_steps[block] < last_step:
                last_steps[block] = last_step
            if not refs[block]:
                if last_steps[block] > self.acked_step:
                    self._fences.setdefault(last_steps[block], {})[block] = None
                else:
                    self._give_back(block)

    def _give_back(self, block: int) -> None:
        if block in self.copies:
            self._copying[block] = None
        elif self._key_of[block] is None:
            self._empty.append(block)
        elif self.write_back and block not in self.clean:
            self._dirty[block] = None
        else:
            self._cached[block] = None

    def _home_of(self, block: int) -> MutableMapping[int, None]:
        """Where an unheld block with a key is. Raises KeyError for an empty one."""
        fence = self._fences.get(self._last_step[block])
        if fence is not None and block in fence:
            return fence
        for home in (self._cached, self._dirty, self._copying):
            if block in home:
                return home
        raise KeyError(block)

    def _forget_keys(self, blocks: Sequence[int]) -> None:
        key_of, block_of = self._key_of, self._block_of
        for block in blocks:
            key, key_of[block] = key_of[block], None
            if key is not None:
                del block_of[key]
        self.clean.difference_update(blocks)
        for block in self._valid.keys() & blocks:
            del self._valid[block]


def _note_lost(lost: dict[bytes, None], keys: Iterable[bytes | None]) -> None:
    """Whoever asks for one of these keys shows what a copy would have been worth (as the ghost lists of ARC,
    Megiddo and Modha 2003)."""
    lost.update(dict.fromkeys(key for key in keys if key is not None))
    for key in list(islice(lost, max(len(lost) - MOST_LOST, 0))):
        del lost[key]
