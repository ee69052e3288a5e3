"""The tiers of a World: one FakeTier, the copies of its executors, and what is on its way between them.

    world = World(limits)
    world.add_engine(host="h")                 # ExecHello with host_id and bytes_per_block
    world.add_tier(FakeTier(capacity=8))       # OffloadReady; engines of that host map its arena
    world.copies["e1"]                         # KvCopy that wait: made when delivered, or by `make_copy`
    world.deliver_copy("e1", at=0)             # do it now, and hand KvCopied to the scheduler
    world.tier.replies                         # answers of kv_offload that wait
    world.deliver_tier(at=0)                   # hand one to the scheduler; time goes on if it waits for L2
    world.run()                                # results, copies and answers, until nothing moves
    world.lose_tier(); world.restart_tier()    # OffloadLost; OffloadReady with a new generation, L1 empty

A copy that is made late finds what the blocks and the arena hold by then, so that a block given out too
soon, or a lease ended too soon, changes tokens. What that cannot show is asserted, see `fence`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from support.executor.paged_engine import PagedEngine
from support.scheduler.fake_tier import FakeTier

from shared.messages import KvCommit, KvCopied, KvCopy, KvPrefetch, KvRelease, KvReserve, Message

SCHEDULER = "scheduler"


@dataclass
class Pending:
    """A copy whose KvCopied is not delivered; `done` is that, once it is made."""

    copy: KvCopy
    done: KvCopied | None = None


@dataclass
class TierSide:
    """See the top of this file."""

    name: str = "k1"
    host: str = "h"
    tier: FakeTier | None = None  # None: there is none, or it is dead
    kept: FakeTier | None = None  # the dead one: its L2 lives on
    copies: dict[str, deque[Pending]] = field(default_factory=dict)
    moved_blocks: int = 0
    orphans: set[int] = field(default_factory=set)  # stores of engines that have gone

    def engine_gone(self, name: str) -> None:
        """An engine has died, or is a new incarnation: what it was copying is not answered."""
        self.engine_dropped(name)
        self.copies.pop(name, None)

    def engine_dropped(self, name: str) -> None:
        """The scheduler has dropped an engine: it ignores the end of a store; the lease ends by itself."""
        self.orphans |= {one.copy.job for one in self.copies.get(name, ()) if one.copy.to_arena}

    def take(self, message: Message, now_us: int) -> None:
        """A command of the scheduler for kv_offload. To a dead one it is lost."""
        match message:
            case KvRelease(jobs=jobs):
                self._assert_no_copy(set(jobs))
            case KvCommit(job=job):
                self._assert_no_copy({job})
            case KvReserve(keys=keys, value_bytes=size) if self.tier is not None:
                assert size == self.tier.value_bytes
                assert len(keys) <= 32 * 1_024
            case KvPrefetch(lease_us=lease_us, deadline_us=deadline_us):
                assert lease_us > 0
                assert deadline_us > 0
        if self.tier is not None:
            self.tier.handle(SCHEDULER, message, now_us)

    def fence(
        self, copy: KvCopy, engine: PagedEngine, name: str, steps: dict[int, tuple[set[int], ...]]
    ) -> None:
        """What must hold when a copy is sent. `steps` are those whose results are undelivered: the blocks
        that each names, those that it writes, and those that it copies for forks before.

        A load writes blocks that no such step names, no table holds, and no other copy touches. A store reads
        blocks after the last step that writes them, and no load in flight fills them."""
        blocks = set(copy.blocks)
        assert len(blocks) == len(copy.blocks) == len(copy.offsets) > 0
        assert copy.block_bytes == engine.hello.bytes_per_block
        assert all(offset >= 0 for offset in copy.offsets)
        assert all(0 <= block < engine.hello.blocks for block in blocks)
        for other in (pending.copy for pending in self.copies[name]):
            assert other.job != copy.job, "two copies of one job"
            if not (copy.to_arena and other.to_arena):
                assert blocks.isdisjoint(other.blocks), "two copies of a block, and one of them writes it"
        if not copy.to_arena:
            for step, (named, _, sources) in steps.items():
                assert blocks.isdisjoint(named), f"a load writes a block that step {step} names"
                early = step > copy.after_step and not blocks.isdisjoint(sources)
                assert not early, f"a load writes a block that step {step} copies"
            for slot, state in engine.slots.items():
                assert blocks.isdisjoint(state.table), f"a load writes a block in the table of slot {slot}"
            return
        assert copy.after_step <= engine.step, "a store waits for a step that was never planned"
        for step, (_, written, _) in steps.items():
            late = blocks & written and step > copy.after_step
            assert not late, f"a store reads a block that step {step} is still to write"

    def planned(self, name: str, named: set[int], written: set[int]) -> None:
        """What must hold when a step is planned, of the copies that are not answered."""
        for pending in self.copies.get(name, ()):
            copy = pending.copy
            if copy.to_arena:
                assert written.isdisjoint(copy.blocks), "a step writes a block that a store still reads"
            else:
                assert named.isdisjoint(copy.blocks), "a step names a block that a load still writes"

    def _assert_no_copy(self, jobs: set[int]) -> None:
        for waiting in self.copies.values():
            for pending in waiting:
                assert pending.copy.job not in jobs, "a lease is given up while its copy is under way"
