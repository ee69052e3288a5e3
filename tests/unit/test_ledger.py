"""The ledger: fences, shares and promises, by hand and against a model that keeps no free list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.ledger import Ledger


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


class LedgerAgainstModel(RuleBasedStateMachine):
    """Sequences hold lists of blocks; the model derives what must be free from them alone."""

    @initialize(blocks=st.integers(1, 12), slots=st.integers(1, 5))
    def start(self, blocks: int, slots: int) -> None:
        self.ledger = ledger_of(blocks, slots)
        self.step = self.acked = 0
        self.held: dict[int, tuple[list[int], int]] = {}  # slot -> its blocks, and its promise
        self.fenced: list[tuple[int, list[int], int]] = []  # last step, its blocks, its slot

    @property
    def promised(self) -> int:
        return sum(promise for _, promise in self.held.values())

    def locked_blocks(self) -> set[int]:
        held = {block for blocks, _ in self.held.values() for block in blocks}
        return held | {block for _, blocks, _ in self.fenced for block in blocks}

    @rule(blocks=st.integers(1, 6))
    def admit(self, blocks: int) -> None:
        room = self.ledger.blocks - len(self.locked_blocks()) - self.promised
        slots = self.ledger.slots - len(self.held) - len(self.fenced)
        fits = room >= blocks and slots >= 1
        assert self.ledger.can_admit(blocks, 1) == fits
        if fits:
            self.ledger.reserve(blocks)
            slot = self.ledger.take_slot()
            assert slot not in self.held
            assert slot not in [fence[2] for fence in self.fenced]
            self.held[slot] = ([], blocks)

    @precondition(lambda self: any(promise for _, promise in self.held.values()))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s, (_, promise) in self.held.items() if promise]))
        blocks, promise = self.held[slot]
        block = self.ledger.allocate()
        assert block not in self.locked_blocks(), "a block was given out twice"
        self.held[slot] = ([*blocks, block], promise - 1)

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A follower takes the leader's first blocks, which it was never promised."""
        leader, follower = data.draw(st.permutations(sorted(self.held)))[:2]
        if not self.held[follower][0]:
            blocks = self.held[leader][0][: data.draw(st.integers(0, 3))]
            for block in blocks:
                self.ledger.share(block)
            self.held[follower] = (list(blocks), self.held[follower][1])

    @rule()
    def plan(self) -> None:
        self.step += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        blocks, promise = self.held.pop(slot)
        self.ledger.unreserve(promise)
        self.ledger.release(blocks, [slot], self.step)
        if self.step > self.acked:
            self.fenced.append((self.step, blocks, slot))

    @precondition(lambda self: self.acked < self.step)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self.acked = data.draw(st.integers(self.acked + 1, self.step))
        self.ledger.acknowledge(self.acked)
        self.fenced = [fence for fence in self.fenced if fence[0] > self.acked]

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        assert self.ledger.reserved == self.promised
        assert self.ledger.free_slots == self.ledger.slots - len(self.held) - len(self.fenced)
        assert self.ledger.free_blocks == self.ledger.blocks - len(self.locked_blocks())


TestLedgerAgainstModel = LedgerAgainstModel.TestCase
TestLedgerAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
