"""The core of kv_offload, L2: what is looked up there, what is copied there, and that no request waits for
it."""

from __future__ import annotations

from support.kv_offload.world import EXECUTOR, PAGE, PRINT, SCHEDULER, SECOND, World, key, keys

from loadtest.simulator.kv_virtual import VirtualKv, VirtualL2
from services.kv_offload.backends.arena import Arena
from services.kv_offload.events import L2Delete, L2Ended, L2Get, L2Has, L2Probe, L2Put, PeerLost, Restarted
from services.kv_offload.jobs import LOOKUP_US, MOST_LOOKUP_US
from services.kv_offload.l2 import dispatch
from services.kv_offload.state import PROBE_US, WAITING, queue
from shared.messages import (
    KvCommit,
    KvFound,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    Message,
    ints,
)


def world(blocks: int = 10, *remote: int) -> World:
    """One whose L2 holds these blocks, as another host put them there."""
    made = World(blocks, l2=True)
    made.remote = {(PRINT, key(number)): ((PRINT, key(number)), 16) for number in remote}
    return made


def tiers(answers: list[Message]) -> list[list[int]]:
    return [list(message.tiers) for message in answers if isinstance(message, KvFound)]


def readies(answers: list[Message]) -> list[KvReady]:
    return [message for message in answers if isinstance(message, KvReady)]


def opened(made: World) -> World:
    """Its breaker is open."""
    for job in range(3):
        made.look_up(1_000 + job, job=1_000 + job)
        made.end_all("failed", [L2Has])
    assert made.state.l2.breaker.open
    return made


# ---- lookups ------------------------------------------------------------------------------------


def test_keys_missing_in_l1_are_looked_up_in_l2_once() -> None:
    w = world(10, 2, 3)
    w.store(1, 1)
    assert tiers(w.look_up(1, 2, 3, 4)) == []
    (call,) = w.in_flight(L2Has)
    assert w.calls[call] == L2Has(call, PRINT, (key(2), key(3), key(4)), want_size=False)
    assert tiers(w.end(call)) == [[1, 2, 2, 0]]
    assert tiers(w.look_up(1, 2, 3)) == [[1, 2, 2]], "it is known now"
    assert w.state.counters.hits_l2 == 4
    assert tiers(w.look_up(1)) == [[1]]
    assert w.calls == {}


def test_l2_has_10_ms_to_answer_and_is_believed_later() -> None:
    w = world(10, 2)
    w.store(1, 1)
    w.look_up(1, 2)
    w.look_up(1, 2)  # the same again: one answer
    assert tiers(w.wait(LOOKUP_US - 1)) == []
    assert tiers(w.wait(1)) == [[1, 0]]
    assert tiers(w.end_all()) == []
    assert tiers(w.look_up(1, 2)) == [[1, 2]]


def test_a_far_l2_has_twice_its_usual_time_to_answer() -> None:
    w = world(10, 1)
    for _ in range(16):
        w.look_up(2)
        w.wait(20_000)  # on the way there and back
        w.end_all(kinds=[L2Has])
    assert w.look_up(1) == []
    assert tiers(w.wait(30_000)) == []
    assert tiers(w.end_all(kinds=[L2Has])) == [[2]]
    for _ in range(16):
        w.look_up(2)
        w.wait(400_000)
        w.end_all(kinds=[L2Has])
    w.look_up(3)
    assert tiers(w.wait(MOST_LOOKUP_US)) == [[0]]


def test_two_lookups_run_at_a_time_and_one_that_waits_too_long_is_dropped() -> None:
    w = world()
    for job in range(4):
        w.look_up(10 + job, job=job)
    assert len(w.in_flight(L2Has)) == 2
    w.wait(LOOKUP_US)
    assert w.state.counters.lookups == 4
    w.end_all()
    assert w.state.l2.wants == type(w.state.l2.wants)()


def test_promote_fetches_the_values_at_once() -> None:
    w = world(10, 1, 2)
    w.look_up(1, 2, 3, promote=True)
    w.end_all(kinds=[L2Has])
    assert len(w.in_flight(L2Get)) == 2
    w.end_all()
    answer = readies(w.prefetch(1, 1, 2))[0]
    assert (answer.status, answer.from_l2, list(answer.valid_tokens)) == ("ok", 0, [16, 16])
    w.read(answer, 1, 2)
    assert w.state.counters.promotions == 2
    assert tiers(w.look_up(1, 2)) == [[1, 1]]


