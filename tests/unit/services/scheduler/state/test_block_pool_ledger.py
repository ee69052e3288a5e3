"""The ledger by hand: fences, shares, promises, prefix cache. test_block_pool_machine.py has the rest."""

from __future__ import annotations

import pytest

from services.scheduler.state.block_pool import Ledger


def ledger_of(blocks: int, slots: int = 4) -> Ledger:
    return Ledger(blocks=blocks, slots=slots, block_tokens=4)


def take(ledger: Ledger, blocks: int) -> list[int]:
    ledger.reserve(blocks)
    return [ledger.allocate() for _ in range(blocks)]


def test_blocks_are_reused_only_behind_their_last_step() -> None:
    ledger = ledger_of(4)
    blocks, slot = take(ledger, 3), ledger.take_slot()
    assert (sorted(blocks), slot) == ([0, 1, 2], 0)
    ledger.release(blocks, [slot], last_step=7)
    assert (ledger.free_blocks, ledger.free_slots, ledger.fenced_blocks) == (1, 3, 3)
    ledger.acknowledge(6)
    assert ledger.free_blocks == 1
    ledger.acknowledge(7)
    assert (ledger.free_blocks, ledger.free_slots, ledger.fenced_blocks) == (4, 4, 0)
    ledger.release(take(ledger, 2), [], last_step=7)  # nothing in flight names them
    assert (ledger.free_blocks, ledger.fenced_blocks) == (4, 0)


def test_promises_count_as_taken() -> None:
    ledger = ledger_of(4, slots=1)
    assert ledger.can_admit(4, 1)
    assert not ledger.can_admit(5, 1)
    assert not ledger.can_admit(1, 2)
    ledger.reserve(3)
    assert ledger.can_admit(1, 1)
    assert not ledger.can_admit(2, 1)
    ledger.allocate()
    assert not ledger.can_admit(2, 1)
    ledger.unreserve(2)
    assert ledger.can_admit(3, 1)


def test_fenced_blocks_cannot_be_promised() -> None:
    ledger = ledger_of(4)
    ledger.release(take(ledger, 4), [], last_step=1)
    assert not ledger.can_admit(1, 0)
    ledger.acknowledge(1)
    assert ledger.can_admit(4, 0)


def test_a_shared_block_is_free_when_its_last_holder_has_gone() -> None:
    ledger = ledger_of(2)
    (block,) = take(ledger, 1)
    ledger.share(block)
    ledger.release([block], [], last_step=0)
    assert ledger.free_blocks == 1
    ledger.release([block], [], last_step=3)
    assert (ledger.free_blocks, ledger.fenced_blocks) == (1, 1)
    ledger.acknowledge(3)
    assert ledger.free_blocks == 2


def test_the_end_of_a_table_is_reused_first() -> None:
    ledger = ledger_of(6)
    table = take(ledger, 3)
    ledger.release(table, [], last_step=0)
    assert take(ledger, 1) == table[:1]  # LIFO: what was given back last, the prefix, is on top


def keys_of(name: str) -> list[bytes]:
    """One key for each character: what stands before it is part of it."""
    return [name[: i + 1].encode() for i in range(len(name))]


def serve(ledger: Ledger, name: str, last_step: int = 0) -> list[int]:
    """One sequence from its prefix hit to its end; the blocks it had."""
    table = ledger.match(keys_of(name))
    ledger.adopt(table)
    for key in keys_of(name)[len(table) :]:
        block = ledger.try_allocate()
        assert block is not None
        ledger.register(block, key)
        table.append(block)
    ledger.release(table, [], last_step)
    ledger.check()
    return table


def test_a_prefix_hit_ends_at_the_first_unknown_block() -> None:
    ledger = ledger_of(8)
    abc = serve(ledger, "abc")
    assert ledger.match(keys_of("abx")) == abc[:2]
    assert ledger.match(keys_of("xbc")) == ledger.match([]) == []
    assert ledger.match([b"x", b"a"]) == []
    assert ledger.find(b"ab") == abc[1]
    assert ledger.find(b"b") is None
    assert serve(ledger, "abcd")[:3] == abc
    assert (ledger.free_blocks, ledger.cached_blocks, ledger.held_blocks) == (8, 4, 0)


def test_empty_blocks_go_first_then_the_oldest_release_tail_first() -> None:
    ledger = ledger_of(8)
    abc, xy = serve(ledger, "abc"), serve(ledger, "xy")
    serve(ledger, "ab")  # used again: only its c is still older than xy
    out = [ledger.try_allocate() for _ in range(9)]
    assert sorted(out[:3]) == sorted(set(range(8)) - {*abc, *xy})
    assert out[3:] == [abc[2], xy[1], xy[0], abc[1], abc[0], None]
    assert (ledger.evicted, ledger.cached_blocks, ledger.held_blocks) == (5, 0, 8)
    assert ledger.match(keys_of("abc")) == []


