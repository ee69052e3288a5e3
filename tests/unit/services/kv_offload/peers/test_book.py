"""The core of kv_offload with peers: what is asked of another host, what comes from it, and that nothing
stays leased, at any event in the middle of a read. Two cores; the test carries their messages."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from support.kv_offload.world import PAGE, PRINT, SECOND, World, key

from services.kv_offload.events import (
    Arrived,
    PeerLost,
    PeerRead,
    PeerReadEnded,
    PeersChanged,
    PeerSum,
    PeerSummed,
    Restarted,
    Ticked,
)
from services.kv_offload.jobs import LOOKUP_US, MOST_LOOKUP_US
from services.kv_offload.peers.book import (
    AHEAD,
    BATCH,
    LEASE_US,
    LIMIT_US,
    MOST_PATIENCE_US,
    PATIENCE_US,
    Book,
)
from shared.messages import KvFound, KvReady, KvRelease, Message, PeerFound, PeerLookup, ints, longs

A, B = "kv_offload.a", "kv_offload.b"
GENERATION = 3  # of the worlds' arenas


@dataclass
class Pair:
    """Host a asks, host b has blocks 1 to 9. Messages are carried by `carry`, reads ended by `read`."""

    a: World = field(default_factory=lambda: World(20, peers=True))
    b: World = field(default_factory=lambda: World(20, peers=True))
    carried: dict[str, int] = field(default_factory=lambda: {A: 0, B: 0})  # messages

    def __post_init__(self) -> None:
        self.a.handle(PeersChanged(b"of a", {B: GENERATION}))
        self.b.handle(PeersChanged(b"of b", {A: GENERATION}))
        self.b.store(1, *range(1, 10), valid_tokens=ints([16] * 9))

    def carry(self, *, change: Callable[[Message], Message | None] = lambda m: m) -> list[Message]:
        """All messages of the two to each other, until both are silent; sums are made at once."""
        received: list[Message] = []
        busy = True
        while busy:
            busy = False
            for source, world, other in ((A, self.a, self.b), (B, self.b, self.a)):
                for call in [c for c in world.peer_calls if isinstance(c, PeerSum)]:
                    world.peer_calls.remove(call)
                    world.handle(
                        PeerSummed(call.lease, b"".join(k.ljust(128) for (_, k), _, _ in call.blocks))
                    )
                fresh, self.carried[source] = world.sent[self.carried[source] :], len(world.sent)
                for send in fresh:
                    if send.to in (A, B):
                        busy = True
                        received.append(send.message)
                        if (message := change(send.message)) is not None:
                            other.handle(Arrived(source, 7, message))
        return received

    def running(self) -> PeerRead:
        (call,) = [c for c in self.a.peer_calls if isinstance(c, PeerRead)]
        return call

    def read(self, *, wrong: Iterable[int] = (), fails: bool = False) -> None:
        """End the read that runs, with the bytes that lie at b."""
        call = self.running()
        self.a.peer_calls.remove(call)
        assert call.address == b"of b"
        found = [self.b.memory.get(offset) for offset in call.offsets]
        valid = [16 if value == name else -1 for value, name in zip(found, call.names, strict=True)]
        valid = [-1 if i in wrong else n for i, n in enumerate(valid)]
        self.a.fetched[call.call] = found
        self.a.handle(PeerReadEnded(call.call, () if fails else tuple(valid)))
        self.carry()

    def look_up(self, *numbers: int) -> list[list[int]]:
        before = len(self.a.sent)
        self.a.look_up(*numbers)
        self.carry()
        return [list(s.message.tiers) for s in self.a.sent[before:] if isinstance(s.message, KvFound)]

    def readies(self) -> list[KvReady]:
        return [s.message for s in self.a.sent if isinstance(s.message, KvReady)]

    def load(self, *numbers: int, job: int = 5) -> None:
        self.look_up(*numbers)
        self.a.prefetch(job, *numbers)
        self.carry()

    def wait(self, us: int) -> None:
        for world in (self.a, self.b):
            world.wait(us)
        self.carry()

    def assert_idle(self) -> None:
        """After the scheduler's release nothing is pinned, leased, asked or queued on either side."""
        self.a.deliver(KvRelease(jobs=ints([5])))
        book = self.a.core.peers
        assert isinstance(book, Book)
        assert (book.asks, book.wanted, book.reading, book.next_us()) == ({}, {}, set(), None)
        for world in (self.a, self.b):
            assert (world.state.leases, world.state.loads, world.state.l1.pinned_bytes) == ({}, {}, 0)


