"""The core of kv_offload, L1: stores, loads, leases, eviction, quarantine. Each range holds one block."""

from __future__ import annotations

import random

import pytest
from support.kv_offload.world import EPOCH, EXECUTOR, PAGE, PRINT, SCHEDULER, SECOND, World, key, keys

from services.kv_offload.backends.arena import Arena
from services.kv_offload.events import PeerLost, PeerSeen, Restarted, Send
from services.kv_offload.jobs import LIVE_US, QUARANTINE_US, REPEATED_COMMITS
from shared.messages import (
    ArenaReleased,
    Cancel,
    KvCommit,
    KvForget,
    KvFound,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    KvTouch,
    Message,
    ints,
    longs,
)


def ready(answers: list[Message]) -> KvReady:
    (answer,) = (message for message in answers if isinstance(message, KvReady))
    return answer


def tiers(answers: list[Message]) -> list[int]:
    (answer,) = (message for message in answers if isinstance(message, KvFound))
    return list(answer.tiers)


def resident(world: World) -> list[int]:
    return sorted(int.from_bytes(name[1], "big") for name in world.state.l1.entries)


def test_core_without_an_arena_stores_nothing_and_answers_every_query() -> None:
    world = World(blocks=0)
    reserve = KvReserve(job=2, owner="e", keys=key(1), value_bytes=PAGE, lease_us=1)
    prefetch = KvPrefetch(job=4, owner="e", keys=key(1), deadline_us=1, lease_us=1)
    answers: list[tuple[Message, list[Message]]] = [
        (KvLookup(job=9, keys=keys(1, 2)), [KvFound(job=9, tiers=ints([0, 0]))]),
        (reserve, [KvReserved(job=2, arena_generation=3, offsets=longs([-1]), status="no_room")]),
        (KvCommit(job=2, written=ints([1])), [KvStored(job=2, tiers=ints([0]))]),
        (
            prefetch,
            [
                KvReady(
                    job=4,
                    arena_generation=3,
                    offsets=longs([-1]),
                    valid_tokens=ints([0]),
                    status="missing",
                )
            ],
        ),
        (KvRelease(jobs=ints([2])), []),
        (Cancel(tenant="t", request="r"), []),
    ]
    for asked, answer in answers:
        assert world.deliver(asked) == answer
    assert (world.state.counters.lookups, world.state.counters.hit_rate) == (2, 0)


def test_stored_block_is_found_and_read_with_its_valid_tokens() -> None:
    world = World()
    assert world.reserve(1, 1, 2, valid_tokens=ints([16, 5])) == [0, PAGE]
    assert tiers(world.look_up(1, 2)) == [0, 0], "it is not read before the commit"
    assert world.commit(1, 1, 1) == [1, 1]
    assert tiers(world.look_up(1, 2)) == [1, 1]
    answer = ready(world.prefetch(2, 1, 2, 3))
    assert (list(answer.offsets), list(answer.valid_tokens)) == ([0, PAGE, -1], [16, 5, 0])
    assert (answer.status, answer.arena_generation) == ("missing", 3)
    assert ready(world.prefetch(3, 1, 2)).status == "ok"
    world.read(answer, 1, 2, 3)


def test_a_prefix_ends_at_its_first_miss() -> None:
    world = World()
    world.store(1, 1, 3)
    assert tiers(world.look_up(1, 2, 3)) == [1, 0, 0]
    assert tiers(world.look_up(1, 2, 3, prefix=False)) == [1, 0, 1]
    assert list(ready(world.prefetch(2, 1, 2, 3)).offsets) == [0, -1, -1]
    assert world.state.counters.hit_rate == 0.5


def test_another_layout_has_other_values() -> None:
    world = World()
    world.store(1, 1)
    assert tiers(world.deliver(KvLookup(job=1, keys=key(1), fingerprint="f2"))) == [0]
    assert list(ready(world.prefetch(2, 1, fingerprint="f2")).offsets) == [-1]
    assert world.store(3, 1, fingerprint="f2") == [1]
    assert len(world.state.l1.entries) == 2


def test_unwritten_range_is_free_again() -> None:
    world = World(3)
    world.reserve(1, 1, 2)
    assert world.commit(1, 0, 1) == [0, 1]
    world.reserve(2, 3, priority=1)
    world.deliver(KvRelease(jobs=ints([2])))
    assert world.reserve(3, 4, 5, priority=1) == [0, 2 * PAGE]
    assert world.commit(3) == [0, 0], "a commit without a key has not written it"