def test_values_of_unknown_length_cannot_be_had() -> None:
    w = world(10, 1)
    w.look_up(1)
    (call,) = w.in_flight(L2Has)
    del w.calls[call]
    assert tiers(w.handle(L2Ended(call, present=(True,)))) == [[0]]


# ---- loads --------------------------------------------------------------------------------------


def known(w: World, *numbers: int) -> None:
    w.look_up(*numbers, prefix=False, job=999)
    w.end_all(kinds=[L2Has])


def test_prefetch_waits_for_l2_and_reports_what_it_fetched() -> None:
    w = world(10, 2, 3)
    w.store(1, 1)
    known(w, 2, 3)
    assert readies(w.prefetch(7, 1, 2, 3, 4)) == []
    w.prefetch(7, 1, 2, 3, 4)  # the same again
    w.wait(3_000)
    (answer,) = readies(w.end_all())
    assert (answer.job, answer.status, answer.from_l2, answer.took_us) == (7, "missing", 2, 3_000)
    assert answer.offsets[3] == -1
    w.read(answer, 1, 2, 3, 4)
    w.deliver(KvRelease(jobs=ints([7])))
    assert w.state.l1.pinned_bytes == 0


def test_prefetch_is_answered_at_its_deadline_with_the_blocks_present() -> None:
    w = world(10, 2, 3)
    w.store(1, 1)
    known(w, 2, 3)
    w.prefetch(7, 1, 2, 3, deadline_us=5_000)
    second = next(call for call in w.in_flight(L2Get) if w.calls[call].name[1] == key(3))  # type: ignore[union-attr]  # a get
    w.end(second)
    (answer,) = readies(w.wait(5_000))
    assert (list(answer.offsets), answer.from_l2) == ([0, -1, -1], 1)
    assert w.state.l1.pinned_bytes == PAGE, "of no use without the block before"
    w.end_all()
    assert tiers(w.look_up(1, 2, 3)) == [[1, 1, 1]], "late, and here for the next one"


def test_a_prefetch_without_time_takes_what_l1_has() -> None:
    w = world(10, 2)
    known(w, 2)
    assert readies(w.prefetch(7, 2, deadline_us=0))[0].status == "missing"
    assert w.calls == {}


def test_value_that_l2_has_lost_is_a_miss_and_is_reported() -> None:
    w = world(10, 1, 2, 3)
    known(w, 1, 2, 3)
    w.prefetch(7, 1, 2, 3)
    del w.remote[PRINT, key(2)]
    answers = w.end_all()
    (answer,) = readies(answers)
    assert (list(answer.offsets)[1:], answer.from_l2) == ([-1, -1], 1)
    assert [m for m in answers if isinstance(m, KvGone)] == [KvGone(keys=key(2))]
    assert (w.state.counters.l2_absent, w.state.l2.breaker.open) == (1, False)
    assert w.state.tier_of((PRINT, key(2))) == 0


def test_a_lost_head_ends_the_waiting_for_its_tail() -> None:
    w = world(10, 1, 2, 3)
    w.store(1, 3)
    known(w, 1, 2)
    w.prefetch(7, 1, 2, 3)
    del w.remote[PRINT, key(1)]
    (answer,) = readies(w.end(w.in_flight(L2Get)[0]))
    assert list(answer.offsets) == [-1, -1, -1]
    assert (w.state.l1.pinned_bytes, w.state.leases) == (0, {})


def test_a_damaged_value_is_deleted_counted_and_a_miss() -> None:
    w = world(10, 1)
    known(w, 1)
    w.prefetch(7, 1)
    (call,) = w.in_flight(L2Get)
    (answer,) = readies(w.end(call, "corrupt"))
    assert answer.status == "missing"
    assert len(w.in_flight(L2Delete)) == 1
    w.end_all()
    assert w.remote == {}
    assert (w.state.counters.corrupt, w.state.counters.promotions) == (1, 0)
    assert tiers(w.look_up(1)) == []
    assert tiers(w.end_all()) == [[0]]