def came(ready: KvReady) -> int:
    return sum(offset >= 0 for offset in ready.offsets)


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ---- what works -----------------------------------------------------------------------------------


def test_lookup_goes_to_all_peers_and_is_answered_like_one_of_l2(pair: Pair) -> None:
    assert pair.look_up(1, 2, 30) == [[2, 2, 0]]
    assert pair.a.state.counters.hits_peer == 2
    assert pair.look_up(1, 2) == [[2, 2]], "it is known now"
    assert pair.a.now_us == pair.b.now_us == SECOND, "a peer has waited"
    pair.assert_idle()


def test_a_load_reads_the_blocks_and_releases_the_lease(pair: Pair) -> None:
    pair.load(1, 2, 3)
    call = pair.running()
    assert (call.names, call.value_bytes) == (tuple((PRINT, key(n)) for n in (1, 2, 3)), PAGE)
    assert pair.b.state.l1.pinned_bytes == 3 * PAGE, "they stay while they are read"
    pair.read()
    (ready,) = pair.readies()
    assert (came(ready), ready.status, ready.from_l2) == (3, "ok", 3)
    pair.a.read(ready, 1, 2, 3)
    assert pair.a.state.counters.peer_bytes == 3 * PAGE
    assert pair.b.state.l1.pinned_bytes == 0
    assert pair.look_up(1, 2, 3) == [[1, 1, 1]]
    pair.assert_idle()