def test_a_key_that_is_there_needs_no_copy_and_stays_until_the_commit() -> None:
    world = World(10)
    world.store(1, 1)
    world.store(2, *range(20, 28))
    offsets = world.reserve(3, 1, *range(2, 10))
    assert offsets[0] == -2
    assert min(offsets[1:]) >= 0
    assert 1 in resident(world), "its own tail does not push it out"
    assert world.commit(3, 0, *[1] * 8) == [1, *[1] * 8]
    assert world.state.l1.pinned_bytes == 0


def test_two_jobs_for_one_key_keep_one_copy() -> None:
    world = World(2)
    assert world.reserve(1, 1, priority=1) != world.reserve(2, 1, priority=1)
    assert (world.commit(1, 1), world.commit(2, 1)) == ([1], [1])
    assert world.arena.free_bytes() == PAGE


def test_asking_twice_is_asking_once() -> None:
    world = World(4)
    assert world.reserve(1, 1, 2) == world.reserve(1, 1, 2) == [0, PAGE]
    assert world.arena.free_bytes() == 2 * PAGE
    assert world.reserve(1, 3) == [-1], "the places of this job may still be written"
    assert world.commit(1, 1, 1) == world.commit(1) == [1, 1]
    assert ready(world.prefetch(2, 1)) == ready(world.prefetch(2, 1))
    assert world.state.l1.entries[PRINT, key(1)].pins == 1
    assert ready(world.prefetch(2, 2)).status == "missing", "another question under the same number"
    world.deliver(KvRelease(jobs=ints([2])))
    assert world.state.l1.pinned_bytes == 0
    for job in range(10, 10 + REPEATED_COMMITS):
        world.store(job, 5)
    assert world.commit(1) == [], "long ago"


def test_the_coldest_goes_first_and_of_a_request_its_tail() -> None:
    world = World(10)
    for job, first in enumerate((10, 20, 30)):
        world.store(job, first, first + 1, first + 2)
    world.look_up(10, 11, 12)
    for job, gone in enumerate((22, 21, 20, 32, 31, 30, 12, 11), 100):
        before = resident(world)
        world.store(job, 100 + job)
        assert set(before) - set(resident(world)) == {gone}


def test_no_block_is_evicted_in_vain() -> None:
    world = World(10)
    world.store(1, 1, 2)
    assert world.reserve(2, 3, value_bytes=20 * PAGE) == [-1]
    assert world.reserve(3, 4, value_bytes=0) == [-1]
    world.store(10, 10, 11)
    world.store(13, 13, 14)
    world.prefetch(50, 1, 2)
    world.prefetch(51, 10, 11)
    world.prefetch(52, 13, 14)
    offsets = world.reserve(4, *range(60, 65))
    assert min(offsets[:3]) >= 0
    assert offsets[3:] == [-1, -1]
    assert resident(world) == [1, 2, 10, 11, 13, 14]


def test_a_tenth_is_kept_for_preempted_requests() -> None:
    world = World(20)
    assert world.reserve(1, *range(20)).count(-1) == 2
    assert world.reserve(2, *range(30, 33), priority=1).count(-1) == 1
    assert world.state.counters.no_room == 3


def test_values_of_preempted_requests_outlive_others_as_cold() -> None:
    world = World(10)
    world.store(1, 1, priority=1)
    world.store(2, *range(10, 18))
    world.store(3, 20)
    assert 1 in resident(world)
    assert 17 not in resident(world)


def test_a_burst_of_three_times_l1_is_taken_and_what_is_pinned_stays() -> None:
    world, dice = World(400), random.Random(5)
    world.store(1, *range(20))
    lease = ready(world.prefetch(2, *range(20), lease_us=60 * SECOND))
    taken = asked = 0
    for job in range(3, 153):  # 1,200 blocks, up to four jobs open at a time
        offsets = world.reserve(job, *range(1_000 + job * 8, 1_008 + job * 8))
        asked += len(offsets)
        taken += sum(offset >= 0 for offset in offsets)
        if job > 6:
            assert world.commit(job - 4, *[1] * 8) == [1] * 8
        world.wait(dice.randint(0, 500))
    assert (taken, asked) == (1_200, 1_200)
    world.read(lease, *range(20))
    assert world.state.l1.evictions == 1_200 + 20 - 360


def test_an_arena_in_pieces_refuses_what_it_cannot_place() -> None:
    world = World(20)
    for number in range(18):
        world.store(number, number)
    for number in range(0, 18, 2):
        world.prefetch(100 + number, number)
    assert world.reserve(200, 50, value_bytes=4 * PAGE) == [-1]
    world = World(4)
    world.store(1, 1)
    world.prefetch(2, 1)
    world.arena.allocate(b"another's", 2 * PAGE)
    assert world.reserve(3, 2, value_bytes=2 * PAGE, priority=1) == [-1], "and nothing is left to evict"


