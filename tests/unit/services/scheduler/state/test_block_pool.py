"""The block pool by hand: fences, shared blocks, reservations, prefix cache.

test_block_pool_machine.py has the rest.
"""

from __future__ import annotations

import pytest

from services.scheduler.state.block_pool import BlockPool, end_kept, keep


def pool_of(blocks: int, slots: int = 4) -> BlockPool:
    return BlockPool(blocks=blocks, slots=slots, block_tokens=4)


def take(pool: BlockPool, blocks: int) -> list[int]:
    pool.reserve(blocks)
    return pool.allocate(blocks)


def test_blocks_are_reused_only_after_their_last_step() -> None:
    pool = pool_of(4)
    blocks, slot = take(pool, 3), pool.take_slot()
    assert (sorted(blocks), slot) == ([0, 1, 2], 0)
    pool.release(blocks, [slot], last_step=7)
    assert (pool.free_blocks, len(pool.free_slots), pool.fenced_blocks) == (1, 3, 3)
    pool.acknowledge(6)
    assert pool.free_blocks == 1
    pool.acknowledge(7)
    assert (pool.free_blocks, len(pool.free_slots), pool.fenced_blocks) == (4, 4, 0)
    pool.release(take(pool, 2), [], last_step=7)  # nothing in flight names them
    assert (pool.free_blocks, pool.fenced_blocks) == (4, 0)


def test_reserved_blocks_are_not_there_for_others() -> None:
    pool = pool_of(4)
    assert pool.unreserved_blocks == 4
    pool.reserve(3)
    assert pool.unreserved_blocks == 1
    assert pool.try_allocate(2) is None
    assert pool.try_allocate(3, reserved=1) is None
    assert (pool.reserved, pool.allocate(1)) == (3, [0])
    assert (pool.reserved, pool.unreserved_blocks) == (2, 1)
    assert pool.try_allocate(2, reserved=1) == [1, 2]
    assert (pool.reserved, pool.unreserved_blocks) == (1, 0)
    pool.unreserve(1)
    assert pool.unreserved_blocks == 1


def test_fenced_blocks_cannot_be_reserved() -> None:
    pool = pool_of(4)
    pool.release(take(pool, 4), [], last_step=1)
    assert pool.unreserved_blocks == 0
    pool.acknowledge(1)
    assert pool.unreserved_blocks == 4


def test_a_shared_block_is_free_when_its_last_holder_has_gone() -> None:
    pool = pool_of(2)
    (block,) = take(pool, 1)
    pool.adopt([block])
    pool.release([block], [], last_step=0)
    assert pool.free_blocks == 1
    pool.release([block], [], last_step=3)
    assert (pool.free_blocks, pool.fenced_blocks) == (1, 1)
    pool.acknowledge(3)
    assert pool.free_blocks == 2


def test_the_end_of_a_table_is_reused_first() -> None:
    pool = pool_of(6)
    table = take(pool, 3)
    pool.release(table, [], last_step=0)
    assert take(pool, 1) == table[:1]  # LIFO: what was given back last, the prefix, is on top


def keys_of(name: str) -> list[bytes]:
    """One key for each character: what stands before it is part of it."""
    return [name[: i + 1].encode() for i in range(len(name))]


def serve(pool: BlockPool, name: str, last_step: int = 0) -> list[int]:
    """One sequence from its prefix hit to its end; the blocks it had."""
    table = pool.match(keys_of(name))
    pool.adopt(table)
    for key in keys_of(name)[len(table) :]:
        block = pool.try_allocate()
        assert block is not None
        pool.register(block, [key])
        table += block
    pool.release(table, [], last_step)
    pool.check()
    return table


def test_a_prefix_hit_ends_at_the_first_unknown_block() -> None:
    pool = pool_of(8)
    abc = serve(pool, "abc")
    assert pool.match(keys_of("abx")) == abc[:2]
    assert pool.match(keys_of("xbc")) == pool.match([]) == []
    assert pool.match([b"x", b"a"]) == []
    assert pool.block_of.get(b"ab") == abc[1]
    assert pool.block_of.get(b"b") is None
    assert serve(pool, "abcd")[:3] == abc
    assert (pool.free_blocks, pool.cached_blocks, pool.held_blocks) == (8, 4, 0)