def test_one_read_runs_and_a_few_get_their_leases_meanwhile() -> None:
    pair = Pair(World(400, peers=True), World(400, peers=True))
    many = range(100, 100 + 5 * BATCH)
    pair.b.store(2, *many)
    pair.load(*many)
    asked = [s.message for s in pair.a.sent if isinstance(s.message, PeerLookup) and s.message.lease_us]
    assert [len(m.keys) // 32 for m in asked] == [BATCH] * AHEAD
    for _ in range(5):
        pair.read()
    assert came(pair.readies()[0]) == 5 * BATCH
    pair.assert_idle()


def test_two_loads_of_the_same_blocks_read_them_once(pair: Pair) -> None:
    pair.load(1, 2)
    pair.a.prefetch(6, 1, 2, 3)
    pair.carry()
    pair.read()
    assert [came(ready) for ready in pair.readies()] == [2, 2], "block 3 was never looked up"
    pair.a.deliver(KvRelease(jobs=ints([6])))
    pair.assert_idle()


def test_the_peer_keeps_what_it_leases_and_a_lookup_leases_nothing(pair: Pair) -> None:
    pair.load(1)
    pair.b.store(3, *range(40, 60))
    assert (PRINT, key(1)) in pair.b.state.l1.entries
    assert (PRINT, key(2)) not in pair.b.state.l1.entries
    pair.read()
    assert came(pair.readies()[0]) == 1
    pair.assert_idle()


def test_l2_is_used_for_what_a_peer_has_lost() -> None:
    pair = Pair(World(20, l2=True, peers=True))
    pair.a.remote = {(PRINT, key(1)): ((PRINT, key(1)), 16)}
    pair.a.state.l2.presence.add((PRINT, key(1)))
    pair.look_up(2)
    pair.a.core.peers.known[PRINT, key(1)] = B  # both have it
    pair.a.prefetch(5, 1, 2)
    pair.carry()
    pair.read(fails=True)
    pair.a.end_all()
    (ready,) = pair.readies()
    assert came(ready) == 1
    pair.a.read(ready, 1, 2)
    pair.assert_idle()


def test_l2_and_peers_are_queried_side_by_side() -> None:
    pair = Pair(World(20, l2=True, peers=True))
    pair.a.remote = {(PRINT, key(30)): ((PRINT, key(30)), 16)}
    assert pair.look_up(1, 30, 31) == [], "L2 has not answered"
    pair.a.end_all()
    found = [s.message for s in pair.a.sent if isinstance(s.message, KvFound)]
    assert [list(m.tiers) for m in found] == [[2, 2, 0]]
    assert (pair.a.state.counters.hits_l2, pair.a.state.counters.hits_peer) == (1, 1)


# ---- what does not --------------------------------------------------------------------------------


def test_a_silent_peer_costs_10_ms_and_is_left_alone_for_longer_each_time(pair: Pair) -> None:
    waits = []
    for job in range(10):
        pair.a.look_up(100 + job, job=job)
        assert not [s for s in pair.a.sent if isinstance(s.message, KvFound) and s.message.job == job]
        pair.a.wait(LOOKUP_US)
        assert [s.message for s in pair.a.sent if isinstance(s.message, KvFound)][-1].job == job
        pair.a.wait(LIMIT_US["lookup"])
        until_us, failures = pair.a.core.peers.resting[B]
        waits.append(until_us - pair.a.now_us + LOOKUP_US)
        assert failures == job + 1
        assert tiers_now(pair.a, 300 + job) == [0], "it is not asked"
        pair.a.wait(waits[-1])
    assert waits == [min(PATIENCE_US << n, MOST_PATIENCE_US) for n in range(10)]
    pair.carried = {A: len(pair.a.sent), B: len(pair.b.sent)}
    pair.assert_idle()


def tiers_now(world: World, number: int) -> list[int]:
    (found,) = world.look_up(number, job=number)
    assert isinstance(found, KvFound)
    return list(found.tiers)


def test_a_peer_that_answers_late_gets_twice_its_usual_time(pair: Pair) -> None:
    for number in range(12):
        pair.a.look_up(50 + number, job=50 + number)
        pair.a.now_us += 40_000
        pair.b.now_us = pair.a.now_us
        pair.carry()
    pair.a.look_up(90, job=90)
    pair.a.wait(MOST_LOOKUP_US - 1)
    assert [s.message.job for s in pair.a.sent if isinstance(s.message, KvFound)][-1] == 61
    pair.a.wait(1)
    assert [s.message.job for s in pair.a.sent if isinstance(s.message, KvFound)][-1] == 90


def test_wrong_bytes_are_not_found_and_the_blocks_before_them_are(pair: Pair) -> None:
    pair.load(1, 2, 3)
    pair.read(wrong=[1])
    (ready,) = pair.readies()
    assert (came(ready), ready.status) == (1, "missing")
    pair.a.read(ready, 1, 2, 3)
    assert pair.a.state.counters.peer_corrupt == 1
    assert (PRINT, key(2)) not in pair.a.core.peers.known
    pair.assert_idle()


def test_block_that_the_peer_has_evicted_is_not_found(pair: Pair) -> None:
    pair.look_up(1, 2)
    pair.b.store(3, *range(40, 60))
    pair.a.prefetch(5, 1, 2)
    pair.carry()
    assert [came(ready) for ready in pair.readies()] == [0]
    assert pair.a.state.counters.peer_absent == 2
    pair.assert_idle()


@pytest.mark.parametrize("asked", [True, False], ids=["before its lease", "in the middle of a read"])
@pytest.mark.parametrize(
    "event",
    [PeerLost(B), Restarted(B), PeersChanged(b"of a", {}), PeersChanged(b"of a", {B: GENERATION + 1})],
    ids=["dead", "restarted", "unreadable", "another generation"],
)
def test_lookups_and_prefetches_end_at_once_when_a_peer_goes(pair: Pair, event: object, asked: bool) -> None:
    pair.look_up(1, 2, 3)
    pair.a.prefetch(5, 1, 2)
    if not asked:
        pair.carry()
    pair.a.handle(event)  # type: ignore[arg-type]
    (ready,) = pair.readies()
    assert (came(ready), ready.took_us) == (0, 0), "at once"
    assert pair.a.core.peers.known == {}
    pair.carry()
    if not asked:
        pair.read()
    assert pair.a.memory == {}, "what came is not used"
    assert pair.a.state.l1.entries == {}
    pair.assert_idle()


def test_a_peer_hangs_in_the_middle_of_a_read(pair: Pair) -> None:
    pair.load(1, 2)
    pair.a.wait(50_000)
    (ready,) = pair.readies()
    assert came(ready) == 0, "the load has its deadline"
    pair.a.wait(LIMIT_US["read"])
    assert pair.a.core.peers.resting[B][1] == 1
    pair.carry()
    pair.read()
    assert pair.a.memory == {}
    pair.assert_idle()


def test_a_read_that_comes_after_the_load_is_kept_in_l1(pair: Pair) -> None:
    pair.load(1, 2)
    pair.a.wait(50_000)
    pair.read()
    assert pair.look_up(1, 2) == [[1, 1]]
    pair.assert_idle()


def test_a_read_fails_and_the_peer_rests_until_one_works(pair: Pair) -> None:
    pair.load(1, 2)
    pair.read(fails=True)
    assert [came(ready) for ready in pair.readies()] == [0]
    assert pair.look_up(1) == [[0]]
    pair.wait(PATIENCE_US)
    pair.load(1, 2, job=8)
    pair.read()
    assert came(pair.readies()[-1]) == 2
    assert pair.a.core.peers.resting == {}
    pair.a.deliver(KvRelease(jobs=ints([8])))
    pair.assert_idle()


def test_jobs_that_wait_for_a_read_end_with_the_peer() -> None:
    pair = Pair(World(400, peers=True), World(400, peers=True))
    many = range(100, 100 + 5 * BATCH)
    pair.b.store(2, *many)
    pair.load(*many)
    assert len(pair.a.core.peers.wanted) == (5 - AHEAD) * BATCH
    pair.read(fails=True)
    assert (came(pair.readies()[0]), pair.a.core.peers.wanted) == (0, {})
    asked = {s.to for s in pair.a.sent if isinstance(s.message, PeerLookup)}
    assert asked == {B}
    pair.a.peer_calls.clear()
    pair.wait(LIMIT_US["read"])
    pair.assert_idle()


def test_a_lease_that_waits_for_another_read_is_no_failure_of_its_peer() -> None:
    pair = Pair(World(400, peers=True), World(400, peers=True))
    many = range(100, 100 + 2 * BATCH)
    pair.b.store(2, *many)
    pair.load(*many)
    pair.a.wait(LIMIT_US["read"])
    assert pair.a.state.counters.peer_failures == 1, "the read that hung"
    pair.a.peer_calls.clear()
    pair.carry()
    pair.assert_idle()


def test_repeated_lease_is_the_same(pair: Pair) -> None:
    for _ in range(2):
        pair.b.handle(Arrived(A, 7, PeerLookup(job=7, fingerprint=PRINT, keys=key(1), lease_us=SECOND)))
    assert len(pair.b.peer_calls) == 1
    pair.b.handle(Arrived(A, 7, KvRelease(jobs=ints([7]))))
    assert pair.b.state.l1.pinned_bytes == 0


def test_a_dead_reader_leaves_no_lease(pair: Pair) -> None:
    pair.load(1, 2)
    pair.b.wait(LEASE_US - 1)
    assert pair.b.state.l1.pinned_bytes == 2 * PAGE
    pair.b.wait(1)
    assert pair.b.state.l1.pinned_bytes == 0
    pair.b.handle(Arrived(A, 7, PeerLookup(job=77, fingerprint=PRINT, keys=key(3), lease_us=10**9)))
    pair.b.handle(Restarted(A))
    assert (pair.b.state.leases, pair.b.state.l1.pinned_bytes) == ({}, 0)


def test_a_lease_that_ends_while_its_blocks_are_hashed_is_not_given(pair: Pair) -> None:
    """The hash may be of what was written there since."""
    pair.b.handle(Arrived(A, 7, PeerLookup(job=7, fingerprint=PRINT, keys=key(1), lease_us=1_000)))
    (call,) = pair.b.peer_calls
    assert isinstance(call, PeerSum)
    pair.b.wait(1_000)
    assert pair.b.handle(PeerSummed(call.lease, bytes(128))) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"arena_generation": 99},
        {"offsets": longs([0])},
        {"offsets": longs([-1, -1])},
        {"offsets": longs()},
        {"value_bytes": 0},
        {"value_bytes": 2**40},
        {"lease_us": 0},
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_is_an_absence(pair: Pair, wrong: dict[str, object]) -> None:
    def change(message: Message) -> Message:
        leased = isinstance(message, PeerFound) and message.lease_us
        return dataclasses.replace(message, **wrong) if leased else message  # type: ignore[arg-type]

    pair.look_up(1, 2)
    pair.a.prefetch(5, 1, 2)
    pair.carry(change=change)
    assert [came(ready) for ready in pair.readies()] == [0]
    pair.assert_idle()


