"""The device thread: runs plans strictly in order, off the event loop.

    loop thread:   SlotOpen, StepPlan n, StepPlan n+1, SlotClose ... ──▶ queue
    device thread: take -> forward -> sample -> StepResult ──▶ loop thread
With two plans queued, the next step starts while the result of the last is still on its way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.executor.backend import Backend, StepOutput
from shared.clock import Clock
from shared.errors import EngineError
from shared.messages import SlotClose, SlotOpen, StepPlan, StepResult, ints

MAX_ERROR_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget every slot."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Something that the engine must not see; the next step fails with this error."""

    error: Exception


Work = SlotOpen | SlotClose | StepPlan | Reset | Refused | None  # None ends the thread
Deliver = Callable[[StepResult], None]


def run_step(
    backend: Backend, plan: StepPlan, clock: Clock, wait_us: int, published_us: int = 0
) -> StepResult:
    """One step: forward, sample, and the times they took. An engine's error becomes the result's."""
    start_wall_us, start_us = clock.wall_us(), clock.now_us()
    try:
        backend.forward(plan)
        forwarded_us = clock.now_us()
        output = backend.sample(plan)
    except Exception as error:  # noqa: BLE001 - the step fails with a typed result, the process lives
        return failed(plan, error, start_wall_us, clock)
    times_us = (start_us, forwarded_us, clock.now_us(), wait_us, published_us)
    return _result(plan, output, start_wall_us, times_us)


class DeviceThread:
    """Owns the backend. `deliver` is called on the device thread with each result."""

    def __init__(self, build: Callable[[], Backend], clock: Clock, deliver: Deliver) -> None:
        self._build = build
        self._clock = clock
        self._deliver = deliver
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._on_built: Callable[[Backend | BaseException], None] = lambda built: None
        self._broken: Exception | None = None  # what a slot's opening or closing met
        self.busy_us = 0
        self.idle_us = 0
        self.since_us = 0  # when the step that runs began, 0 between steps
        self.published_us = 0  # set by who publishes: see StepResult

    def start(self, on_built: Callable[[Backend | BaseException], None]) -> None:
        """Build and warm the backend on the device thread; `on_built` is called there with it."""
        self._on_built = on_built
        self._thread.start()

    def put(self, work: Work) -> None:
        """Queue work; never blocks."""
        self._work.put(work)

    def refuse(self, flaw: str) -> None:
        """Make the next step fail with this flaw, if there is one."""
        if flaw:
            self.put(Refused(EngineError(flaw)))

    def join(self, timeout_s: float) -> None:
        """End the thread after the queued work."""
        self.put(None)
        self._thread.join(timeout_s)

    @property
    def queued(self) -> int:
        return self._work.qsize()

    def _run(self) -> None:
        try:
            backend = self._build()
            backend.warm_up()
        except BaseException as error:  # noqa: BLE001 - reported to the actor, which fails
            self._on_built(error)
            return
        self._on_built(backend)
        wait_us = 0
        while True:
            waited_from = time.monotonic_ns()
            work = self._work.get()
            wait_us += (time.monotonic_ns() - waited_from) // 1000
            if work is None:
                break
            if isinstance(work, StepPlan):
                self._step(backend, work, wait_us)
                wait_us = 0
            else:
                self._set_slots(backend, work)
        backend.close()

    def _step(self, backend: Backend, plan: StepPlan, wait_us: int) -> None:
        began_us, began_wall_us = self._clock.now_us(), self._clock.wall_us()
        self.since_us = began_us
        broken, self._broken = self._broken, None
        if broken is not None:
            result = failed(plan, broken, began_wall_us, self._clock)
        else:
            result = run_step(backend, plan, self._clock, wait_us, self.published_us)
        self.since_us = 0
        self._deliver(result)
        self.busy_us += self._clock.now_us() - began_us
        self.idle_us += wait_us

    def _set_slots(self, backend: Backend, work: SlotOpen | SlotClose | Reset | Refused) -> None:
        """An error here has no answer of its own: it becomes that of the next step."""
        try:
            match work:
                case SlotOpen():
                    backend.open_slot(work)
                case SlotClose(slot=slot):
                    backend.close_slot(slot)
                case Reset():
                    self._broken = None
                    backend.reset()
                case Refused(error=error):
                    self._broken = error
        except Exception as error:  # noqa: BLE001 - a dead thread would leave every client waiting
            self._broken = error


def _result(
    plan: StepPlan, output: StepOutput, start_wall_us: int, times_us: tuple[int, int, int, int, int]
) -> StepResult:
    start_us, forwarded_us, end_us, wait_us, published_us = times_us
    return StepResult(
        exec_epoch=plan.exec_epoch,
        step=plan.step,
        ids=output.ids,
        done=output.done,
        start_wall_us=start_wall_us,
        end_wall_us=start_wall_us + end_us - start_us,
        forward_us=forwarded_us - start_us,
        sample_us=end_us - forwarded_us,
        bucket_padding_rows=output.padding_rows,
        logprobs=output.logprobs,
        top_counts=output.top_counts,
        top_ids=output.top_ids,
        top_logprobs=output.top_logprobs,
        wait_us=wait_us,
        published_us=published_us,
    )


def failed(plan: StepPlan, error: Exception, start_wall_us: int, clock: Clock) -> StepResult:
    """The result of a step that failed with `error`."""
    rows = len(plan.sample_slots)
    return StepResult(
        exec_epoch=plan.exec_epoch,
        step=plan.step,
        ids=ints([-1]) * rows,
        done=ints([0]) * rows,
        start_wall_us=start_wall_us,
        end_wall_us=clock.wall_us(),
        error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS],
    )
