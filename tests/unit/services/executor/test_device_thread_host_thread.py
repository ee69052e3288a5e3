"""The device thread with a host lane: what overlaps, what waits, and the order of results."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from support.executor.scripted_engine import Scripted, opened, plan
from support.virtual_loop import FakeClock

from services.executor.device_thread import DeviceThread, HostThread, Reset, Work
from services.executor.engine import Pending, StepOutput
from shared.messages import SlotClose, SlotOpen, StepPlan, StepResult, ints

WITHIN_S = 90


class Gated(Scripted):
    """A Scripted whose samples of some steps begin when the test allows it; calls are seen as they come."""

    def __init__(self, *gated: int) -> None:
        super().__init__(FakeClock())
        self.gates = {step: threading.Event() for step in gated}
        self.seen: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def _do(self, what: str, about: int = 0, took_us: int = 0) -> None:
        try:
            super()._do(what, about, took_us)
        finally:
            self.seen.put((what, about))

    def sample(self, pending: Pending) -> StepOutput:
        if gate := self.gates.get(pending.plan.step):
            assert gate.wait(WITHIN_S)
        return super().sample(pending)

    def until(self, what: str, about: int) -> None:
        """Wait for a call."""
        while self.seen.get(timeout=WITHIN_S) != (what, about):
            pass


def of(step: int, slot: int) -> StepPlan:
    one = ints([slot])
    return StepPlan(
        exec_epoch=5, step=step, mode="two_batch", micro_batch=0, slots=one, starts=one, counts=ints([1]),
        from_device=ints([1]), sample_rows=ints([0]), sample_slots=one,
    )  # fmt: skip


def host_fed(slot: int) -> SlotOpen:
    return SlotOpen(
        slot=slot, generation=1, seq=1, prompt_tokens=1, tokens=ints([4]), processors=('{"name": "x"}',)
    )


def started(backend: Scripted, *work: Work) -> tuple[DeviceThread, queue.SimpleQueue[StepResult]]:
    results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    built: queue.SimpleQueue[Any] = queue.SimpleQueue()
    device = DeviceThread(lambda: backend, backend.clock, results.put)
    device.start(built.put)
    assert built.get(timeout=WITHIN_S) is backend
    for item in work:
        device.put(item)
    return device, results


def ended(device: DeviceThread, results: queue.SimpleQueue[StepResult]) -> list[int]:
    """The steps of all results, in order."""
    device.join(WITHIN_S)
    return [results.get_nowait().step for _ in range(results.qsize())]


def test_the_next_forward_runs_while_a_step_is_on_the_host_thread_and_results_stay_in_order() -> None:
    backend = Gated(1)
    device, results = started(backend, host_fed(1), opened(2), of(1, 1), of(2, 2))
    backend.until("forward", 2)
    assert results.empty()
    assert ("sample", 1) not in backend.calls
    assert device.since_us > 0
    backend.gates[1].set()
    assert ended(device, results) == [1, 2]
    assert [call for call in backend.calls if call[0] == "sample"] == [("sample", 1), ("sample", 2)]
    assert device.since_us == 0


def test_the_host_thread_holds_two_steps_and_then_the_device_waits() -> None:
    backend = Gated(1)
    slots = [host_fed(slot) for slot in range(1, 5)]
    device, results = started(backend, *slots, *(of(step, step) for step in range(1, 5)))
    backend.until("forward", 3)
    assert results.empty()
    backend.gates[1].set()
    assert ended(device, results) == [1, 2, 3, 4]
    steps = [call for call in backend.calls if call[0] in ("forward", "sample")]
    assert steps.index(("sample", 1)) < steps.index(("forward", 4))


@pytest.mark.parametrize(
    ("work", "call"),
    [
        (of(2, 1), ("forward", 2)),
        (SlotClose(slot=1, generation=1, last_step=1), ("close", 1)),
        (opened(1), ("open", 1)),
        (Reset(), ("reset", 0)),
        (None, ("end", 0)),
    ],
    ids=["plan", "close", "open", "reset", "end"],
)
def test_change_of_a_slot_on_the_host_thread_waits_for_it(work: Work, call: tuple[str, int]) -> None:
    backend = Gated(1)
    device, results = started(backend, host_fed(1), of(1, 1))
    backend.until("forward", 1)
    device.put(work)
    while device.queued:  # the device thread has taken the work, and waits with it
        pass
    before = list(backend.calls)
    backend.gates[1].set()
    assert ended(device, results)[0] == 1
    assert call not in before[1 + before.index(("open", 1)) :]
    after = backend.calls[1 + backend.calls.index(("sample", 1)) :]
    assert call in after


def test_an_open_or_close_of_another_slot_does_not_wait() -> None:
    backend = Gated(1)
    closed = SlotClose(slot=2, generation=1, last_step=0)
    device, results = started(backend, host_fed(1), opened(2), of(1, 1), closed, opened(3))
    backend.until("close", 2)
    backend.until("open", 3)
    assert results.empty()
    backend.gates[1].set()
    assert ended(device, results) == [1]


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "host-thread"}


def test_steps_of_slots_without_processors_never_start_the_host_thread() -> None:
    before = lanes()  # of engines of other tests that were lost with their group
    backend = Gated()
    device, results = started(backend, opened(1), plan(1), plan(2))
    for _ in range(2):
        results.get(timeout=WITHIN_S)
    assert lanes() <= before
    assert ended(device, results) == []


def test_a_slot_that_is_opened_again_without_processors_is_host_fed_no_more() -> None:
    before = lanes()
    backend = Gated()
    device, results = started(backend, host_fed(1), opened(1), plan(1), host_fed(1), Reset(), plan(2))
    for _ in range(2):
        results.get(timeout=WITHIN_S)
    assert lanes() <= before
    assert ended(device, results) == []


@pytest.mark.parametrize("part", ["forward 2", "sample 1"])
def test_an_error_is_its_own_steps_and_keeps_its_place(part: str) -> None:
    backend = Gated(1)
    backend.fail[part] = RuntimeError("broken")
    device, results = started(backend, host_fed(1), host_fed(2), of(1, 1), of(2, 2))
    backend.until("forward", 2)
    backend.gates[1].set()
    device.join(WITHIN_S)
    errors = [(result.step, result.error) for result in (results.get_nowait(), results.get_nowait())]
    failing = int(part[-1])
    assert errors == [(step, "RuntimeError: broken" if step == failing else "") for step in (1, 2)]


def test_a_pipeline_keeps_as_many_steps_as_it_has_stages() -> None:
    lane, release, order = HostThread(3), threading.Event(), list[int]()

    def finish(step: int) -> None:
        release.wait(WITHIN_S)
        order.append(step)

    for step in range(3):
        lane.put((step,), 100 + step, lambda step=step: finish(step))  # type: ignore[misc]  # a default
    assert (lane.is_busy, lane.since_us) == (True, 100)
    lane.wait_for((3, 4))
    release.set()
    lane.wait_for((2,))
    lane.close()
    assert (order, lane.is_busy, lane.since_us) == ([0, 1, 2], False, 0)