def test_empty_blocks_go_first_then_the_oldest_release_tail_first() -> None:
    pool = pool_of(8)
    abc, xy = serve(pool, "abc"), serve(pool, "xy")
    serve(pool, "ab")  # used again: only its c is still older than xy
    out = take(pool, 8)
    assert sorted(out[:3]) == sorted(set(range(8)) - {*abc, *xy})
    assert out[3:] == [abc[2], xy[1], xy[0], abc[1], abc[0]]
    assert pool.try_allocate() is None
    assert (pool.evicted, pool.cached_blocks, pool.held_blocks) == (5, 0, 8)
    assert pool.match(keys_of("abc")) == []


def test_fenced_block_can_be_revived_and_goes_back_after_its_latest_step() -> None:
    pool = pool_of(4)
    table = serve(pool, "abc", last_step=5)
    assert (pool.fenced_blocks, pool.cached_blocks, pool.free_taken_by(table)) == (3, 0, 0)
    pool.adopt(pool.match(keys_of("ab")))
    assert (pool.fenced_blocks, pool.held_blocks, pool.free_blocks) == (1, 2, 1)
    pool.acknowledge(5)
    assert (pool.fenced_blocks, pool.held_blocks, pool.free_blocks) == (0, 2, 2)
    pool.release(table[:2], [], last_step=7)
    pool.acknowledge(6)
    pool.check()
    assert (pool.fenced_blocks, pool.free_blocks, pool.cached_blocks) == (2, 2, 1)
    pool.acknowledge(7)
    assert (pool.fenced_blocks, pool.free_blocks, pool.cached_blocks) == (0, 4, 3)


@pytest.mark.parametrize("last_step", [0, 5])
def test_a_later_holder_without_a_later_step_does_not_lift_the_fence(last_step: int) -> None:
    """One step names a block, one that came for its prefix was never planned: the step still counts."""
    pool = pool_of(2)
    table = serve(pool, "ab", last_step=5)
    pool.adopt(table)
    pool.release(table, [], last_step)
    pool.check()
    assert (pool.fenced_blocks, pool.free_blocks) == (2, 0)
    pool.acknowledge(5)
    pool.check()
    assert pool.try_allocate(2) == [table[1], table[0]]


def test_an_acknowledgement_that_comes_late_changes_nothing() -> None:
    pool = pool_of(2)
    pool.acknowledge(5)
    pool.acknowledge(3)
    assert pool.acked_step == 5
    serve(pool, "ab", last_step=4)
    assert pool.free_blocks == 2


def test_adopting_cached_blocks_leaves_fewer_to_reserve() -> None:
    pool = pool_of(4)
    ab = serve(pool, "ab")
    pool.reserve(2)
    assert pool.free_taken_by(ab) == 2
    assert pool.unreserved_blocks == 2
    pool.adopt(ab)
    assert (pool.free_taken_by(ab), pool.unreserved_blocks) == (0, 0)
    pool.check()
    assert pool.try_allocate() is None  # what is free is reserved
    assert len({*pool.allocate(2), *ab}) == 4
    assert (pool.reserved, pool.held_blocks, pool.evicted) == (0, 4, 0)


def test_the_first_block_with_a_key_keeps_it() -> None:
    pool = pool_of(3)
    first, second = take(pool, 2)
    for block in (first, second, first):
        pool.register([block], [b"a"])
    assert (pool.key_of[first], pool.key_of[second]) == (b"a", None)
    pool.check()
    pool.release([second], [], 0)
    assert (pool.cached_blocks, pool.match([b"a"])) == (0, [first])
    pool.release([first], [], 0)
    assert (pool.cached_blocks, pool.match([b"a"])) == (1, [first])


