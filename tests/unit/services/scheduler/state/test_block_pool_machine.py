"""The block pool against a model of lists and scans: any order of admissions, hits, growth, forks, copy jobs,
ends, acknowledgements early and late, and failed steps. `HYPOTHESIS_PROFILE=soak` runs many more."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.state.block_pool import BlockPool

PATHS = st.lists(st.integers(0, 1), max_size=5).map(bytes)


def key_of(path: bytes) -> bytes:
    """A block's key stands for all tokens up to its end: here a path in a binary tree."""
    return b"root" + path


@dataclass
class Holder:
    """A sequence, or a copy job without a slot: the blocks it holds, and what they are to contain."""

    slot: int = -1
    table: list[int] = field(default_factory=list)
    promise: int = 0
    path: bytes = b""
    named: int = 0  # blocks of the table that it has registered or adopted


@dataclass
class Model:
    """Every block is held by the holders that list it, or waits in `fenced`, or is in `order`: free, the
    next to be evicted first. Whether a free block is cached is whether it has a key."""

    order: list[int]
    holders: list[Holder] = field(default_factory=list)
    fenced: list[int] = field(default_factory=list)
    keys: dict[int, bytes] = field(default_factory=dict)
    last_step: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)  # fenced slot -> last step
    acked: int = 0

    def held(self) -> set[int]:
        return {block for holder in self.holders for block in holder.table}

    def cached(self) -> list[int]:
        return [block for block in self.order if block in self.keys]

    def promised(self) -> int:
        return sum(holder.promise for holder in self.holders)

    def find(self, path: bytes) -> int | None:
        found = [block for block, key in self.keys.items() if key == key_of(path)]
        assert len(found) <= 1
        return found[0] if found else None

    def match(self, path: bytes) -> list[int]:
        found = [self.find(path[: i + 1]) for i in range(len(path))]
        end = found.index(None) if None in found else len(found)
        return [block for block in found[:end] if block is not None]

    def given_out(self, block: int) -> None:
        """The pool gave out `block`: it had to be an empty one, or else the first in order."""
        empty = set(self.order) - set(self.cached())
        assert block in empty if empty else block == self.order[0]
        self.order.remove(block)
        self.keys.pop(block, None)

    def hold(self, holder: Holder, block: int) -> None:
        holder.table.append(block)
        self.order = [b for b in self.order if b != block]
        self.fenced = [b for b in self.fenced if b != block]

    def drop(self, holder: Holder, last_step: int) -> None:
        self.holders = [other for other in self.holders if other is not holder]
        for block in reversed(holder.table):
            self.last_step[block] = max(self.last_step.get(block, 0), last_step)
            if block not in self.held():
                self.fenced.append(block)
        if holder.slot >= 0:
            self.slots[holder.slot] = last_step
        self.acknowledge(self.acked)

    def acknowledge(self, step: int) -> None:
        self.acked = step
        due = [block for block in self.fenced if self.last_step[block] <= step]
        self.fenced = [block for block in self.fenced if block not in due]
        self.order += sorted(due, key=lambda block: self.last_step[block])
        self.slots = {slot: last for slot, last in self.slots.items() if last > step}