def test_two_waiters_for_a_value_share_one_get_and_a_release_ends_the_waiting() -> None:
    w = world(10, 1, 2)
    known(w, 1, 2)
    for job in (5, 6, 7):
        w.prefetch(job, 1)
    assert len(w.in_flight(L2Get)) == 1
    w.deliver(KvRelease(jobs=ints([6])))
    answers = readies(w.end_all())
    assert [answer.job for answer in answers] == [5, 7]
    w.deliver(KvRelease(jobs=ints([5, 7])))
    assert w.state.l1.pinned_bytes == 0


def test_awaited_values_come_first_and_abandoned_values_not_at_all() -> None:
    w = world(60, *range(40))
    known(w, *range(40))
    w.look_up(*range(20), promote=True)
    data = dispatch.IN_FLIGHT - dispatch.LOOKUPS_IN_FLIGHT
    assert len(w.in_flight(L2Get)) == data
    w.prefetch(7, 19, 30)
    w.prefetch(8, 31)
    w.deliver(KvRelease(jobs=ints([8])))
    w.end(w.in_flight(L2Get)[0])
    w.end(w.in_flight(L2Get)[0])
    asked = [w.calls[call].name[1] for call in w.in_flight(L2Get)[-2:]]  # type: ignore[union-attr]  # gets
    assert asked == [key(19), key(30)]
    w.end_all()
    assert w.state.tier_of((PRINT, key(31))) == 2


def test_no_room_in_l1_is_a_miss() -> None:
    w = world(4, 1)
    w.reserve(1, 10, 11, 12, priority=1)
    known(w, 1)
    w.prefetch(7, 1)
    (answer,) = readies(w.end_all())
    assert (answer.status, w.state.counters.l2_gets) == ("missing", 1)


def test_the_dead_are_not_answered() -> None:
    w = world(10, 1)
    known(w, 1)
    w.prefetch(7, 1)
    w.look_up(5)
    w.handle(PeerLost(SCHEDULER))
    assert w.end_all() == []
    w.prefetch(8, 1, 2)
    w.look_up(6)
    w.handle(Restarted(SCHEDULER))
    assert w.end_all() == []
    assert w.state.l1.pinned_bytes == 0


# ---- copies to L2 -------------------------------------------------------------------------------


def test_a_value_is_copied_to_l2_on_its_second_use() -> None:
    w = world()
    w.store(1, 1, 2)
    assert w.calls == {}
    w.prefetch(2, 1)
    (call,) = w.in_flight(L2Put)
    assert w.calls[call] == L2Put(call, (PRINT, key(1)), bytes(31) + b"\1", PAGE, 0, announce=True)
    w.end(call)
    assert w.state.l2.presence.__contains__((PRINT, key(1)))
    w.store(3, 2)
    (call,) = w.in_flight(L2Put)
    assert w.calls[call].announce is False  # type: ignore[union-attr]  # a put
    w.end_all()
    w.prefetch(4, 1)
    assert w.calls == {}, "it is there"
    assert w.state.counters.l2_puts == 2


def test_blocks_that_l2_has_are_evicted_first_and_are_not_lost() -> None:
    w = world()
    w.store(1, 1, 2, 3)
    w.prefetch(2, 1)
    w.deliver(KvRelease(jobs=ints([2])))
    w.end_all()
    w.sent.clear()
    w.reserve(3, *range(10, 17))
    assert w.state.tier_of((PRINT, key(1))) == 2
    assert not [send for send in w.sent if isinstance(send.message, KvGone)]


def test_coldest_blocks_are_copied_once_l1_is_nearly_full_and_reused_blocks_first() -> None:
    w = world(20)
    w.store(1, *range(14))
    assert w.calls == {}
    w.prefetch(2, 5)
    w.deliver(KvRelease(jobs=ints([2])))
    w.end_all("failed", [L2Put])
    w.look_up(*range(14), job=3)  # 5 is as cold as its place
    w.store(4, 50)
    first, *rest = (w.calls[call].name[1] for call in w.in_flight(L2Put))  # type: ignore[union-attr]  # puts
    assert first == key(5)
    assert rest == [key(13), key(12)]
    w.end_all()
    assert len(w.remote) == 15, "a slow trickle, to the last"


def test_copies_stand_back_while_a_preempted_request_is_stored() -> None:
    w = world()
    w.store(1, 1)
    w.reserve(2, 2, priority=1)
    w.prefetch(3, 1)
    assert w.calls == {}
    w.commit(2, 1)
    assert len(w.in_flight(L2Put)) == 1