def test_only_a_held_block_takes_a_key_and_only_one() -> None:
    pool = pool_of(2)
    (block,) = take(pool, 1)
    pool.register([block], [b"a"])
    for wrong, key in [(block, b"b"), (1 - block, b"c")]:
        with pytest.raises(ValueError, match=rf"block {wrong} cannot take a key"):
            pool.register([wrong], [key])
    pool.check()
    assert pool.block_of.get(b"b") is None
    assert pool.block_of.get(b"c") is None


def test_an_empty_block_cannot_be_adopted() -> None:
    with pytest.raises(KeyError):
        pool_of(2).adopt([1])


def test_no_key_is_valid_after_a_failed_step() -> None:
    pool = pool_of(6)
    serve(pool, "ab")
    fenced = serve(pool, "xy", last_step=3)
    (held,) = take(pool, 1)
    pool.register([held], [b"h"])
    pool.forget_cache()
    pool.check()
    assert [pool.match([key]) for key in (b"a", b"x", b"h")] == [[], [], []]
    assert (pool.cached_blocks, pool.fenced_blocks, pool.held_blocks) == (0, len(fenced), 1)
    pool.register([held], [b"h"])  # computed again
    pool.release([held], [], 3)
    pool.acknowledge(3)
    pool.check()
    assert (pool.free_blocks, pool.cached_blocks, pool.evicted) == (6, 1, 0)


def states(pool: BlockPool) -> dict[str, int]:
    """How many blocks are in which state, without those that are zero."""
    pool.check()
    names = ("held", "fenced", "stable", "copying", "dirty", "cached")
    counts = {name: getattr(pool, f"{name}_blocks") for name in names}
    counts["empty"] = pool.free_blocks - pool.cached_blocks
    return {name: count for name, count in counts.items() if count}


def test_a_tier_copies_what_the_pool_gives_out_next() -> None:
    pool = pool_of(3)
    pool.set_tier(True)
    a, ab = serve(pool, "ab")
    assert (states(pool), pool.free_blocks, list(pool.dirty)) == ({"dirty": 2, "empty": 1}, 1, [ab, a])
    pool.begin_copy([ab, a])
    assert states(pool) == {"copying": 2, "empty": 1}
    pool.mark_clean(ab, b"ab")
    pool.end_copy([ab, a])
    assert states(pool) == {"cached": 1, "dirty": 1, "empty": 1}
    assert (pool.give_up(a), pool.give_up(a)) == (True, False)
    assert states(pool) == {"cached": 2, "empty": 1}
    assert pool.try_allocate(3) == [2, ab, a]
    assert list(pool.lost) == [b"a"]  # the tier has ab


def test_block_lost_by_a_tier_is_dirty_again_unless_it_is_reserved() -> None:
    pool = pool_of(3)
    pool.set_tier(True)
    for block, key in zip(serve(pool, "abc"), keys_of("abc"), strict=True):
        pool.mark_clean(block, key)
    pool.reserve(2)
    pool.mark_lost_below(keys_of("abc"), pool.unreserved_blocks)
    assert (states(pool), pool.clean) == ({"cached": 2, "dirty": 1}, set())
    pool.forget(next(pool.dirty))
    assert states(pool) == {"cached": 2, "empty": 1}
    pool.set_tier(False)
    serve(pool, "x")
    assert states(pool) == {"cached": 3}


def test_stable_block_is_copied_after_its_fence() -> None:
    pool = pool_of(3)
    pool.set_tier(True)
    table = serve(pool, "abc", last_step=2)
    assert [*pool.dirty, *pool.stable] == []
    pool.mark_stable(table[:2])  # step 2 may still write to the last one
    assert states(pool) == {"fenced": 3, "stable": 2}
    pool.adopt(table[:1])
    assert (states(pool), [*pool.dirty, *pool.stable]) == ({"held": 1, "fenced": 2, "stable": 1}, table[1:2])
    pool.begin_copy(table[1:2])
    assert (states(pool), pool.copied_blocks) == ({"held": 1, "fenced": 2}, 1)
    pool.acknowledge(2)
    assert states(pool) == {"held": 1, "copying": 1, "dirty": 1}
    pool.mark_clean(table[1], b"ab")
    pool.end_copy(table[1:2])
    assert states(pool) == {"held": 1, "cached": 1, "dirty": 1}