def test_leases_end_at_their_deadline() -> None:
    world = World(10)
    world.store(1, 1)
    world.prefetch(2, 1, lease_us=100)
    world.wait(99)
    assert world.state.l1.pinned_bytes == PAGE
    world.wait(1)
    assert world.state.l1.pinned_bytes == 0
    assert world.state.counters.expired_leases == 1


def expired(world: World) -> None:
    """Two blocks reserved for the executor, incarnation 1, and not committed in time."""
    world.handle(PeerSeen(EXECUTOR, 1))
    world.store(8, 9)
    world.reserve(1, 1, 9, 2, lease_us=100)
    world.wait(100)
    assert world.state.quarantined_bytes == 2 * PAGE
    assert world.state.leases == {}


def test_a_late_commit_stores_nothing_and_frees_the_ranges() -> None:
    world = World()
    expired(world)
    assert world.reserve(1, 1, 9, 2) == [-1, -1, -1], "they may still be written"
    assert world.commit(1, 1, 1, 1) == [0, 1, 0], "the tier where each is all the same"
    assert (world.state.quarantined_bytes, world.state.counters.late_commits) == (0, 1)
    assert world.arena.free_bytes() == 9 * PAGE


def test_a_late_release_frees_the_ranges() -> None:
    world = World()
    expired(world)
    world.deliver(KvRelease(jobs=ints([1])), source="scheduler.other")
    assert world.state.quarantined_bytes == 2 * PAGE
    world.deliver(KvRelease(jobs=ints([1])))
    assert world.state.quarantined_bytes == 0


def test_reservation_without_room_leaves_nothing() -> None:
    world = World(blocks=0)
    world.reserve(1, 1, lease_us=100)
    world.wait(100)
    assert world.state.quarantine == {}


@pytest.mark.parametrize("event", [PeerLost(EXECUTOR), PeerSeen(EXECUTOR, 2)])
def test_quarantine_ends_a_while_after_the_executor_is_gone_or_another(event: PeerLost | PeerSeen) -> None:
    world = World()
    expired(world)
    world.handle(PeerLost("executor.other"))
    world.handle(PeerSeen("executor.other", 2))
    world.wait(5 * SECOND)
    world.handle(event)
    world.wait(SECOND)
    world.handle(PeerSeen(EXECUTOR, 3))  # it does not begin anew
    world.wait(QUARANTINE_US - SECOND - 1)
    assert world.state.quarantined_bytes == 2 * PAGE
    world.wait(1)
    assert world.state.quarantined_bytes == 0


def test_an_executor_that_was_only_silent_may_go_on_writing() -> None:
    world = World()
    expired(world)
    world.handle(PeerLost(EXECUTOR))
    world.wait(QUARANTINE_US - 1)
    world.handle(PeerSeen(EXECUTOR, 1))
    world.wait(LIVE_US - QUARANTINE_US)
    assert world.state.quarantined_bytes == 2 * PAGE
    world.wait(1)
    assert world.state.quarantined_bytes == 0, "a living executor is done by now, or was replaced"


def test_unknown_owner_counts_as_gone_until_it_is_seen() -> None:
    for seen, after_us in ((False, QUARANTINE_US), (True, LIVE_US)):
        world = World()
        world.reserve(1, 1, lease_us=0)
        world.wait(1)
        if seen:
            world.handle(PeerSeen(EXECUTOR, 4))
        world.wait(after_us - 2)
        assert world.state.quarantined_bytes == PAGE
        world.wait(1)
        assert world.state.quarantined_bytes == 0


def test_an_executor_that_has_unmapped_the_arena_writes_no_more() -> None:
    world = World()
    expired(world)
    world.deliver(ArenaReleased(executor="e", arena_generation=2))
    world.deliver(ArenaReleased(executor="other", arena_generation=3))
    assert world.state.quarantined_bytes == 2 * PAGE
    world.deliver(ArenaReleased(executor="e", arena_generation=3))
    assert world.state.quarantined_bytes == 0


def test_a_new_incarnation_of_the_scheduler_voids_all_leases_of_the_one_before() -> None:
    world = World()
    world.handle(PeerSeen(EXECUTOR, 1))
    world.store(1, 1)
    world.prefetch(2, 1)
    world.reserve(3, 2, priority=1)
    world.deliver(
        KvPrefetch(job=2, owner="e", keys=key(1), deadline_us=1, lease_us=SECOND, fingerprint=PRINT),
        "scheduler.b",
    )
    world.handle(Restarted(SCHEDULER))
    assert list(world.state.leases) == [("scheduler.b", EPOCH, 2)]
    assert (world.state.quarantined_bytes, world.state.urgent_stores) == (PAGE, 0)
    world.epoch += 1
    assert world.commit(3, 1) == [], "the number is another job's now"
    assert world.state.quarantined_bytes == PAGE