def test_few_copies_are_on_their_way_at_a_time() -> None:
    w = world(40)
    w.store(1, *range(10))
    w.prefetch(2, *range(10))
    assert len(w.in_flight(L2Put)) == dispatch.PUTS_IN_FLIGHT
    large = World(20_000, l2=True)
    size_bytes = dispatch.PUT_BYTES_IN_FLIGHT // 2 + PAGE
    large.store(1, 1, 2, value_bytes=size_bytes)
    large.prefetch(2, 1, 2)
    assert len(large.in_flight(L2Put)) == 1


def test_a_value_that_went_before_its_copy_began_is_not_copied() -> None:
    w = world(10)
    w.store(1, 1)
    w.reserve(2, 2, priority=1)
    w.prefetch(3, 1)
    w.deliver(KvRelease(jobs=ints([3])))
    w.reserve(4, *range(10, 19))
    w.deliver(KvRelease(jobs=ints([4, 2])))
    assert w.calls == {}


def test_a_value_that_is_being_sent_is_not_evicted() -> None:
    w = world(10)
    w.store(1, 1)
    w.prefetch(2, 1)
    w.deliver(KvRelease(jobs=ints([2])))
    assert w.reserve(3, *range(10, 19)).count(-1) == 1
    w.end_all()
    w.deliver(KvRelease(jobs=ints([3])))
    assert w.reserve(4, *range(10, 19)).count(-1) == 0


# ---- an L2 that fails ---------------------------------------------------------------------------


def test_three_failures_in_a_row_end_all_waiting_at_once() -> None:
    w = world(10, 1)
    known(w, 1)
    for number in range(3):
        w.look_up(100 + number, job=number)
    w.prefetch(7, 1)
    for call in w.in_flight(L2Has)[:2]:
        w.end(call, "failed")
    assert readies([s.message for s in w.sent]) == []
    (call,) = w.in_flight(L2Has)
    answers = w.end(call, "failed")
    assert tiers(answers) == [[0]]
    assert readies(answers)[0].status == "missing"
    assert w.state.counters.l2_errors == 3
    asked = len(w.calls)
    assert tiers(w.look_up(1)) == [[0]]
    assert readies(w.prefetch(8, 1))[0].status == "missing"
    assert len(w.calls) == asked, "nothing of a request touches L2"


def test_l2_that_refuses_values_is_read_from_and_probed_once_a_second() -> None:
    w = world(10, 1)
    w.store(1, 50, 51, 52, 53)
    w.prefetch(2, 50, 51, 52, 53)
    assert len(w.in_flight(L2Put)) == dispatch.PUTS_IN_FLIGHT
    for call in w.in_flight(L2Put):
        w.end(call, "refused")
    assert (w.state.l2.breaker.open, w.state.counters.l2_refused, w.state.counters.l2_errors) == (False, 3, 0)
    known(w, 1)
    w.prefetch(3, 1)
    assert [w.calls[call].name[1] for call in w.in_flight(L2Get)] == [key(1)]  # type: ignore[union-attr]  # a get
    w.wait(dispatch.REFUSED_US - 1)
    assert w.in_flight(L2Put) == []
    w.wait(1)
    (call,) = w.in_flight(L2Put)
    w.end(call, "refused")
    w.wait(dispatch.REFUSED_US)
    w.store(4, 54, 55, 56)
    w.prefetch(5, 54, 55, 56)
    (call,) = w.in_flight(L2Put)
    w.end(call)
    assert len(w.in_flight(L2Put)) == 2, "it has room again"
    assert (w.state.counters.l2_refused, w.state.counters.l2_puts) == (4, 1)


def test_calls_that_hang_are_given_up_and_open_the_breaker() -> None:
    w = world(10, 1)
    w.store(1, 50)
    w.prefetch(2, 50)
    for job in range(3):
        w.look_up(1, job=job)
    w.wait(5 * SECOND)
    assert w.state.l2.calls == {}
    assert w.in_flight(L2Has) == w.in_flight(L2Put) == []
    assert w.state.counters.l2_timeouts == 4
    assert w.state.l2.breaker.open
    assert w.handle(L2Ended(1)) == [], "too late"
    assert w.reserve(9, *range(10, 19)).count(-1) == 0, "nothing is kept for the put any more"


