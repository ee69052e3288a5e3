"""What the halves of a step in a graph did when: read from the clock that its kernels wrote."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor

from services.executor.cuda import comm_overlap
from services.executor.cuda.comm_overlap import TimestampSegmentTimer
from services.executor.engine import MAX_SEGMENTS, Segment


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> TimestampSegmentTimer:
    """Each time the clock is written it has moved on by 3 us."""
    clock_ns = count(1_000_000, 3_000)

    def write(target: Tensor) -> None:
        target[0] = next(clock_ns)

    monkeypatch.setattr(comm_overlap, "record_timestamp", write)
    return TimestampSegmentTimer(torch.device("cpu"))


def test_pieces_are_counted_from_the_first(notes: TimestampSegmentTimer) -> None:
    with notes.segment(0), notes.segment(2):  # from 0 to 9, and from 3 to 6
        pass
    with notes.segment(1):  # from 12 to 15
        pass
    assert notes.segments(notes.times) == (Segment(0, 0, 9), Segment(2, 3, 3), Segment(1, 12, 3))


def test_a_replay_writes_the_same_places_anew(notes: TimestampSegmentTimer) -> None:
    with notes.segment(3):
        pass
    with notes.segment(0):
        pass
    left = torch.full_like(notes.times, -1)  # those of pieces that were not noted mean nothing
    left[:2] = torch.tensor([[70_000, 75_900], [80_000, 81_000]])
    assert notes.segments(left) == (Segment(3, 0, 5), Segment(0, 10, 1))


def test_only_the_first_ones_are_noted(notes: TimestampSegmentTimer) -> None:
    for _ in range(MAX_SEGMENTS + 3):
        with notes.segment(0):
            pass
    assert len(notes.segments(notes.times)) == MAX_SEGMENTS
    assert int(notes.times[-1, 1]) == 1_000_000 + 3_000 * (2 * MAX_SEGMENTS - 1)
