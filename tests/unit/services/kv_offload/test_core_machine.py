"""The core of kv_offload against a model: any order of lookups, stores, loads, releases, expiries, restarts
of schedulers, deaths of executors, late writes, and answers of L2, true, late, lost, damaged or none.

The memory of this world remembers whose bytes lie where, so a range given out twice, a pinned value that
was evicted, or a block that is readable without a commit shows as wrong bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.kv_offload.world import EXECUTOR, PAGE, PRINT, SCHEDULER, SECOND, World, key

from services.kv_offload.events import L2Probe, Name, PeerLost, PeerSeen, Restarted
from services.kv_offload.jobs import lookup_us
from services.kv_offload.l2.dispatch import IN_FLIGHT
from shared.messages import (
    ArenaReleased,
    KvCommit,
    KvFound,
    KvGone,
    KvReady,
    KvRelease,
    KvStored,
    Message,
    ints,
)

NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)
LEASE_US = st.sampled_from([0, 1_000, 30_000, 30_000, 2 * SECOND])


@dataclass
class Write:
    """A reservation as the scheduler sees it."""

    names: list[Name]
    offsets: list[int]
    until_us: int
    urgent: bool
    epoch: int
    over: bool = False  # expired, or of a dead incarnation: its ranges may be written, never read


@dataclass
class Read:
    """A lease as the scheduler sees it."""

    names: list[Name]
    offsets: list[int]
    until_us: int


class Tiers(RuleBasedStateMachine):
    """Drives the core; the model decides what may be."""

    @initialize(blocks=st.sampled_from([4, 10, 20]), l2=st.booleans())
    def start(self, blocks: int, l2: bool) -> None:
        self.world = World(blocks, l2)
        self.world.handle(PeerSeen(EXECUTOR, 1))
        self.executor_epoch = 1
        self.jobs = 0
        self.committed: set[Name] = set()  # ever written, so ever readable
        self.writes: dict[int, Write] = {}
        self.reads: dict[int, Read] = {}
        self.lookups: dict[int, int] = {}  # job -> answer due
        self.loads: dict[int, tuple[list[Name], int, int]] = {}  # job -> names, answer due, lease

    def job(self) -> int:
        self.jobs += 1
        return self.jobs

    # ---- messages of the core ---------------------------------------------------------------------

    def observe(self, messages: list[Message]) -> None:
        for message in messages:
            match message:
                case KvFound(job=job, tiers=tiers):
                    del self.lookups[job]
                    assert set(tiers) <= {0, 1, 2}
                case KvReady():
                    self.ready(message)
                case KvGone(keys=gone):
                    assert len(gone) % 32 == 0

    def ready(self, message: KvReady) -> None:
        names, _, lease_us = self.loads.pop(message.job)
        offsets = list(message.offsets)
        assert len(offsets) == len(message.valid_tokens) == len(names)
        resident = next((i for i, offset in enumerate(offsets) if offset < 0), len(offsets))
        assert set(offsets[resident:]) <= {-1}
        assert (message.status == "ok") == (resident == len(names))
        if resident:
            until_us = self.world.now_us + lease_us
            self.reads[message.job] = Read(names[:resident], offsets[:resident], until_us)

    def settle(self) -> None:
        """What has passed its deadline is over."""
        now_us = self.world.now_us
        for write in self.writes.values():
            write.over = write.over or write.until_us <= now_us or write.epoch != self.world.epoch
        self.reads = {job: read for job, read in self.reads.items() if read.until_us > now_us}

    # ---- schedulers -----------------------------------------------------------------------------

    @rule(numbers=NUMBERS, prefix=st.booleans(), promote=st.booleans())
    def look_up(self, numbers: list[int], prefix: bool, promote: bool) -> None:
        job = self.job()
        self.lookups[job] = self.world.now_us + lookup_us(self.world.state)
        self.observe(self.world.look_up(*numbers, job=job, prefix=prefix, promote=promote))

    @rule(numbers=NUMBERS, lease_us=LEASE_US)
    def store_after_an_expiry(self, numbers: list[int], lease_us: int) -> None:
        """What one reservation left, the next one may want."""
        self.reserve(numbers, True, 0, False)
        self.write_late()
        self.reserve(numbers, True, lease_us, lease_us > 0)
        self.write_late()

    @rule(numbers=NUMBERS, urgent=st.booleans(), lease_us=LEASE_US, at_once=st.booleans())
    def reserve(self, numbers: list[int], urgent: bool, lease_us: int, at_once: bool) -> None:
        job, world = self.job(), self.world
        offsets = world.reserve(job, *numbers, priority=int(urgent), lease_us=lease_us)
        names = [(PRINT, key(number)) for number in numbers]
        self.writes[job] = Write(names, offsets, world.now_us + lease_us, urgent, world.epoch)
        if not urgent and max(offsets) >= 0:
            assert world.state.l1.used_bytes <= world.arena.capacity_bytes * 9 // 10
        if lease_us:
            assert world.reserve(job, *numbers, priority=int(urgent), lease_us=lease_us) == offsets
        if at_once:
            self.end_write(job, [True] * len(numbers))

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.writes)))
        size = len(self.writes[job].names)
        self.end_write(job, data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))

    def end_write(self, job: int, marks: list[bool]) -> None:
        self.settle()
        write, world = self.writes.pop(job), self.world
        if write.epoch != world.epoch:
            return  # that scheduler is dead
        for name, offset, done in zip(write.names, write.offsets, marks, strict=True):
            if done and offset >= 0:
                world.memory[offset] = ("late", name) if write.over else name
                if not write.over:
                    self.committed.add(name)
        answers = world.deliver(KvCommit(job=job, written=ints(marks)))
        stored = next(m for m in answers if isinstance(m, KvStored))
        for name, offset, done, tier in zip(write.names, write.offsets, marks, stored.tiers, strict=False):
            assert tier == world.state.tier_of(name)
            assert tier == 1 or write.over or offset == -1 or not done
        self.observe(answers)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        jobs = sorted({*self.writes, *self.reads, *self.loads})
        mine = [j for j in jobs if j not in self.writes or self.writes[j].epoch == self.world.epoch]
        if mine:
            job = data.draw(st.sampled_from(mine))
            for known in (self.writes, self.reads, self.loads):
                known.pop(job, None)
            self.observe(self.world.deliver(KvRelease(jobs=ints([job, 0]))))

    @rule(numbers=NUMBERS, deadline_us=st.sampled_from([0, 5_000, 3 * SECOND]), lease_us=LEASE_US)
    def prefetch(self, numbers: list[int], deadline_us: int, lease_us: int) -> None:
        job = self.job()
        names = [(PRINT, key(number)) for number in numbers]
        self.loads[job] = (names, self.world.now_us + deadline_us, lease_us)
        self.observe(self.world.prefetch(job, *numbers, deadline_us=deadline_us, lease_us=lease_us))

    @rule(dice=st.integers(1, 4))
    def restart(self, dice: int) -> None:
        if dice == 4:
            self.observe(self.world.handle(Restarted(SCHEDULER)))
            self.world.epoch += 1
            self.reads.clear()
            self.lookups.clear()
            self.loads.clear()

    @rule(dice=st.integers(1, 4))
    def lose(self, dice: int) -> None:
        """A scheduler that is silent gets no answers; its leases go on."""
        if dice == 4:
            self.observe(self.world.handle(PeerLost(SCHEDULER)))
            self.lookups.clear()
            self.loads.clear()

    # ---- executors ------------------------------------------------------------------------------

    @rule(again=st.booleans(), new=st.booleans())
    def executor(self, again: bool, new: bool) -> None:
        self.world.handle(PeerLost(EXECUTOR))
        if again:
            self.executor_epoch += new
            self.world.handle(PeerSeen(EXECUTOR, self.executor_epoch))

    @precondition(lambda self: self.writes)
    @rule()
    def write_late(self) -> None:
        """The copies of reservations that have expired go on, as long as the executor may be alive."""
        self.settle()
        for write in self.writes.values():
            alive = self.world.now_us - write.until_us < 60 * SECOND
            for offset in write.offsets if write.over and alive else []:
                if offset >= 0:
                    self.world.memory[offset] = "late"

    # ---- time and L2 ----------------------------------------------------------------------------

    @rule(us=st.sampled_from([1, 5_000, 15_000, SECOND, 5 * SECOND]))
    def wait(self, us: int) -> None:
        self.observe(self.world.wait(us))

    @precondition(lambda self: self.world.calls)
    @rule(data=st.data(), status=st.sampled_from(["ok", "ok", "ok", "corrupt", "failed", "refused"]))
    def l2_ends(self, data: st.DataObject, status: str) -> None:
        self.observe(self.world.end(data.draw(st.sampled_from(sorted(self.world.calls))), status))

    @rule()
    def l2_works(self) -> None:
        self.observe(self.world.end_all())

    @precondition(lambda self: self.world.remote)
    @rule(data=st.data())
    def l2_loses(self, data: st.DataObject) -> None:
        del self.world.remote[data.draw(st.sampled_from(sorted(self.world.remote)))]

    # ---- what always holds ----------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        self.settle()
        world, state = self.world, self.world.state
        for read in self.reads.values():
            assert [world.memory[offset] for offset in read.offsets] == read.names
        for name, entry in state.l1.entries.items():
            assert name in self.committed
            assert world.memory[entry.range.offset] == name
        for bytes_there, _ in world.remote.values():
            assert bytes_there in self.committed
        now_us = world.now_us
        assert all(due >= now_us for due in self.lookups.values())
        assert all(due >= now_us for _, due, _ in self.loads.values())
        canaries = len(world.in_flight(L2Probe))
        assert len(world.calls) - canaries <= IN_FLIGHT
        self.adds_up()

    def adds_up(self) -> None:
        world, l1 = self.world, self.world.state.l1
        ranges = world.arena.ranges
        assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))
        assert l1.used_bytes == len(ranges) * PAGE == world.arena.capacity_bytes - world.arena.free_bytes()
        assert l1.pinned_bytes == PAGE * sum(entry.pins > 0 for entry in l1.entries.values())
        assert l1.taken_bytes == l1.used_bytes - PAGE * len(l1.entries)
        open_writes = [w for w in world.state.leases.values() if hasattr(w, "ranges")]
        assert world.state.urgent_stores == sum(w.urgent for w in open_writes)
        held = sum(place is not None for w in open_writes for place in w.ranges)
        assert l1.taken_bytes == held * PAGE + world.state.quarantined_bytes

    def teardown(self) -> None:
        """Every owner goes; then nothing is leased, and the arena takes as much as an empty one."""
        if not hasattr(self, "world"):
            return
        world, state = self.world, self.world.state
        self.observe(world.handle(Restarted(SCHEDULER)))
        world.handle(PeerLost(EXECUTOR))
        world.handle(PeerSeen(EXECUTOR, self.executor_epoch))  # back: it was only silent
        world.deliver(ArenaReleased(executor="e", arena_generation=2))  # of another arena: proves nothing
        world.handle(PeerLost(EXECUTOR))
        world.wait(61 * SECOND)
        world.end_all()  # a block on its way to L2 cannot make room
        assert state.leases == state.quarantine == state.loads == state.lookups == {}
        assert state.l1.pinned_bytes == state.l1.taken_bytes == state.urgent_stores == 0
        world.epoch += 100
        every = range(100, 100 + world.blocks)
        assert min(world.reserve(1, *every, priority=1)) >= 0
        world.deliver(KvRelease(jobs=ints([1])))
        assert world.arena.free_bytes() == world.arena.capacity_bytes
        assert SCHEDULER in state.schedulers


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=max(100, settings.default.max_examples), stateful_step_count=60)
