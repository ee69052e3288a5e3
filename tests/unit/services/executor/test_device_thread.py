"""The device thread: strict order, and every failure an answer."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import pytest
from support.executor.scripted_engine import Scripted, opened, plan
from support.virtual_loop import FakeClock

from services.executor.device_thread import MAX_ERROR_CHARS, DeviceThread, RejectedSlot, Reset, Step, Work
from services.executor.engine import EngineGone, Pending, StepOutput
from shared.codec import validation_error
from shared.messages import SlotClose, SlotOpen, StepResult, floats, ints

CLOSED = SlotClose(slot=1, generation=1, last_step=2)


def run(backend: Scripted, *work: Work) -> list[StepResult]:
    """The results of a device thread that is given `work`."""
    results: list[StepResult] = []
    built: queue.SimpleQueue[Any] = queue.SimpleQueue()
    device = DeviceThread(lambda: backend, backend.clock, results.append)
    device.start(built.put)
    assert built.get(timeout=60) is backend
    for item in work:
        device.put(item)
    device.join(10)
    assert device.queued == 0
    calls = [what for what, _ in backend.calls]
    assert device.busy_us == 100 * calls.count("forward") + 10 * calls.count("sample")
    return results


def test_work_is_done_in_order_and_the_thread_ends_after_it() -> None:
    backend = Scripted(FakeClock())
    results = run(backend, opened(1), plan(1), plan(2), CLOSED, Reset(), opened(2), plan(3))
    assert [(r.exec_epoch, r.step, list(r.ids)) for r in results] == [(5, 1, [1]), (5, 2, [2]), (5, 3, [3])]
    assert backend.calls == [
        ("warm_up", 0), ("open", 1), ("forward", 1), ("sample", 1), ("forward", 2), ("sample", 2),
        ("close", 1), ("reset", 0), ("open", 2), ("forward", 3), ("sample", 3), ("end", 0),
    ]  # fmt: skip


def test_a_result_carries_its_times() -> None:
    clock = FakeClock()
    start_us = clock.wall_us()
    step = Step(Scripted(clock), plan(1), clock, wait_us=7, queued_us=8)
    step.forward()
    clock.advance(1_000)  # on its way to the host lane
    result = step.finish(published_us=9)
    assert (result.start_wall_us, result.end_wall_us) == (start_us, start_us + 1_110)
    assert (result.forward_us, result.sample_us, result.host_us) == (100, 6, 4)
    assert (result.queued_us, result.wait_us, result.published_us) == (8, 7, 9)
    assert result.row_errors == ((0, "no"),)
    assert (result.bucket_padding_rows, result.error) == (3, "")


@pytest.mark.parametrize("part", ["forward", "sample"])
def test_an_engine_error_is_the_steps_result_and_the_next_step_runs(part: str) -> None:
    backend = Scripted(FakeClock(), {f"{part} 1": RuntimeError("x" * 5_000)})
    first, second = run(backend, opened(1), plan(1), plan(2))
    assert first.error.startswith("RuntimeError: xxx")
    assert len(first.error) == MAX_ERROR_CHARS
    assert (list(first.ids), list(first.done)) == ([-1], [0])
    assert (second.error, list(second.ids)) == ("", [2])


def test_an_engine_that_cannot_go_on_ends_the_thread_without_a_result() -> None:
    backend, results = Scripted(FakeClock(), {"forward 2": EngineGone("the file was cut off")}), []
    built: queue.SimpleQueue[Any] = queue.SimpleQueue()
    device = DeviceThread(lambda: backend, backend.clock, results.append)
    device.start(built.put)
    built.get(timeout=60)
    for work in (opened(1), plan(1), plan(2), plan(3)):
        device.put(work)
    device.join(10)
    assert [result.step for result in results] == [1]
    assert str(device.gone) == "the file was cut off"
    assert ("forward", 3) not in backend.calls


@pytest.mark.parametrize(("what", "work"), [("close", CLOSED), ("reset", Reset())])
def test_an_error_outside_a_step_fails_the_next_step_not_the_thread(what: str, work: Work) -> None:
    key = what if what == "reset" else f"{what} 1"
    backend = Scripted(FakeClock(), {key: ValueError("no such bias id")})
    first, second = run(backend, work, plan(1), plan(2))
    assert first.error == "ValueError: no such bias id"
    assert ("forward", 1) not in backend.calls
    assert (second.error, list(second.ids)) == ("", [2])


def test_a_slot_that_cannot_be_opened_is_the_error_of_its_own_rows() -> None:
    backend = Scripted(FakeClock(), {"open 1": MemoryError("no room for 9 counts"), "sample 3": OSError()})
    first, second, third, fourth = run(
        backend, opened(1), plan(1), plan(2), plan(3), CLOSED, opened(1), plan(4)
    )
    why = "the slot cannot be opened: MemoryError: no room for 9 counts"
    for result in (first, second):
        assert (result.error, list(result.ids), list(result.done)) == ("", [-1], [2])
        assert result.row_errors == ((0, why),)
    assert (third.error, third.row_errors) == ("OSError: ", ())
    assert (list(fourth.ids), fourth.row_errors) == ([4], ((0, "no"),))  # the engine's own error
    assert backend.calls[1:3] == [("open", 1), ("open", 1)]  # the second is its stand-in


def test_long_error_of_a_slot_leaves_room_for_the_errors_of_all_others() -> None:
    (result,) = run(Scripted(FakeClock()), RejectedSlot(opened(1), "é" * 900), plan(1))
    assert result.row_errors == ((0, "é" * 80),)


def test_a_rejected_slot_with_drafts_takes_no_log_probabilities_from_other_rows() -> None:
    """Its stand-in has two kept drafts; the row after it has one, and alternatives."""

    class Drafted(Scripted):
        def sample(self, pending: Pending) -> StepOutput:
            super().sample(pending)
            return StepOutput(
                ids=ints([7, 8, 9, 4, 5]), done=ints([0, 0]), counts=ints([3, 2]), drafted=ints([2, 3]),
                logprobs=floats([0, 0, 0, -1, -2]), top_counts=ints([0, 0, 0, 1, 1]), top_ids=ints([4, 6]),
                top_logprobs=floats([-1, -3]),
            )  # fmt: skip

    two = replace(plan(1), slots=ints([1, 2]), sample_slots=ints([1, 2]), sample_rows=ints([0, 1]))
    (result,) = run(Drafted(FakeClock()), RejectedSlot(opened(1), "no"), opened(2), two)
    assert (list(result.ids), list(result.counts), list(result.done)) == ([-1, 4, 5], [1, 2], [2, 0])
    assert (list(result.logprobs), list(result.top_counts)) == ([0, -1, -2], [0, 1, 1])
    assert validation_error(result) == ""


def test_an_engine_that_opens_nothing_fails_the_step() -> None:
    class Broken(Scripted):
        def open_slot(self, opened: SlotOpen) -> None:
            raise RuntimeError("the device is gone")

    first, second = run(Broken(FakeClock()), opened(1), plan(1), plan(2))
    assert first.error == "RuntimeError: the device is gone"
    assert (second.error, list(second.ids)) == ("", [2])


def test_a_reset_forgets_an_error_before_it() -> None:
    backend = Scripted(FakeClock(), {"close 1": ValueError("of the incarnation before")})
    (result,) = run(backend, RejectedSlot(opened(1), "likewise"), CLOSED, Reset(), plan(1))
    assert result.row_errors == ((0, "no"),)
    assert result.error == ""


@pytest.mark.parametrize("in_warm_up", [False, True])
def test_an_engine_that_cannot_be_built_is_reported(in_warm_up: bool) -> None:
    error = MemoryError("no room for the weights")
    backend = Scripted(FakeClock(), {"warm_up": error} if in_warm_up else {})

    def build() -> Scripted:
        if not in_warm_up:
            raise error
        return backend

    built: queue.SimpleQueue[Any] = queue.SimpleQueue()
    device = DeviceThread(build, backend.clock, lambda result: None)
    device.start(built.put)
    assert built.get(timeout=60) is error
    device.join(10)


def test_result_has_the_time_that_its_plan_lay_here() -> None:
    backend, results = Scripted(FakeClock()), list[StepResult]()
    device = DeviceThread(lambda: backend, backend.clock, results.append)
    device.put(plan(1))  # both before the thread runs
    backend.clock.advance(50)
    device.put(plan(2))
    backend.clock.advance(7)
    device.start(lambda built: None)
    device.join(10)
    assert [result.queued_us for result in results] == [57, 7 + 110]