def test_l1_without_room_takes_nothing() -> None:
    pair = Pair(World(4, peers=True))
    pair.a.store(1, 60, 61, 62)
    pair.a.prefetch(9, 60, 61, 62)  # pinned
    pair.load(1, 2)
    pair.read()
    assert came(pair.readies()[-1]) == 0
    pair.a.deliver(KvRelease(jobs=ints([9])))
    pair.assert_idle()


def test_kv_offload_without_peers_ignores_other_kv_offloads() -> None:
    world = World(4)
    asked = PeerLookup(job=1, fingerprint=PRINT, keys=key(1))
    assert world.handle(Arrived(B, 1, asked)) == []
    assert world.core.due_us() is None


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_ends_with_right_bytes_and_no_lease(seed: int) -> None:
    draw = random.Random(seed)
    pair = Pair(World(12, peers=True), World(12, peers=True))
    job = 100
    for _ in range(300):
        numbers = draw.sample(range(1, 16), draw.randint(1, 5))
        match draw.randrange(8):
            case 0:
                job += 1
                pair.b.store(job, *numbers)
            case 1:
                pair.look_up(*numbers)
            case 2:
                job += 1
                pair.a.prefetch(job, *numbers)
            case 3 if [c for c in pair.a.peer_calls if isinstance(c, PeerRead)]:
                pair.a.peer_calls = [c for c in pair.a.peer_calls if isinstance(c, PeerRead)][-1:]
                pair.read(wrong=[0] if draw.random() < 0.2 else (), fails=draw.random() < 0.1)
            case 4:
                pair.carry(change=lambda m: m if draw.random() < 0.8 else None)
            case 5:
                pair.wait(draw.choice([1_000, 100_000, 3 * SECOND]))
            case 6:
                pair.a.handle(draw.choice([PeerLost(B), PeersChanged(b"of a", {B: GENERATION})]))
            case _:
                pair.carry()
        for ready in pair.readies():
            pair.a.deliver(KvRelease(jobs=ints([ready.job])))
        for name, entry in pair.a.state.l1.entries.items():
            assert pair.a.memory[entry.range.offset] == name
    pair.a.peer_calls.clear()
    pair.wait(2 * MOST_PATIENCE_US)
    pair.a.handle(Ticked())
    pair.a.deliver(KvRelease(jobs=ints(range(100, job + 1))))
    pair.assert_idle()