def test_l1_answers_while_l2_hangs() -> None:
    w = world(20, 1)
    w.store(1, 10, 11)
    for at in range(200):
        w.look_up(1, job=2_000 + at)
        assert tiers(w.look_up(10, 11, job=at)) == [[1, 1]]
        assert readies(w.prefetch(5_000 + at, 10, 11))[0].status == "ok"
        w.deliver(KvRelease(jobs=ints([5_000 + at])))
        w.wait(20_000)
    assert w.state.counters.lookups == 600
    assert w.state.l1.pinned_bytes == 0


def test_a_canary_once_a_second_brings_it_back_with_an_empty_memory() -> None:
    w = world(10, 1)
    known(w, 1)
    opened(w)
    w.wait(PROBE_US)
    (canary,) = w.in_flight(L2Probe)
    w.end(canary, "failed")
    w.wait(PROBE_US)
    (canary,) = w.in_flight(L2Probe)
    w.end(canary)
    assert not w.state.l2.breaker.open
    assert len(w.state.l2.presence) == 0
    assert tiers(w.look_up(1)) == [], "asked anew"
    assert tiers(w.end_all()) == [[2]]


def test_core_makes_no_l2_call_without_an_l2() -> None:
    w = World()
    w.store(1, 1)
    w.prefetch(2, 1)
    assert tiers(w.look_up(1, 2)) == [[1, 0]]
    assert w.calls == {}
    assert not w.state.l2.is_usable


def test_a_queue_drops_its_oldest() -> None:
    names: dict[object, None] = {}
    w = world()
    for number in range(WAITING + 1):
        queue(w.state.l2.early, (PRINT, key(number)))
    names.update(w.state.l2.early)
    assert len(names) == WAITING
    assert (PRINT, key(0)) not in names


# ---- the core in a simulation -------------------------------------------------------------------


def test_the_virtual_tiers_move_bytes_at_their_rate() -> None:
    l2 = VirtualL2(bytes_per_s=PAGE * 1_000, call_us=100)  # 1 ms a block
    first, second = (VirtualKv(Arena(100 * PAGE), l2) for _ in range(2))
    fields = {"owner": EXECUTOR, "lease_us": SECOND, "fingerprint": PRINT}
    first.arrive(SCHEDULER, 1, KvReserve(job=1, keys=keys(1, 2), value_bytes=PAGE, **fields), 0)
    first.arrive(SCHEDULER, 1, KvCommit(job=1, written=ints([1, 1])), 0)
    first.arrive(SCHEDULER, 1, KvPrefetch(job=2, keys=keys(1, 2), deadline_us=1, **fields), 0)
    assert first.due_us() == 1_100
    first.tick(2_100)
    assert len(l2.values) == 2

    second.arrive(SCHEDULER, 1, KvLookup(job=3, keys=keys(1, 2), fingerprint=PRINT), 10_000)
    (found,) = second.tick(10_100)
    assert found.message == KvFound(job=3, tiers=ints([2, 2]))
    ask = KvPrefetch(job=4, keys=keys(1, 2), deadline_us=50_000, **fields)
    assert second.arrive(SCHEDULER, 1, ask, 20_000) == []
    assert second.tick(22_099) == []
    (answer,) = second.tick(second.due_us() or 0)
    assert isinstance(answer.message, KvReady)
    assert (answer.message.took_us, answer.message.from_l2) == (2_100, 2)
    assert second.core.state.l2.get_rate.bytes_per_s == PAGE * 2 * SECOND // 2_100


def test_a_virtual_l2_that_is_full_loses_its_oldest() -> None:
    l2 = VirtualL2(capacity_bytes=PAGE)
    for call, number in enumerate((1, 2, 2)):
        l2.run(L2Put(call, (PRINT, key(number)), b"", PAGE, 16), 0)
    assert list(l2.values) == [(PRINT, key(2))]
    assert l2.run(L2Get(5, (PRINT, key(1)), PAGE), 0)[1] == L2Ended(5, "absent")
    l2.run(L2Delete(6, (PRINT, key(2))), 0)
    assert (l2.values, l2.used_bytes) == ({}, 0)
    assert l2.run(L2Probe(7), 0)[1] == L2Ended(7)