def test_a_fenced_block_can_be_revived_and_goes_back_behind_its_latest_step() -> None:
    ledger = ledger_of(4)
    table = serve(ledger, "abc", last_step=5)
    assert (ledger.fenced_blocks, ledger.cached_blocks, ledger.free_taken_by(table)) == (3, 0, 0)
    ledger.adopt(ledger.match(keys_of("ab")))
    assert (ledger.fenced_blocks, ledger.held_blocks, ledger.free_blocks) == (1, 2, 1)
    ledger.acknowledge(5)
    assert (ledger.fenced_blocks, ledger.held_blocks, ledger.free_blocks) == (0, 2, 2)
    ledger.release(table[:2], [], last_step=7)
    ledger.acknowledge(6)
    ledger.check()
    assert (ledger.fenced_blocks, ledger.free_blocks, ledger.cached_blocks) == (2, 2, 1)
    ledger.acknowledge(7)
    assert (ledger.fenced_blocks, ledger.free_blocks, ledger.cached_blocks) == (0, 4, 3)


@pytest.mark.parametrize("last_step", [0, 5])
def test_a_later_holder_without_a_later_step_does_not_lift_the_fence(last_step: int) -> None:
    """One step names a block, one who came for its prefix was never planned: the step still counts."""
    ledger = ledger_of(2)
    table = serve(ledger, "ab", last_step=5)
    ledger.adopt(table)
    ledger.release(table, [], last_step)
    ledger.check()
    assert (ledger.fenced_blocks, ledger.free_blocks) == (2, 0)
    ledger.acknowledge(5)
    ledger.check()
    assert [ledger.try_allocate(), ledger.try_allocate()] == [table[1], table[0]]


def test_an_acknowledgement_that_comes_late_changes_nothing() -> None:
    ledger = ledger_of(2)
    ledger.acknowledge(5)
    ledger.acknowledge(3)
    assert ledger.acked_step == 5
    serve(ledger, "ab", last_step=4)
    assert ledger.free_blocks == 2


def test_adopting_cached_blocks_counts_against_promises() -> None:
    ledger = ledger_of(4)
    ab = serve(ledger, "ab")
    ledger.reserve(2)
    assert ledger.free_taken_by(ab) == 2
    assert ledger.can_admit(0, 1, taken=2)
    assert not ledger.can_admit(1, 1, taken=2)
    ledger.adopt(ab)
    assert ledger.free_taken_by(ab) == 0
    ledger.check()
    assert ledger.try_allocate() is None  # what is free is promised
    assert len({ledger.allocate(), ledger.allocate(), *ab}) == 4
    assert (ledger.reserved, ledger.held_blocks, ledger.evicted) == (0, 4, 0)


def test_the_first_block_with_a_key_keeps_it() -> None:
    ledger = ledger_of(3)
    first, second = take(ledger, 2)
    assert ledger.register(first, b"a")
    assert not ledger.register(second, b"a")
    assert ledger.register(first, b"a")
    ledger.check()
    ledger.release([second], [], 0)
    assert (ledger.cached_blocks, ledger.match([b"a"])) == (0, [first])
    ledger.release([first], [], 0)
    assert (ledger.cached_blocks, ledger.match([b"a"])) == (1, [first])


def test_only_a_held_block_takes_a_key_and_only_one() -> None:
    ledger = ledger_of(2)
    (block,) = take(ledger, 1)
    ledger.register(block, b"a")
    for wrong, key in [(block, b"b"), (1 - block, b"c")]:
        with pytest.raises(ValueError, match=rf"block {wrong} cannot take a key"):
            ledger.register(wrong, key)
    ledger.check()
    assert ledger.find(b"b") is None
    assert ledger.find(b"c") is None


def test_an_empty_block_cannot_be_adopted() -> None:
    with pytest.raises(KeyError):
        ledger_of(2).adopt([1])


def test_after_a_failed_step_no_key_is_valid() -> None:
    ledger = ledger_of(6)
    serve(ledger, "ab")
    fenced = serve(ledger, "xy", last_step=3)
    (held,) = take(ledger, 1)
    ledger.register(held, b"h")
    ledger.forget_cache()
    ledger.check()
    assert [ledger.match([key]) for key in (b"a", b"x", b"h")] == [[], [], []]
    assert (ledger.cached_blocks, ledger.fenced_blocks, ledger.held_blocks) == (0, len(fenced), 1)
    assert ledger.register(held, b"h")  # computed again
    ledger.release([held], [], 3)
    ledger.acknowledge(3)
    ledger.check()
    assert (ledger.free_blocks, ledger.cached_blocks, ledger.evicted) == (6, 1, 0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ledger: ledger.release([0], [], 0), "a block was released twice"),
        (lambda ledger: ledger.reserve(5), "more is promised than there is"),
        (lambda ledger: ledger.unreserve(1), "more is promised than there is"),
    ],
)
def test_check_finds_what_is_wrong(spoil: object, message: str) -> None:
    ledger = ledger_of(4)
    ledger.check()
    assert callable(spoil)
    spoil(ledger)
    with pytest.raises(AssertionError, match=message):
        ledger.check()
