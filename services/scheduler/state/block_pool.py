"""A `Ledger` gives out the blocks and slots of one executor. Its pool is a prefix cache of its own leavings.

            take ┌──────────────── empty ◀──────────────┐ no key
                 ▼                                       │
               held (refs > 0) ──release──▶ fenced ──acknowledge──▶ copying ──end_copy
                 ▲ ▲                          │          │ key
                 │ └──────────adopt───────────┘          ▼                   ┌── stored, or given up
                 └──────adopt, or take when nothing is empty──── cached ◀────┴── dirty

Every block is in exactly one of these states. A *key* names the tokens of a full block and all before
it (shared/kv_blocks.py). Empty blocks are given out first, then the least recently released cached
one, whose key is forgotten. Within a release the tail of a table goes first: a block without the
blocks before it is of no use, so heads must live longest.

A *fence* is the last step that may name a block: a step in flight may still read or write it, so an
unheld block waits until that step is acknowledged. A prefix hit may revive it meanwhile. A copy to or
from another tier is a fence, too: a block that is being copied is given to nobody else.

With `write_back` an unheld block with a key and without a copy below is *dirty*: it is given out only
once it has been copied, or somebody has judged that it is not worth it.

`BlockPool` has these states, `CopiedPool` adds the tiers below, `SettledPool` what they may take early, and
`Ledger` slots and promises.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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
    # keys evicted without a copy, oldest first
    lost: dict[bytes, None] = field(init=False, default_factory=dict)
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


@dataclass(kw_only=True)
class CopiedPool(BlockPool):
    """The pool as the tiers below see it: which blocks have copies there, and which are being copied.

    Clean blocks can be dropped for nothing, dirty ones cost a copy or a recompute. `dirty` lists them in the
    order in which they should be dealt with: the oldest release first, in it the tail of a table first.
    """

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

    def alone_with(self, tables: Iterable[Sequence[int]]) -> int:
        """How many blocks the holders of these tables hold without anybody else."""
        holds = Counter(block for table in tables for block in table)
        return sum(self._refs[block] == count for block, count in holds.items())

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


@dataclass(kw_only=True)
class SettledPool(CopiedPool):
    """Adds to the pool which fenced blocks a tier below may take before their fence is lifted.

    A fenced block is *settled* where what its key names was there before the steps that fence it: they read
    it, or write behind it. A copy of it is made while they run, so that it is free as soon as they are back.
    """

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


@dataclass(kw_only=True)
class Ledger(SettledPool):
    """The one place where the blocks and slots of an executor are given out. Block ids 0..blocks-1, slot ids
    0..slots-1.

    It adds to the pool what admission needs: slots, fenced like blocks, and *promises*. A promised block is
    free but spoken for, so `allocate` out of a promise never fails; `try_allocate` takes only what nobody was
    promised. A sequence that starts on cached blocks is promised those it lacks; the ones it adopts may stop
    being free by that (`free_taken_by`), which `can_admit` has to count too.
    """

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
