"""`BlockPool` gives out the KV blocks and the slots of one executor, and is its prefix cache.

Admission, the step planner, preemption and the KV tiers call it, all through `Executor.pool`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

MOST_LOST = 65_536  # keys: 10 MB
KEPT_AT_ONCE = 256  # kept blocks whose time is looked at in one call

Owner = tuple[int, int, str, int]  # a sequence, the index in its table, its tenant, the length of the table


@dataclass(kw_only=True)
class BlockPool:
    """Block ids 0..blocks-1, slot ids 0..slots-1. Each block is in one of six states:

        empty ──allocate──▶ held ──release──▶ fenced ──acknowledge──▶ given back
                             ▲ ▲                 │
                             │ └──────adopt──────┴── copying, dirty, cached
                             └─allocate, if no block is empty── cached

        given back ─▶ copying  if a copy is in flight         ──end_copy──▶ given back
                   ─▶ empty    if it has no key
                   ─▶ dirty    if a tier should copy it first ──begin_copy──▶ copying
                                                              ──mark_clean, fail_all──▶ cached
                   ─▶ cached   otherwise                      ──begin_copy──▶ copying
                                                              ──mark_lost_below──▶ dirty
        dirty, cached ──forget──▶ empty

    held     At least one sequence has it in its table; `refs` counts the tables.
    fenced   No table has it, but a step in flight may read or write it: its fence is the last such step. It
             is *stable* if its keyed tokens were complete before the steps in flight; they only read it or
             append after them. A tier may copy a stable block while these steps run.
    copying  No table has it and no step names it, but a copy to or from a tier reads or writes it.
    dirty    It has a key, and no tier has a copy. It waits for a copy, or for the decision against one. The
             policy judges them in rounds, a part at each call (`judge`): those of this round are `_judged`.
    cached   It has a key and can be evicted. It is *clean* if a tier has a copy, too.

    Empty and cached blocks are *free*. Empty ones are given out first, then cached ones: the *spent* ones,
    not worth a copy, then the least recently released, last the *kept* ones, for which a client has asked;
    their keys are forgotten. The last block of a table is
    evicted first: a block is of no use without those before it. A key names the tokens of a full block and
    all before it (shared/kv_blocks.py), or those of a partial block at the end of a preempted sequence
    (`valid_tokens`).

    A reservation is a number of free blocks that a sequence will need. `allocate` takes from a reservation
    and never fails; `try_allocate` leaves reserved blocks alone. A reservation names no block: each cached
    block that a sequence adopts is one free block less for others (`free_taken_by`).

    Invariants, which `check` verifies: a block is in one state; a key has one block, and an empty block no
    key; a free block is not copied; a stable block is fenced; a fence is a step that is not acknowledged;
    0 <= reserved <= free_blocks. Steps are acknowledged in order.
    """

    blocks: int
    slots: int
    block_tokens: int
    reserved: int = 0  # blocks
    copied_blocks: int = 0  # unheld ones with a copy in flight: copying ones, and fenced ones
    acked_step: int = 0
    evicted: int = 0  # cached blocks that were given out, since the start
    write_back: bool = False  # a tier below takes copies
    refs: list[int] = field(init=False)  # block -> tables that have it
    key_of: list[bytes | None] = field(init=False)
    block_of: dict[bytes, int] = field(init=False, default_factory=dict)
    valid_tokens: dict[int, int] = field(init=False, default_factory=dict)  # of partial blocks with a key
    owner_of: list[Owner] = field(init=False)  # of its last release
    clean: set[int] = field(init=False, default_factory=set)  # a tier below holds the content, too
    copies: dict[int, int] = field(init=False, default_factory=dict)  # block -> copies in flight
    kept_until_us: dict[int, int] = field(init=False, default_factory=dict)  # in any state with a key
    lost: dict[bytes, None] = field(init=False, default_factory=dict)  # evicted without a copy, oldest first
    _empty: list[int] = field(init=False)  # a stack
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # next to evict first
    _spent: OrderedDict[int, None] = field(
        init=False, default_factory=OrderedDict
    )  # cached: before all others
    _kept: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # cached: after all others
    _dirty: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # oldest release first
    _judged: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # dirty, and older
    _copying: dict[int, None] = field(init=False, default_factory=dict)
    _fences: dict[int, dict[int, None]] = field(init=False, default_factory=dict)  # step -> its blocks
    _stable: dict[int, None] = field(init=False, default_factory=dict)  # fenced: the last of a table first
    _last_step: list[int] = field(init=False)  # block -> the last step that may name it
    free_slots: list[int] = field(init=False)  # a stack
    _slot_fences: dict[int, list[int]] = field(init=False, default_factory=dict)  # step -> its slots

    def __post_init__(self) -> None:
        self._empty = list(range(self.blocks - 1, -1, -1))
        self.free_slots = list(range(self.slots - 1, -1, -1))
        self.refs = [0] * self.blocks
        self.key_of = [None] * self.blocks
        self.owner_of = [(0, 0, "", 1)] * self.blocks
        self._last_step = [0] * self.blocks

    # How many blocks and slots are in which state

    @property
    def free_blocks(self) -> int:
        """Blocks that can be given out now: empty and cached ones."""
        return len(self._empty) + len(self._cached) + len(self._spent) + len(self._kept)

    @property
    def room(self) -> tuple[int, int, int]:
        """Free blocks, how many of them are reserved, and free slots."""
        free = len(self._empty) + len(self._cached) + len(self._spent) + len(self._kept)
        return free, self.reserved, len(self.free_slots)

    @property
    def unreserved_blocks(self) -> int:
        """Free blocks that are not reserved."""
        return len(self._empty) + len(self._cached) + len(self._spent) + len(self._kept) - self.reserved

    @property
    def cached_blocks(self) -> int:
        """Without spent ones: what is free beyond these is of hardly any use to others."""
        return len(self._cached) + len(self._kept)

    @property
    def dirty_blocks(self) -> int:
        return len(self._judged) + len(self._dirty)

    @property
    def dirty(self) -> Iterator[int]:
        """Dirty blocks, the oldest release first."""
        return chain(self._judged, self._dirty)

    @property
    def stable_blocks(self) -> int:
        """Fenced blocks that a tier may copy now."""
        return len(self._stable)

    @property
    def stable(self) -> Iterator[int]:
        """The stable blocks that have a key."""
        return (block for block in self._stable if self.key_of[block] is not None)

    @property
    def copying_blocks(self) -> int:
        return len(self._copying)

    @property
    def fenced_blocks(self) -> int:
        return sum([len(fence) for fence in self._fences.values()])

    @property
    def coming_blocks(self) -> int:
        """Blocks that become free without a preemption: fenced, copying and dirty ones."""
        return self.fenced_blocks + len(self._copying) + self.dirty_blocks

    @property
    def held_blocks(self) -> int:
        return self.blocks - self.free_blocks - self.coming_blocks

    @property
    def fenced_slots(self) -> int:
        """Slots that a step in flight may still name."""
        return sum([len(slots) for slots in self._slot_fences.values()])

    # A sequence is admitted: reservations, prefix hits, a slot

    def reserve(self, blocks: int) -> None:
        """Reserve free blocks. The caller has compared with `unreserved_blocks`."""
        self.reserved += blocks

    def unreserve(self, blocks: int) -> None:
        """Give a reservation back, or a part of one."""
        self.reserved -= blocks

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `keys`, in any state."""
        found = []
        for key in keys:
            block = self.block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def free_taken_by(self, blocks: Sequence[int]) -> int:
        """How many free blocks `adopt` would take."""
        cached, spent, kept = self._cached, self._spent, self._kept
        return sum(block in cached or block in spent or block in kept for block in blocks)

    def adopt(self, blocks: Sequence[int]) -> None:
        """One more table has these blocks. Raises KeyError for an empty one."""
        refs = self.refs
        for block in blocks:
            if not refs[block]:
                fence = self._fences.get(self._last_step[block], {})
                self.copied_blocks -= block in self.copies
                dirty = self._dirty, self._judged
                for state in (fence, self._cached, *dirty, self._spent, self._kept, self._copying):
                    if block in state:
                        del state[block]
                        break
                else:
                    raise KeyError(block)
                self._stable.pop(block, None)
            refs[block] += 1

    def writable(self, key: bytes) -> int | None:
        """The block with this key, if no table has it, no step in flight names it and no copy uses it."""
        block = self.block_of.get(key)
        if block is None or self.refs[block] or block in self.copies:
            return None
        return None if self._last_step[block] > self.acked_step else block

    def claim(self, block: int) -> None:
        """Adopt a `writable` block to append to it: it loses its key."""
        self.adopt((block,))
        self._forget_keys((block,))

    def take_slot(self) -> int:
        return self.free_slots.pop()

    # A sequence grows: blocks, and keys for those that are full

    def allocate(self, count: int) -> list[int]:
        """Blocks from a reservation."""
        self.reserved -= count
        return self._take(count)

    def try_allocate(self, count: int = 1, reserved: int = 0) -> list[int] | None:
        """Blocks, `reserved` of them from reservations. None if too few of the others are free."""
        if self.unreserved_blocks < count - reserved:
            return None
        self.reserved -= reserved
        return self._take(count)

    def register(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Each of these held blocks has all its tokens. It stays without a key if another block has that key.
        Raises ValueError for a block that is not held or has a different key."""
        refs, key_of, block_of = self.refs, self.key_of, self.block_of
        for block, key in zip(blocks, keys, strict=True):
            if not refs[block] or (key_of[block] is not None and key_of[block] != key):
                raise ValueError(f"block {block} cannot take a key: it is not held, or has another one")
            if block_of.setdefault(key, block) == block:
                key_of[block] = key

    def register_tail(self, block: int, key: bytes, valid_tokens: int) -> None:
        """This held block without a key has the last tokens of a sequence that is about to be preempted."""
        self.register((block,), (key,))
        if self.key_of[block] == key:
            self.valid_tokens[block] = valid_tokens

    def held_only_by(self, tables: Iterable[Sequence[int]]) -> int:
        """How many blocks these tables have and no other: what their release would free."""
        holds = Counter(chain.from_iterable(tables))
        return sum(self.refs[block] == count for block, count in holds.items())

    # A sequence ends or is preempted, and the steps in flight come back

    def release(
        self, table: Sequence[int], slots: Sequence[int], last_step: int, seq: int = 0, tenant: str = ""
    ) -> None:
        """Sequence `seq` of `tenant` gives up its table and slots; steps up to `last_step` may name them."""
        refs, last_steps = self.refs, self._last_step
        if self.write_back:  # only tiers use the owners
            length = len(table)
            for at, block in enumerate(table):
                self.owner_of[block] = (seq, at, tenant, length)
        for block in reversed(table):
            refs[block] -= 1
            if last_steps[block] < last_step:
                last_steps[block] = last_step
            if not refs[block]:
                self.copied_blocks += block in self.copies
                if last_steps[block] > self.acked_step:
                    self._fences.setdefault(last_steps[block], {})[block] = None
                else:
                    self._give_back(block)
        if last_step > self.acked_step:
            self._slot_fences.setdefault(last_step, []).extend(slots)
        else:
            self.free_slots.extend(slots)

    def mark_stable(self, table: Sequence[int]) -> None:
        """Acknowledged steps have computed all keyed tokens of these blocks, which were just released."""
        if self.write_back:
            for block in reversed(table):
                fenced = not self.refs[block] and self._last_step[block] > self.acked_step
                if fenced and self.key_of[block] and block not in self.clean and block not in self.copies:
                    self._stable[block] = None

    def acknowledge(self, step: int) -> None:
        """The executor has finished every step up to `step`."""
        self.acked_step = max(self.acked_step, step)
        for at in sorted(at for at in self._fences if at <= step):
            for block in self._fences.pop(at):
                self._give_back(block)
        for at in sorted(at for at in self._slot_fences if at <= step):
            self.free_slots.extend(self._slot_fences.pop(at))

    # A tier below copies blocks

    def set_tier(self, present: bool) -> None:
        """A tier comes, and holds nothing, or the tier goes. Free blocks stay free: they may be reserved."""
        self.write_back = present
        self.clean.clear()
        self._stable.clear()
        for dirty in (self._judged, self._dirty):
            for block in dirty:
                _cache(self, block)
            dirty.clear()

    def judge(self) -> Iterator[int]:
        """Dirty blocks that the policy has not judged in this round, each of which counts as judged once the
        caller has it. A new round begins if none is left."""
        if not self._dirty:
            self._dirty, self._judged = self._judged, self._dirty
        while self._dirty:
            block, _ = self._dirty.popitem(last=False)
            self._judged[block] = None
            yield block

    def begin_copy(self, blocks: Sequence[int]) -> None:
        """A copy reads or writes these blocks: they are not given out before `end_copy`."""
        for block in blocks:
            self.copied_blocks += not self.refs[block] and block not in self.copies
            self.copies[block] = self.copies.get(block, 0) + 1
            self._stable.pop(block, None)
            for state in (self._dirty, self._judged, self._cached, self._spent, self._kept):
                if block in state:
                    del state[block]
                    self._copying[block] = None

    def end_copy(self, blocks: Iterable[int]) -> None:
        """The copy has ended."""
        for block in blocks:
            self.copies[block] -= 1
            if not self.copies[block]:
                del self.copies[block]
                self.copied_blocks -= not self.refs[block]
                if block in self._copying:
                    del self._copying[block]
                    self._give_back(block)

    def mark_clean(self, block: int, key: bytes, *, filled: bool = False) -> None:
        """A tier holds the content of this key: the block is clean, if it still has the key. `filled`: a copy
        from the tier has filled it, and it takes the key, unless another block has it."""
        if filled and self.block_of.setdefault(key, block) == block:
            self.key_of[block] = key
        if self.key_of[block] == key and self.write_back:
            self.clean.add(block)
            self.give_up(block)

    def mark_lost_below(self, keys: Iterable[bytes], most_dirty: int) -> None:
        """No tier holds these keys any more. At most `most_dirty` of their cached blocks become dirty again:
        the others may be reserved."""
        for key in keys:
            block = self.block_of.get(key)
            if block is not None and block in self.clean:
                self.clean.discard(block)
                for state in (self._cached, self._kept) if most_dirty > 0 and self.write_back else ():
                    if block in state:
                        del state[block]
                        self._dirty[block] = None
                        most_dirty -= 1

    def give_up(self, block: int, *, spent: bool = False) -> bool:
        """A dirty block is cached without a copy: the last to be evicted, or with `spent` the first. False if
        it is not dirty."""
        for dirty in (self._judged, self._dirty):
            if block in dirty:
                del dirty[block]
                _cache(self, block, spent=spent)
                return True
        return False

    # Content is forgotten

    def forget(self, block: int) -> None:
        """The content of a fenced, cached or dirty block is of no use any more."""
        if block in self._fences.get(self._last_step[block], ()):
            self._forget_keys((block,))
        for state in (self._cached, self._dirty, self._judged, self._spent, self._kept):
            if block in state:
                del state[block]
                self._forget_keys((block,))
                self._empty.append(block)

    def forget_cache(self) -> None:
        """No key is valid any more, in any state of its block."""
        self.block_of.clear()
        self.clean.clear()
        self.valid_tokens.clear()
        self.key_of = [None] * self.blocks
        self.kept_until_us.clear()
        for state in (self._cached, self._judged, self._dirty, self._spent, self._kept):
            self._empty += state
            state.clear()

    # Steps of the chart that several methods share

    def _take(self, count: int) -> list[int]:
        """Free blocks, each held once. Raises KeyError when there are too few."""
        blocks = self._empty[: -count - 1 : -1]
        del self._empty[len(self._empty) - len(blocks) :]
        if len(blocks) < count:
            more = range(count - len(blocks))
            evicted = [(self._spent or self._cached or self._kept).popitem(last=False)[0] for _ in more]
            if self.write_back:
                _note_lost(self.lost, (self.key_of[b] for b in evicted if b not in self.clean))
            self._forget_keys(evicted)
            self.evicted += len(evicted)
            blocks += evicted
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def _give_back(self, block: int) -> None:
        """No sequence holds the block and no step names it."""
        self._stable.pop(block, None)
        if block in self.copies:
            self._copying[block] = None
        elif self.key_of[block] is None:
            self._empty.append(block)
        elif self.write_back and block not in self.clean:
            self._dirty[block] = None
        else:
            _cache(self, block)

    def _forget_keys(self, blocks: Sequence[int]) -> None:
        key_of, block_of = self.key_of, self.block_of
        for block in blocks:
            key, key_of[block] = key_of[block], None
            if key is not None:
                del block_of[key]
        self.clean.difference_update(blocks)
        for of in (self.valid_tokens, self.kept_until_us):
            for block in of.keys() & blocks:
                del of[block]

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        dirty = set(self._dirty) | set(self._judged)
        empty, cached = set(self._empty), {*self._cached, *self._spent, *self._kept, *dirty}
        held = {block for block, refs in enumerate(self.refs) if refs > 0}
        fenced = [block for fence in self._fences.values() for block in fence]
        slots = [*self.free_slots, *(slot for fence in self._slot_fences.values() for slot in fence)]
        known = {key: block for block, key in enumerate(self.key_of) if key is not None}
        assert min(self.refs, default=0) >= 0, "a block was released twice"
        assert len(empty) == len(self._empty), "a block is free twice"
        assert len(set(slots)) == len(slots), "a slot is free twice"
        copying = set(self._copying)
        states = self.free_blocks + self.dirty_blocks + len(held) + len(fenced) + len(copying)
        assert len(empty | cached | held | set(fenced) | copying) == states, "a block is in two states"
        assert states == self.blocks, "a block is lost"
        assert known == self.block_of, "a key and its block do not name each other"
        assert not empty & set(known.values()), "an empty block has a key"
        assert cached <= set(known.values()), "a cached block has no key"
        assert copying <= set(self.copies), "a block waits for a copy that is over"
        assert not (empty | cached) & set(self.copies), "a block is free while it is copied"
        assert self.clean <= set(known.values()), "a block without a key has a copy"
        assert set(self._kept) <= set(self.kept_until_us) <= set(known.values()), (
            "a block is kept for no reason"
        )
        assert not set(self.kept_until_us) & {*self._cached, *self._spent}, "a kept block ranks as others"
        unheld = [block for block in self.copies if not self.refs[block]]
        assert self.copied_blocks == len(unheld), "an unheld block with a copy is not counted"
        assert not self.clean & dirty, "a block is clean and dirty"
        assert self.write_back or not dirty, "a block waits for a tier that is not there"
        assert set(self._stable) <= set(fenced), "a stable block is not fenced"
        assert all(step > self.acked_step for step in self._fences), "a fence outlived its step"
        assert 0 <= self.reserved <= self.free_blocks, "more is reserved than is free"


def _note_lost(lost: dict[bytes, None], keys: Iterable[bytes | None]) -> None:
    """A later lookup of one of these keys shows what a copy would have been worth (as the ghost lists of ARC,
    Megiddo and Modha 2003)."""
    lost.update(dict.fromkeys(key for key in keys if key is not None))
    for key in list(islice(lost, max(len(lost) - MOST_LOST, 0))):
        del lost[key]


def keep(pool: BlockPool, keys: Sequence[bytes], until_us: int) -> None:
    """The blocks of a chain are evicted after all others until then, the last one first."""
    for key in reversed(keys):
        if (block := pool.block_of.get(key)) is not None:
            is_new = block not in pool.kept_until_us
            pool.kept_until_us[block] = max(until_us, pool.kept_until_us.get(block, 0))
            if is_new:
                _rank(pool, block)


def end_kept(pool: BlockPool, now_us: int) -> None:
    """Kept blocks whose time is over rank as others: the next KEPT_AT_ONCE are looked at."""
    for block in list(islice(pool.kept_until_us, KEPT_AT_ONCE)):
        until_us = pool.kept_until_us.pop(block)
        if until_us > now_us:
            pool.kept_until_us[block] = until_us  # the last to look at again
        else:
            _rank(pool, block)


def _rank(pool: BlockPool, block: int) -> None:
    """A block that is kept now, or no longer, moves among the cached ones."""
    for state in (pool._cached, pool._spent, pool._kept):
        if block in state:
            del state[block]
            _cache(pool, block)
            return


def _cache(pool: BlockPool, block: int, *, spent: bool = False) -> None:
    """The block is cached from now on."""
    state = pool._kept if block in pool.kept_until_us else pool._spent if spent else pool._cached
    state[block] = None