def test_the_leases_of_a_silent_scheduler_go_on_to_their_deadline() -> None:
    world = World()
    world.store(1, 1)
    world.prefetch(2, 1, lease_us=SECOND)
    world.reserve(3, 2, lease_us=SECOND)
    world.handle(PeerLost(SCHEDULER))
    world.wait(SECOND - 1)
    assert world.commit(3, 1) == [1]
    assert world.state.l1.pinned_bytes == PAGE
    world.wait(1)
    assert world.state.l1.pinned_bytes == 0


def test_block_that_leaves_the_last_tier_is_reported_to_every_present_scheduler() -> None:
    world = World(10)
    world.deliver(KvLookup(job=1, keys=b""), "scheduler.b")
    world.deliver(KvLookup(job=1, keys=b""), "scheduler.c")
    world.handle(PeerLost("scheduler.c"))
    world.store(1, *range(9))
    world.sent.clear()
    world.store(2, 20, 21)
    gone = [send for send in world.sent if isinstance(send.message, KvGone)]
    assert sorted(gone, key=lambda send: send.to) == [
        Send("scheduler.b", KvGone(keys=keys(8, 7))),
        Send(SCHEDULER, KvGone(keys=keys(8, 7))),
    ]


def test_a_message_names_at_most_1024_keys_that_are_gone() -> None:
    world = World(4_000)
    world.store(1, *range(3_600))
    answers = world.deliver(
        KvReserve(job=2, owner="e", keys=key(9_999), value_bytes=1_500 * PAGE, lease_us=1, fingerprint=PRINT)
    )
    assert [len(m.keys) // 32 for m in answers if isinstance(m, KvGone)] == [1_024, 476]


def test_an_odd_tail_of_keys_is_left_out() -> None:
    world = World()
    assert tiers(world.deliver(KvLookup(job=1, keys=key(1) + b"odd"))) == [0]


def test_the_counting_arena_keeps_the_arenas_promises() -> None:
    arena = Arena(4 * PAGE)
    assert arena.allocate(b"a", 1) == 0
    with pytest.raises(ValueError, match="one range"):
        arena.allocate(b"a", 1)
    with pytest.raises(ValueError, match="at least 1 byte"):
        arena.allocate(b"b", 0)
    arena.seal(b"a")
    for refused in (arena.seal, arena.discard, arena.view):
        with pytest.raises(KeyError):
            refused(b"c")
    arena.discard(b"a")
    assert arena.free_bytes() == 4 * PAGE
    arena.close()


def test_forgotten_blocks_leave_l1_and_their_ranges_are_free() -> None:
    world = World(4)
    world.store(1, 1, 2)
    world.store(2, 3)
    (gone,) = world.deliver(KvForget(keys=keys(1, 3, 9), fingerprint=PRINT))
    assert gone == KvGone(keys=keys(1, 3))
    assert resident(world) == [2]
    assert world.store(3, 4, 5) == [1, 1]
    assert world.state.l1.evictions == 0, "an end is no eviction"


def test_forgotten_block_that_is_read_leaves_after_its_last_reader() -> None:
    world = World(4)
    world.store(1, 1, 2)
    answer = ready(world.prefetch(2, 1, 2))
    world.prefetch(3, 2)
    assert world.deliver(KvForget(keys=keys(1, 2), fingerprint=PRINT)) == []
    world.read(answer, 1, 2)
    world.deliver(KvRelease(jobs=ints([2])))
    assert resident(world) == [2]
    world.deliver(KvRelease(jobs=ints([3])))
    assert resident(world) == []


def test_forgotten_block_that_a_new_reader_wants_stays() -> None:
    world = World(4)
    world.store(1, 1)
    world.prefetch(2, 1)
    world.deliver(KvForget(keys=key(1), fingerprint=PRINT))
    world.prefetch(3, 1)
    world.deliver(KvRelease(jobs=ints([2])))
    world.deliver(KvRelease(jobs=ints([3])))
    assert resident(world) == [1]


def test_touched_blocks_are_evicted_after_all_others_and_their_tail_first() -> None:
    world = World(4)
    world.store(1, 1, 2)
    world.store(2, 3)
    world.deliver(KvTouch(keys=keys(1, 2, 9), fingerprint=PRINT))
    world.store(3, 4, priority=1)
    for number, left in ((5, [1, 2, 4, 5]), (6, [1, 4, 5, 6])):
        world.store(number, number, priority=1)
        assert resident(world) == left