class PoolAgainstModel(RuleBasedStateMachine):
    """Drives both and compares every answer."""

    @initialize(blocks=st.integers(1, 12), slots=st.integers(2, 5))
    def start(self, blocks: int, slots: int) -> None:
        self.pool = BlockPool(blocks=blocks, slots=slots, block_tokens=4)
        self.model = Model(list(range(blocks)))
        self.step = 0
        self.evicted = 0

    def sequences(self) -> list[Holder]:
        return [holder for holder in self.model.holders if holder.slot >= 0]

    def taken(self, holder: Holder, block: int) -> None:
        self.evicted += set(self.model.order) == set(self.model.cached())
        self.model.given_out(block)
        self.model.hold(holder, block)

    def admit(self, path: bytes, more: int) -> Holder | None:
        """A sequence that is promised what it will need beyond its prefix hit, if that fits."""
        model, pool = self.model, self.pool
        hits = pool.match([key_of(path[: i + 1]) for i in range(len(path))])
        assert hits == model.match(path)
        taken = len(set(hits) & set(model.order))
        assert pool.free_taken_by(hits) == taken
        promise = len(path) - len(hits) + more
        room = len(model.order) - model.promised()
        assert pool.unreserved_blocks == room
        if promise > room - taken or not pool.free_slots:
            return None
        pool.adopt(hits)
        pool.reserve(promise)
        slot = pool.take_slot()
        assert slot not in [holder.slot for holder in model.holders]
        assert slot not in model.slots
        holder = Holder(slot, promise=promise, path=path, named=len(hits))
        model.holders.append(holder)
        for block in hits:
            model.hold(holder, block)
        return holder

    @rule(path=PATHS, more=st.integers(0, 3))
    def open(self, path: bytes, more: int) -> None:
        self.admit(path, more)

    @rule(path=PATHS, twins=st.booleans())
    def prefill(self, path: bytes, twins: bool) -> None:
        """Whole prompts in one step: equal ones that come together do not find each other's blocks."""
        admitted = [self.admit(path, 1) for _ in range(1 + twins)]
        for holder in [holder for holder in admitted if holder is not None]:
            self.grow(holder, len(path) - holder.named)
            self.name(holder, len(path))
        self.step += 1

    @precondition(lambda self: self.model.promised())
    @rule(data=st.data(), blocks=st.integers(1, 4))
    def decode(self, data: st.DataObject, blocks: int) -> None:
        promised = [holder for holder in self.sequences() if holder.promise]
        self.grow(data.draw(st.sampled_from(promised)), blocks)

    def grow(self, holder: Holder, blocks: int) -> None:
        for _ in range(min(blocks, holder.promise)):
            (block,) = self.pool.allocate(1)
            self.taken(holder, block)
            holder.promise -= 1

    @precondition(lambda self: self.sequences())
    @rule(data=st.data())
    def grow_on_demand(self, data: st.DataObject) -> None:
        room = len(self.model.order) > self.model.promised()
        found = self.pool.try_allocate()
        assert (found is not None) == room
        for block in found or ():
            self.taken(data.draw(st.sampled_from(self.sequences())), block)

    @precondition(lambda self: any(s.named < min(len(s.table), len(s.path)) for s in self.sequences()))
    @rule(data=st.data(), blocks=st.integers(1, 6))
    def register(self, data: st.DataObject, blocks: int) -> None:
        unnamed = [s for s in self.sequences() if s.named < min(len(s.table), len(s.path))]
        self.name(data.draw(st.sampled_from(unnamed)), blocks)

    def name(self, holder: Holder, blocks: int) -> None:
        for at in range(holder.named, min(len(holder.table), len(holder.path), holder.named + blocks)):
            block, path = holder.table[at], holder.path[: at + 1]
            first = self.model.find(path) in (None, block)
            self.pool.register([block], [key_of(path)])
            assert (self.pool.key_of[block] == key_of(path)) == first
            if first:
                self.model.keys[block] = key_of(path)
            holder.named = at + 1

    @precondition(lambda self: self.model.keys)
    @rule(data=st.data())
    def begin_copy(self, data: st.DataObject) -> None:
        """A copy job holds one cached block, unless the block has been promised."""
        block = data.draw(st.sampled_from(sorted(self.model.keys)))
        if block not in self.model.order or len(self.model.order) > self.model.promised():
            self.pool.adopt([block])
            self.model.holders.append(Holder())
            self.model.hold(self.model.holders[-1], block)

    @precondition(lambda self: len(self.sequences()) > 1)
    @rule(data=st.data(), blocks=st.integers(1, 3))
    def fork(self, data: st.DataObject, blocks: int) -> None:
        """A follower with an empty table takes the leader's first blocks."""
        leader, follower = data.draw(st.permutations(self.sequences()))[:2]
        if not follower.table:
            for block in leader.table[:blocks]:
                self.pool.adopt([block])
                self.model.hold(follower, block)
            follower.path, follower.named = leader.path, min(len(follower.table), leader.named)

    @rule()
    def plan(self) -> None:
        self.step += 1

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data(), ago=st.integers(0, 3))
    def end(self, data: st.DataObject, ago: int) -> None:
        """A sequence or a copy job ends; it may not have been in the latest steps."""
        self.let_go(data.draw(st.sampled_from(self.model.holders)), max(self.step - ago, 0))

    @precondition(lambda self: self.sequences())
    @rule(data=st.data(), turn=PATHS)
    def next_turn(self, data: st.DataObject, turn: bytes) -> None:
        """A sequence ends, and its own blocks are asked for while a step in flight still names them."""
        holder = data.draw(st.sampled_from(self.sequences()))
        self.let_go(holder, self.step)
        self.prefill((holder.path + turn)[:6], False)

    def let_go(self, holder: Holder, last_step: int) -> None:
        self.pool.unreserve(holder.promise)
        self.pool.release(holder.table, [holder.slot] if holder.slot >= 0 else [], last_step)
        self.model.drop(holder, last_step)

    @precondition(lambda self: self.model.acked < self.step)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.model.acked + 1, self.step))
        self.pool.acknowledge(step)
        self.model.acknowledge(step)

    @rule(ago=st.integers(0, 3))
    def acknowledge_again(self, ago: int) -> None:
        self.pool.acknowledge(max(self.model.acked - ago, 0))

    @precondition(lambda self: self.model.keys)
    @rule(dice=st.integers(1, 8))
    def forget(self, dice: int) -> None:
        """A step failed. Not too often, or nothing would stay cached."""
        if dice == 8:
            self.pool.forget_cache()
            self.model.keys.clear()

    @rule(path=PATHS)
    def look_up(self, path: bytes) -> None:
        assert self.pool.block_of.get(key_of(path)) == self.model.find(path)
        assert (self.pool.block_of.get(key_of(path)) is None) == (self.model.find(path) is None)

    @invariant()
    def agrees(self) -> None:
        pool, model = self.pool, self.model
        pool.check()
        assert pool.acked_step == model.acked
        assert pool.reserved == model.promised()
        assert pool.free_blocks == len(model.order)
        assert pool.cached_blocks == len(model.cached())
        assert pool.held_blocks == len(model.held())
        assert pool.fenced_blocks == len(model.fenced)
        assert len(pool.free_slots) == pool.slots - len(self.sequences()) - len(model.slots)
        assert pool.fenced_slots == len(model.slots)
        assert pool.evicted == self.evicted

    def teardown(self) -> None:
        """When all have ended every block is free, and comes out in the order of the model."""
        if not hasattr(self, "pool"):
            return
        for holder in list(self.model.holders):
            self.let_go(holder, self.step)
        self.pool.acknowledge(self.step)
        self.model.acknowledge(self.step)
        self.agrees()
        assert self.pool.free_blocks == self.pool.blocks
        last = Holder()
        for block in self.pool.try_allocate(self.pool.blocks) or ():
            self.taken(last, block)
        assert sorted(last.table) == list(range(self.pool.blocks))


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=max(100, settings.default.max_examples), stateful_step_count=60
)
