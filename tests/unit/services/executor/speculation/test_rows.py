"""Rows with drafts: a row for each draft, and the tokens that are kept of them."""

from __future__ import annotations

from collections.abc import Callable, Set

import numpy as np
from numpy.typing import NDArray

from services.executor.engine import NO_DRAFT, Drafts
from services.executor.speculation.rows import DraftRows
from shared.messages import AT_DEVICE, FROM_DEVICE, Ints, SlotOpen, StepPlan, ints


class Scripted:
    """A drafter that answers with these drafts."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self.drafts = drafts

    def open(self, opened: SlotOpen) -> None: ...

    def close(self, slot: int) -> None: ...

    def draft(self, slots: list[int], most: int) -> NDArray[np.int32]:
        rows = np.full((len(slots), most), NO_DRAFT, np.int32)
        for row, slot in enumerate(slots):
            found = self.drafts.get(slot, [])[:most]
            rows[row, : len(found)] = found
        return rows


def plan(slots: list[int], starts: list[int], counts: list[int], fed: list[int]) -> StepPlan:
    return StepPlan(
        exec_epoch=1,
        step=1,
        mode="single",
        micro_batch=0,
        slots=ints(slots),
        starts=ints(starts),
        counts=ints(counts),
        from_device=ints(fed),
        sample_rows=ints(range(len(slots))),
        sample_slots=ints(slots),
    )


def rows_of(drafts: dict[int, list[int]], lengths: dict[int, int]) -> DraftRows:
    return DraftRows(Scripted(drafts), lambda slot: ints(range(lengths[slot])))


LENGTHS = {5: 41, 6: 10, 7: 21}


def test_spread_makes_a_row_for_each_draft() -> None:
    rows = rows_of({5: [70, 71, 72, 73], 7: [80]}, LENGTHS)
    planned = plan([5, 6, 7], [43, 9, 20], [3, 1, 4], [AT_DEVICE, FROM_DEVICE, AT_DEVICE])
    spread, drafts = rows.spread(planned, lambda slot: False)
    assert spread.slots == ints([5, 5, 5, 6, 7, 7])
    assert spread.starts == ints([40, 41, 42, 9, 20, 21])
    assert spread.counts == ints([1] * 6)
    assert spread.from_device == ints([1, 2, 2, 1, 1, 2])
    assert (spread.sample_rows, spread.sample_slots) == (ints(range(6)), spread.slots)
    assert drafts == Drafts(ints([70, 71, 80]), ints([2, 0, 1]))


def test_spread_places_rows_where_their_slots_are() -> None:
    rows = rows_of({}, LENGTHS)
    planned = plan([5, 7], [43, 25], [3, 1], [AT_DEVICE, AT_DEVICE])
    spread, drafts = rows.spread(planned, lambda slot: False)
    assert drafts is None
    assert (spread.starts, spread.counts, spread.from_device) == (ints([40, 20]), ints([1, 1]), ints([1, 1]))


def test_spread_gives_no_draft_to_a_slot_that_has_ended() -> None:
    rows = rows_of({5: [70], 7: [80]}, LENGTHS)
    spread, drafts = rows.spread(plan([5, 7], [40, 20], [2, 2], [2, 2]), lambda slot: slot == 5)
    assert spread.slots == ints([5, 7, 7])
    assert drafts == Drafts(ints([80]), ints([0, 1]))


Choose = Callable[[list[int], bool], tuple[Ints, Ints, dict[int, str]]]


def chooser(tokens: dict[int, int], ends: Set[int], fails: dict[int, str], asked: list[list[int]]) -> Choose:
    """By row of the step: its token, whether it ends its slot, why it fails."""

    def choose(rows: list[int], first: bool) -> tuple[Ints, Ints, dict[int, str]]:
        assert first == (not asked)
        asked.append(rows)
        ids = ints([-1 if row in fails else tokens[row] for row in rows])
        done = ints([2 if row in fails else int(row in ends) for row in rows])
        return ids, done, {at: fails[row] for at, row in enumerate(rows) if row in fails}

    return choose


DRAFTS = Drafts(ints([70, 71, 72, 80]), ints([3, 0, 1]))  # rows 0-3, 4, 5-6


Made = tuple[list[list[int]], list[int], dict[int, str], list[list[int]]]


def run(tokens: list[int], ends: Set[int] = frozenset(), fails: dict[int, str] | None = None) -> Made:
    asked: list[list[int]] = []
    made = rows_of({}, LENGTHS).choose(DRAFTS, chooser(dict(enumerate(tokens)), ends, fails or {}, asked))
    return made.ids, list(made.done), made.errors, asked


def test_choose_keeps_drafts_up_to_the_first_wrong_one() -> None:
    ids, done, errors, asked = run([70, 99, 72, 73, 5, 80, 6])
    assert (ids, done, errors) == ([[70, 99], [5], [80, 6]], [0, 0, 0], {})
    assert asked == [[0, 4, 5], [1, 6]]  # a place is chosen only after its drafts were right


def test_choose_keeps_all_drafts_if_all_are_right() -> None:
    ids, _, _, asked = run([70, 71, 72, 73, 5, 81, 6])
    assert ids == [[70, 71, 72, 73], [5], [81]]
    assert asked == [[0, 4, 5], [1], [2], [3]]


def test_choose_stops_at_a_token_that_ends_its_slot() -> None:
    ids, done, _, _ = run([70, 71, 72, 73, 5, 80, 6], ends={1, 4})
    assert (ids, done) == ([[70, 71], [5], [80, 6]], [1, 1, 0])


def test_choose_leaves_a_later_failure_to_the_next_step() -> None:
    ids, done, errors, _ = run([70, 71, 72, 73, 5, 80, 6], fails={1: "nan", 4: "nan"})
    assert (ids, done, errors) == ([[70], [-1], [80, 6]], [0, 2, 0], {1: "nan"})
