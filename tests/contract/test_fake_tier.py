"""The fakes of the tiers keep the contract themselves: leases, quarantine, L2 and its deadline, fences."""

from __future__ import annotations

from collections import deque

import pytest
from support.executor.paged_engine import PagedEngine
from support.scheduler.fake_tier import WRONG, FakeTier, leased_jobs
from support.scheduler.tier_side import Pending
from support.scheduler.world import World

from shared.messages import (
    ExecHello,
    KvCommit,
    KvCopy,
    KvFound,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvRelease,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    SlotOpen,
    ints,
    longs,
)

KEYS = [bytes([number]) * 32 for number in range(10)]
SIZE = 256


def ask(tier: FakeTier, message: Message, now_us: int = 0) -> Message | None:
    """Its answer, if there is one at once."""
    tier.handle("s", message, now_us)
    answers = [answer for _, answer in tier.replies if not isinstance(answer, KvGone)]
    tier.replies.clear()
    return answers[0] if answers else None


def reserve(job: int, *numbers: int, lease_us: int = 1_000) -> KvReserve:
    keys = b"".join(KEYS[number] for number in numbers)
    return KvReserve(job=job, owner="executor.e1", keys=keys, value_bytes=SIZE, lease_us=lease_us)


def prefetch(job: int, *numbers: int, deadline_us: int = 500) -> KvPrefetch:
    keys = b"".join(KEYS[number] for number in numbers)
    return KvPrefetch(job=job, owner="executor.e1", keys=keys, deadline_us=deadline_us, lease_us=1_000)


def lookup(*numbers: int, promote: bool = False) -> KvLookup:
    return KvLookup(job=99, keys=b"".join(KEYS[number] for number in numbers), promote=promote)


def tiers_of(found: Message | None) -> list[int]:
    assert isinstance(found, KvFound | KvStored)
    return list(found.tiers)


def offsets_of(answer: Message | None) -> list[int]:
    assert isinstance(answer, KvReserved | KvReady)
    return list(answer.offsets)


def store(tier: FakeTier, job: int, *numbers: int, now_us: int = 0) -> None:
    """Each key's block holds its number four times."""
    offsets = offsets_of(ask(tier, reserve(job, *numbers), now_us))
    for number, offset in zip(numbers, offsets, strict=True):
        if offset >= 0:
            tier.arena.ranges[offset] = [number] * 4
    ask(tier, KvCommit(job=job, written=ints(int(offset >= 0) for offset in offsets)), now_us)


def test_a_key_is_readable_after_its_commit() -> None:
    tier = FakeTier(4, SIZE)
    assert offsets_of(ask(tier, reserve(1, 0, 1))) == [0, 256]
    assert tiers_of(ask(tier, lookup(0, 1))) == [0, 0]
    assert offsets_of(ask(tier, reserve(1, 0, 1))) == [0, 256]  # asked again
    assert tiers_of(ask(tier, KvCommit(job=1, written=ints([1, 0])))) == [1, 0]
    assert tiers_of(ask(tier, lookup(0, 1))) == [1, 0]
    assert offsets_of(ask(tier, reserve(2, 0, 1))) == [-2, 256]
    ask(tier, KvRelease(jobs=ints([2])))
    tier.check()
    assert leased_jobs([tier]) == []


def test_the_least_recently_used_goes_first_and_never_a_leased_one() -> None:
    tier = FakeTier(2, SIZE)
    store(tier, 1, 0, 1)
    assert offsets_of(ask(tier, prefetch(2, 0))) == [0]
    store(tier, 3, 2)
    assert tiers_of(ask(tier, lookup(0))) == [1]
    assert tiers_of(ask(tier, lookup(1))) == [0]
    assert tier.arena.ranges == {0: [0] * 4, 256: [2] * 4}
    assert offsets_of(ask(tier, reserve(4, 3, 4))) == [256, -1]
    ask(tier, KvRelease(jobs=ints([2, 4])))
    assert offsets_of(ask(tier, reserve(5, 3, 4))) == [256, 0]
    assert tier.arena.ranges[0] == [WRONG]


def test_fake_tier_reports_lost_keys_to_every_scheduler() -> None:
    tier = FakeTier(1, SIZE)
    store(tier, 1, 0)
    tier.handle("s", reserve(2, 1), 0)
    assert tier.replies[0][1] == KvGone(keys=KEYS[0])


def test_an_expired_reservation_is_not_given_out() -> None:
    tier = FakeTier(1, SIZE)
    assert offsets_of(ask(tier, reserve(1, 0), 0)) == [0]
    assert offsets_of(ask(tier, reserve(2, 1), 5_000)) == [-1]
    assert tiers_of(ask(tier, KvCommit(job=1, written=ints([1])), 5_000)) == [0]
    assert offsets_of(ask(tier, reserve(3, 1), 5_000)) == [0]
    tier.advance(50_000)
    tier.owner_gone("executor.e1")
    tier.check()
    assert leased_jobs([tier]) == []


def test_fake_tier_finds_keys_of_l2_after_a_while() -> None:
    tier = FakeTier(2, SIZE, l2_us=300)
    store(tier, 1, 0, 1)
    tier.restart(2, 0)
    assert tiers_of(ask(tier, lookup(0, 1, 2))) == [2, 2, 0]
    assert ask(tier, prefetch(2, 0, 1, 2), 1_000) is None
    assert tier.next_us == 1_300
    tier.advance(1_300)
    ready = tier.replies.popleft()[1]
    assert offsets_of(ready) == [0, 256, -1]
    assert isinstance(ready, KvReady)
    assert (ready.took_us, ready.from_l2, ready.arena_generation, ready.status) == (300, 2, 2, "missing")
    assert tier.arena.ranges == {0: [0] * 4, 256: [1] * 4}


