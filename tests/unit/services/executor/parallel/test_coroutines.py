"""Programs on ranks of CPUs: one communicates while the other computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from services.executor.engine import MAX_SEGMENTS, Segment
from services.executor.parallel.coroutines import (
    Collective,
    CommThread,
    ForwardPass,
    HostSegmentTimer,
    run_interleaved,
)

WITHIN_S = 90.0


def run_in_turn(forward_passes: Sequence[ForwardPass]) -> list[Tensor]:
    """As `run_interleaved`, without overlap."""

    def start(forward_pass: int, collective: Collective) -> Callable[[], object]:
        collective()
        return lambda: None

    return run_interleaved(forward_passes, start)


@pytest.fixture
def lanes() -> Iterator[CommThread]:
    made = CommThread()
    yield made
    made.close()


def program(name: str, collectives: int, run_order: list[str]) -> ForwardPass:
    for i in range(collectives):
        run_order.append(f"{name}{i} computes")
        yield lambda i=i: run_order.append(f"{name}{i} talks")
    return torch.tensor([collectives])


def test_collective_runs_during_the_compute_of_the_other(lanes: CommThread) -> None:
    """A's first collective ends when B has computed, B's when A has gone on: neither in turn, nor a thread
    each."""
    computed = [threading.Event(), threading.Event()]

    def half(index: int) -> ForwardPass:
        if index:
            computed[0].set()
        yield lambda: computed[index].wait(WITHIN_S) or pytest.fail("nothing is computed meanwhile")
        if not index:
            computed[1].set()
        return torch.tensor([index])

    notes = HostSegmentTimer()
    found = lanes.run_interleaved([half(0), half(1)], notes)
    assert [int(each) for each in found] == [0, 1]
    assert sorted(piece.lane for piece in notes.segments()) == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("way", ["lanes", "in turn"])
def test_collectives_of_both_programs_run_in_one_order(way: str, lanes: CommThread) -> None:
    run_order: list[str] = []
    programs = [program("a", 3, run_order), program("b", 2, run_order)]
    found = run_in_turn(programs) if way == "in turn" else lanes.run_interleaved(programs, HostSegmentTimer())
    assert [int(each) for each in found] == [3, 2]
    assert [what for what in run_order if "talks" in what] == [
        "a0 talks", "b0 talks", "a1 talks", "b1 talks", "a2 talks"
    ]  # fmt: skip
    for name in "ab":
        own = [what for what in run_order if what[0] == name]
        assert own == sorted(
            own, key=lambda what: (what[1], what[3:])
        )  # what is exchanged was computed before


def test_error_of_a_collective_is_raised_where_it_is_awaited(lanes: CommThread) -> None:
    def broken() -> ForwardPass:
        yield lambda: [][1]
        return torch.zeros(1)

    with pytest.raises(IndexError):
        lanes.run_interleaved([broken(), program("b", 1, [])], HostSegmentTimer())
    assert [int(each) for each in lanes.run_interleaved([program("c", 1, [])] * 1, HostSegmentTimer())] == [1]


def test_collective_may_change_tensors_made_by_inference(lanes: CommThread) -> None:
    def doubling() -> ForwardPass:
        x = torch.ones(3)
        yield lambda: x.add_(x)
        return x

    with torch.inference_mode():
        assert lanes.run_interleaved([doubling()], HostSegmentTimer())[0].tolist() == [2, 2, 2]


def test_programs_without_collectives_end() -> None:
    def silent(value: int) -> ForwardPass:
        yield from ()
        return torch.tensor(value)

    def run_collective(index: int, collective: Collective) -> object:
        raise AssertionError("no collective runs")

    found: list[Tensor] = run_interleaved([silent(1), silent(2)], run_collective)  # type: ignore[arg-type]  # never called
    assert [int(each) for each in found] == [1, 2]


def test_the_first_pieces_are_noted_in_order() -> None:
    times = iter(range(0, 1_000_000, 1_000))
    notes = HostSegmentTimer(
        lambda: next(times)
    )  # it starts at 0; each start and each end is a microsecond later
    for i in range(MAX_SEGMENTS + 5):
        with notes.segment(i % 4):
            pass
    found = notes.segments()
    assert found[:2] == (Segment(0, 1, 1), Segment(1, 3, 1))
    assert len(found) == MAX_SEGMENTS