def test_the_tail_of_a_preempted_sequence_is_writable_once_nothing_names_it() -> None:
    pool = pool_of(2)
    (block,) = take(pool, 1)
    pool.register_tail(block, b"tail", 3)
    pool.release([block], [], last_step=1, seq=7)
    assert (pool.valid_tokens, pool.writable(b"tail")) == ({block: 3}, None)
    pool.acknowledge(1)
    assert pool.writable(b"tail") == block
    pool.claim(block)
    assert (pool.key_of[block], pool.valid_tokens, pool.writable(b"tail")) == (None, {}, None)


def test_blocks_that_these_tables_hold_and_no_other() -> None:
    pool = pool_of(5)
    table = take(pool, 3)
    pool.adopt(table[:2])
    assert pool.held_only_by([table]) == 1
    assert pool.held_only_by([table, table[:1]]) == 2
    assert pool.held_only_by([table, table[:2]]) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool.release([0], [], 0), "a block was released twice"),
        (lambda pool: pool.reserve(5), "more is reserved than is free"),
        (lambda pool: pool.unreserve(1), "more is reserved than is free"),
    ],
)
def test_check_finds_what_is_wrong(spoil: object, message: str) -> None:
    pool = pool_of(4)
    pool.check()
    assert callable(spoil)
    spoil(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_kept_blocks_are_evicted_after_all_others_and_at_last_like_them() -> None:
    pool = pool_of(6)
    for name in "kept", "lru", "more":
        table = take(pool, 2)
        pool.register(table, [f"{name}{at}".encode() for at in range(2)])
        pool.release(table, [], last_step=0)
        if name == "kept":
            keep(pool, [b"kept0", b"kept1", b"kept2"], 100)
    keep(pool, [b"more1"], 200)
    keep(pool, [b"more1"], 50)  # the longest time counts
    end_kept(pool, 60)
    pool.check()
    assert (pool.free_blocks, pool.cached_blocks, pool.room[0]) == (6, 6, 6)
    order = []
    for _ in range(6):
        known = set(pool.block_of)
        take(pool, 1)
        order += known - set(pool.block_of)
        pool.check()
    assert order == [b"lru1", b"lru0", b"more0", b"kept1", b"kept0", b"more1"]
    assert pool.kept_until_us == {}


def test_kept_block_ranks_as_others_once_its_time_is_over() -> None:
    pool = pool_of(2)
    for name in b"a", b"b":
        table = take(pool, 1)
        pool.register(table, [name])
        keep(pool, [name], 100 if name == b"a" else 300)
        pool.release(table, [], last_step=0)
    end_kept(pool, 100)
    pool.check()
    take(pool, 1)
    assert [*pool.block_of] == [b"b"]
    end_kept(pool, 300)
    pool.check()
    assert pool.kept_until_us == {}


def test_kept_block_goes_through_copies_and_back_to_its_rank() -> None:
    pool = pool_of(3)
    pool.set_tier(True)
    table = take(pool, 2)
    pool.register(table, [b"a", b"b"])
    keep(pool, [b"a", b"b"], 100)
    pool.release(table, [], last_step=0)
    assert pool.dirty_blocks == 2
    pool.give_up(table[0], spent=True)  # spent blocks go first, but not kept ones
    assert pool.free_taken_by(table[:1]) == 1
    pool.begin_copy(table)
    pool.end_copy(table)
    pool.mark_clean(table[0], b"a")
    pool.check()
    pool.mark_lost_below([b"a"], 1)
    assert pool.dirty_blocks == 2
    pool.mark_clean(table[0], b"a")
    pool.adopt(table[:1])
    pool.release(table[:1], [], last_step=0)
    pool.forget(table[0])
    pool.check()
    assert [*pool.kept_until_us] == table[1:]
    pool.forget_cache()
    pool.check()
    assert pool.kept_until_us == {}