def test_a_deadline_is_kept_and_the_value_comes_later() -> None:
    tier = FakeTier(2, SIZE, l2_us=800)
    store(tier, 1, 0)
    tier.restart(2, 0)
    assert ask(tier, prefetch(2, 0, deadline_us=500), 0) is None
    tier.advance(500)
    assert offsets_of(tier.replies.popleft()[1]) == [-1]
    assert offsets_of(ask(tier, prefetch(3, 0), 800)) == [0]


def test_a_lookup_promotes() -> None:
    tier = FakeTier(2, SIZE, l2_us=300)
    store(tier, 1, 0)
    tier.restart(2, 0)
    assert tiers_of(ask(tier, lookup(0, promote=True), 0)) == [2]
    assert tiers_of(ask(tier, lookup(0), 300)) == [1]


def test_a_frozen_one_answers_when_it_thaws() -> None:
    tier = FakeTier(2, SIZE)
    tier.frozen = True
    assert ask(tier, lookup(0)) is None
    tier.thaw(10)
    assert tiers_of(tier.replies.popleft()[1]) == [0]


@pytest.mark.parametrize("switch", ["no_room", "missing", "lossy"])
def test_switches_change_the_fake_tier(switch: str) -> None:
    tier = FakeTier(2, SIZE)
    store(tier, 1, 0)
    setattr(tier, switch, True)
    found = offsets_of(ask(tier, prefetch(2, 0)))
    reserved = offsets_of(ask(tier, reserve(3, 1)))
    marks = ints(int(offset >= 0) for offset in reserved)
    stored = tiers_of(ask(tier, KvCommit(job=3, written=marks)))
    assert (found, reserved, stored) == {
        "no_room": ([0], [-1], [0]),
        "missing": ([-1], [256], [1]),
        "lossy": ([0], [256], [0]),
    }[switch]


def hello() -> ExecHello:
    return ExecHello(
        executor="e1", exec_epoch=1, host_id="h", model="m", fingerprint="f", vocab_digest="v", vocab=1000,
        blocks=8, block_tokens=4, slots=2, max_step_tokens=64, max_context=64, bytes_per_block=SIZE,
    )  # fmt: skip


def copy(job: int, to_arena: bool, blocks: list[int], offsets: list[int], after_step: int = 0) -> KvCopy:
    return KvCopy(
        job=job, to_arena=to_arena, after_step=after_step, arena_generation=1, blocks=ints(blocks),
        offsets=longs(offsets), block_bytes=SIZE,
    )  # fmt: skip


def test_an_engine_copies_there_and_back() -> None:
    engine, tier = PagedEngine(hello()), FakeTier(4, SIZE)
    assert engine.copy(copy(1, True, [2], [0])).status == "no_arena"
    engine.arena = tier.arena
    engine.blocks[2] = [1, 2, 3, 4]
    assert engine.copy(copy(1, True, [2], [256])).status == "ok"
    assert engine.copy(copy(2, False, [5, 6], [256, 512])).bytes == 512
    assert engine.blocks[5:7] == [[1, 2, 3, 4], [WRONG] * 4]
    tier.restart(2, 0)
    engine.arena = tier.arena
    assert engine.copy(copy(3, True, [2], [0])).status == "stale_arena"


def test_a_copy_that_fails_has_moved_half() -> None:
    engine = PagedEngine(hello())
    engine.arena = FakeTier(4, SIZE).arena
    engine.arena.ranges |= {0: [1] * 4, 256: [2] * 4}
    engine.copy_fails = True
    done = engine.copy(copy(1, False, [0, 1], [0, 256]))
    assert (done.status, done.bytes, engine.blocks[:2]) == ("failed", 256, [[1] * 4, [-1] * 4])


STEPS = {7: ({1, 2, 3}, {3}, {0})}  # it names three blocks, writes one, and copies one for a fork


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (copy(2, False, [2], [0]), "that step 7 names"),
        (copy(2, False, [0], [0]), "that step 7 copies"),
        (copy(2, False, [4], [0]), "in the table of slot 0"),
        (copy(2, True, [3], [0], after_step=6), "still to write"),
        (copy(2, True, [1], [0], after_step=9), "that was never planned"),
        (copy(2, False, [6], [0]), "two copies of a block"),
        (copy(1, True, [5], [0]), "two copies of one job"),
    ],
)
def test_copies_wait_for_their_fences(made: KvCopy, what: str) -> None:
    world, engine = World(), PagedEngine(hello())
    engine.step = 7
    engine.open(SlotOpen(slot=0, generation=1, seq=1, prompt_tokens=1, tokens=ints([1])))
    engine.slots[0].table = [4]
    world.side.copies["e1"] = deque([Pending(copy(1, True, [6], [0]))])
    world.side.fence(copy(3, True, [3, 6], [0, 256], after_step=7), engine, "e1", STEPS)
    world.side.fence(copy(3, False, [5], [0]), engine, "e1", STEPS)
    world.side.fence(copy(3, False, [0], [0], after_step=7), engine, "e1", STEPS)
    with pytest.raises(AssertionError, match=what):
        world.side.fence(made, engine, "e1", STEPS)


def test_a_step_leaves_blocks_of_copies_alone() -> None:
    world = World()
    side = world.side
    side.copies["e1"] = deque([Pending(copy(1, True, [6], [0])), Pending(copy(2, False, [5], [0]))])
    side.planned("e1", {6, 7}, {7})
    with pytest.raises(AssertionError, match="that a store still reads"):
        side.planned("e1", {6}, {6})
    with pytest.raises(AssertionError, match="that a load still writes"):
        side.planned("e1", {5}, set())
    with pytest.raises(AssertionError, match="while its copy is under way"):
        side.take(KvRelease(jobs=ints([2])), 0)
