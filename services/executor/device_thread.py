"""The device thread runs plans strictly in order, off the event loop.

    loop thread:   SlotOpen, StepPlan n, StepPlan n+1, SlotClose ... ──▶ queue
    device thread: take -> forward -> sample -> StepResult ──▶ loop thread

With two plans queued, the next step starts while the result of the last one travels. The host thread samples
a step with host-fed rows, and every step while another is there. Where the engine has
queued the sampling after the forward, the host thread waits for the ids, while the device thread queues the
next plan of the same slots. ExecutorActor creates it and puts the work.

The host thread finishes steps after their forward: processors, sampling and result, off the device thread.

    device thread: forward A ─┬─ forward B ───────┬─ forward A' ...
    host thread:                └ processors, sample, result A ┘ └ ... B

DeviceThread puts the steps; they leave in the same order.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from services.executor.engine import (
    Backend,
    BackendInfo,
    EngineGone,
    Pending,
    StepOutput,
    cut_why,
    sequence_error,
    without_host_work,
)
from shared.clock import Clock
from shared.errors import EngineError
from shared.messages import ROW_REFUSED, SlotClose, SlotOpen, StepPlan, StepResult, floats, ints

if TYPE_CHECKING:
    from services.executor.engine import Sleeper


MAX_ERROR_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget every slot once the steps before have ended, then call `done` on the device thread."""

    done: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Between:
    """Call `run` on the device thread, between two steps."""

    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Switch:
    """Put the engine to sleep or wake it, then call `done` on the device thread, with the error if it
    failed."""

    asleep: bool
    done: Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class Refused:
    """In place of a plan or slot that must not reach the engine: the next step fails with this error."""

    error: Exception


@dataclass(frozen=True, slots=True)
class RejectedSlot:
    """A slot of a sequence that the engine cannot compute: each of its rows is a row error."""

    opened: SlotOpen
    why: str


def checked_slot(opened: SlotOpen, info: BackendInfo) -> SlotOpen | RejectedSlot:
    """`opened`, or RejectedSlot for a sequence that the engine cannot compute. Its prediction loses tokens
    that the weights lack: as drafts they would be rows out of the embedding."""
    if error := sequence_error(opened, info):
        return RejectedSlot(opened, ROW_REFUSED + error)
    if max(opened.prediction, default=0) < info.vocab:
        return opened
    return replace(opened, prediction=ints(token for token in opened.prediction if token < info.vocab))


Work = (
    SlotOpen | RejectedSlot | SlotClose | StepPlan | Reset | Between | Switch | Refused | None
)  # None: the end
Deliver = Callable[[StepResult], None]


class DeviceThread:
    """Owns the backend. It calls `deliver` with each result in step order, on its own or the host thread."""

    def __init__(self, build: Callable[[], Backend], clock: Clock, deliver: Deliver) -> None:
        self.gone: EngineGone | None = None  # why the engine cannot go on; no step has a result any more
        self._build = build
        self._clock = clock
        self._deliver = deliver
        self._work: queue.SimpleQueue[tuple[int, Work]] = queue.SimpleQueue()  # with its arrival
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._on_built: Callable[[Backend | BaseException], None] = lambda built: None
        self._broken: Exception | None = None  # the next step fails with it
        self._host_thread = HostThread()
        self._staged = False  # a pipeline: a step's last stage runs while the next step's first one does
        self._host_fed: set[int] = set()  # slots with logits processors
        self._rejected: dict[int, str] = {}  # why a slot's rows are errors
        self._began_us = 0
        self.busy_us = 0
        self.idle_us = 0
        self._ended_us = 0  # when the last step ended
        self.published_us = 0  # the actor sets it: see StepResult

    def start(self, on_built: Callable[[Backend | BaseException], None]) -> None:
        """Build and warm up the backend on the device thread, then call `on_built` there with it or its
        error."""
        self._on_built = on_built
        self._thread.start()

    def put(self, work: Work) -> None:
        """Queue work; never blocks."""
        self._work.put((self._clock.now_us(), work))

    def refuse(self, error: str) -> None:
        """Make the next step fail with `error`, unless it is empty."""
        if error:
            self.put(Refused(EngineError(error)))

    def join(self, timeout_s: float) -> None:
        """End the thread after the queued work."""
        self.put(None)
        self._thread.join(timeout_s)

    @property
    def queued(self) -> int:
        return self._work.qsize()

    @property
    def since_us(self) -> int:
        """When the oldest step without a result began, 0 between steps."""
        return self._host_thread.since_us or self._began_us

    def _run(self) -> None:
        try:
            backend = self._build()
            backend.warm_up()
        except BaseException as error:  # noqa: BLE001 - reported to the actor, which fails
            self._on_built(error)
            return
        self._staged = backend.info.stages > 1
        self._host_thread = HostThread(max(MAX_PENDING, backend.info.stages))
        self._on_built(backend)
        try:
            self._serve(backend)
        except EngineGone as error:
            self.gone = error
            return
        self._host_thread.close()
        backend.close()

    def _serve(self, backend: Backend) -> None:
        wait_us = 0
        while True:
            waited_from_us = self._clock.now_us()
            arrived_us, work = self._work.get()
            if not self._host_thread.is_busy:  # else the device works on an earlier step
                wait_us += max(self._clock.now_us() - max(waited_from_us, self._ended_us), 0)
            if work is None:
                return
            if isinstance(work, Switch):
                self._switch(backend, work)
            elif isinstance(work, StepPlan):
                self._step(backend, work, arrived_us, wait_us)
                wait_us = 0
            else:
                self._set_slots(backend, work)

    def _step(self, backend: Backend, plan: StepPlan, arrived_us: int, wait_us: int) -> None:
        if self._host_thread.is_busy:
            self._host_thread.wait_for({*plan.slots, *plan.sample_slots})
        self._began_us = began_us = self._clock.now_us()
        rejected = {slot: why for slot, why in self._rejected.items() if slot in plan.sample_slots}
        queued_us = began_us - arrived_us
        step = Step(backend, plan, self._clock, wait_us=wait_us, queued_us=queued_us, rejected=rejected)
        refused, self._broken = self._broken, None
        step.forward(refused)
        self.idle_us += wait_us
        host_fed = bool(self._host_fed) and not self._host_fed.isdisjoint(plan.sample_slots)
        if host_fed or step.is_answered or self._host_thread.is_busy or self._staged:
            if not step.is_answered:
                self.busy_us += self._clock.now_us() - began_us
            fenced = () if step.is_answered else plan.sample_slots  # the device's queue keeps the order
            self._host_thread.put(fenced, began_us, lambda: self._finish(step, began_us))
            self._began_us = 0
        else:
            self._finish(step)
            self.busy_us += self._clock.now_us() - began_us

    def _finish(self, step: Step, began_us: int = 0) -> None:
        result = step.finish(self.published_us, self._ended_us)
        ended_us = self._clock.now_us()
        if step.is_answered and began_us:  # queued on the device, it starts when the step before ends
            self.busy_us += ended_us - max(began_us, self._ended_us)
        self._ended_us = ended_us
        if not self._host_thread.is_busy:
            self._began_us = 0
        self._deliver(result)

    def _switch(self, backend: Backend, work: Switch) -> None:
        error = None
        try:
            sleeper = cast("Sleeper", backend)  # `info.sleeps`, else there is no Switch
            sleeper.sleep() if work.asleep else sleeper.wake()
        except Exception as failed:  # noqa: BLE001 - a dead thread would leave every client waiting
            error = failed
        work.done(error)

    def _set_slots(
        self, backend: Backend, work: SlotOpen | RejectedSlot | SlotClose | Reset | Between | Refused
    ) -> None:
        """These works have no result: an error of a sequence fails its rows, any other the next step."""
        try:
            match work:
                case SlotOpen():
                    self._open(backend, work)
                case RejectedSlot(opened=opened, why=why):
                    self._reject(backend, opened, why)
                case SlotClose(slot=slot):
                    self._free(slot)
                    backend.close_slot(slot)
                case Reset():
                    self._host_thread.drain()
                    self._broken = None
                    self._host_fed.clear()
                    self._rejected.clear()
                    backend.reset()
                    work.done()
                case Between(run=run):
                    run()
                case Refused(error=error):
                    self._broken = error
        except Exception as error:  # noqa: BLE001 - a dead thread would leave every client waiting
            self._broken = error

    def _open(self, backend: Backend, opened: SlotOpen) -> None:
        self._free(opened.slot)
        if opened.processors:
            self._host_fed.add(opened.slot)
        try:
            backend.open_slot(opened)
        except Exception as error:  # noqa: BLE001 - it fails this sequence, e.g. no memory for its penalties
            self._reject(backend, opened, f"the slot cannot be opened: {type(error).__name__}: {error}")

    def _reject(self, backend: Backend, opened: SlotOpen, why: str) -> None:
        self._free(opened.slot)
        backend.open_slot(without_host_work(opened, backend.info.vocab))
        self._rejected[opened.slot] = cut_why(why)

    def _free(self, slot: int) -> None:
        """Wait until no step samples the slot, then forget its state here."""
        self._host_thread.wait_for((slot,))
        self._host_fed.discard(slot)
        self._rejected.pop(slot, None)


class Step:
    """One step: its forward, then its sampling (perhaps on another thread), and the times of both.

        plan arrives ── queued ──▶ start ── forward ──▶ (host thread) ── processors ── sample ──▶ end

    An engine's error in either becomes the error of the result."""

    def __init__(
        self,
        backend: Backend,
        plan: StepPlan,
        clock: Clock,
        *,
        wait_us: int = 0,
        queued_us: int = 0,
        rejected: Mapping[int, str] | None = None,
    ) -> None:
        """`wait_us`: how long the device was idle before; `queued_us`: how long the plan waited; `rejected`:
        why the rows of a slot are errors."""
        self._backend = backend
        self._plan = plan
        self._clock = clock
        self._wait_us, self._queued_us = wait_us, queued_us
        self._rejected = rejected or {}
        self._start_wall_us, self._start_us = clock.wall_us(), clock.now_us()
        self._forwarded_us = self._start_us
        self._pending: Pending | None = None
        self._error: Exception | None = None

    def forward(self, refused: Exception | None = None) -> None:
        """Run the forward pass, unless the step was `refused`. Raises EngineGone."""
        self._error = refused
        if refused is not None:
            return
        try:
            self._pending = self._backend.forward(self._plan)
        except EngineGone:
            raise
        except Exception as error:  # noqa: BLE001 - the step fails with a typed result, the process lives
            self._error = error
        self._forwarded_us = self._clock.now_us()

    @property
    def is_answered(self) -> bool:
        """True when sampling is queued on the device already: see Pending.answer."""
        return self._pending is not None and self._pending.answer is not None

    def finish(self, published_us: int = 0, before_us: int = 0) -> StepResult:
        """Choose the tokens; the step's result. `published_us`: see StepResult. `before_us`: when the step
        before ended; a step with queued sampling starts then."""
        if self._pending is None:
            return self._failure(self._error)
        if self.is_answered and (waited_us := before_us - self._start_us) > 0:
            self._start_us, self._start_wall_us = before_us, self._start_wall_us + waited_us
            self._forwarded_us = max(self._forwarded_us, before_us)
            self._queued_us += waited_us
        sampling_us = self._clock.now_us()
        try:
            output = self._backend.sample(self._pending)
        except Exception as error:  # noqa: BLE001 - as above
            return self._failure(error)
        return self._result(self._without_rejected(output), sampling_us, published_us)

    def _without_rejected(self, output: StepOutput) -> StepOutput:
        rows = {
            row: self._rejected[s] for row, s in enumerate(self._plan.sample_slots) if s in self._rejected
        }
        if not rows:
            return output
        ids, done, counts = ints(), output.done[:], output.counts[:]
        ends = [*accumulate(counts or [1] * len(done))]
        kept = list[int]()  # indices of the ids that stay, and of the first one of each rejected row
        for row, begin in enumerate([0, *ends[:-1]]):
            if row not in rows:
                ids.extend(output.ids[begin : ends[row]])
                kept += range(begin, ends[row])
                continue
            ids.append(-1)
            kept.append(begin)
            done[row] = 2
            if counts:
                counts[row] = 1
        errors = tuple((dict(output.row_errors) | rows).items())
        output = replace(output, ids=ids, done=done, counts=counts, row_errors=errors)
        if not output.logprobs:
            return output
        # A rejected row has no alternatives: its stand-in asks for none.
        logprobs, tops = floats(output.logprobs[i] for i in kept), ints(output.top_counts[i] for i in kept)
        return replace(output, logprobs=logprobs, top_counts=tops)

    def _result(self, output: StepOutput, sampling_us: int, published_us: int) -> StepResult:
        end_us = self._clock.now_us()
        return StepResult(
            exec_epoch=self._plan.exec_epoch,
            step=self._plan.step,
            ids=output.ids,
            done=output.done,
            start_wall_us=self._start_wall_us,
            end_wall_us=self._start_wall_us + end_us - self._start_us,
            forward_us=self._forwarded_us - self._start_us,
            sample_us=max(0, end_us - max(sampling_us, self._forwarded_us) - output.host_us),
            bucket_padding_rows=output.padding_rows,
            logprobs=output.logprobs,
            top_counts=output.top_counts,
            top_ids=output.top_ids,
            top_logprobs=output.top_logprobs,
            wait_us=self._wait_us,
            published_us=published_us,
            queued_us=self._queued_us,
            host_us=output.host_us,
            row_errors=output.row_errors,
            vectors=output.vectors,
            counts=output.counts,
            drafted=output.drafted,
            prompts=() if self._pending is None else self._pending.prompts,
            segments=ints(
                n for segment in output.segments for n in (segment.lane, segment.from_us, segment.took_us)
            ),
        )

    def _failure(self, error: Exception | None) -> StepResult:
        rows = len(self._plan.sample_slots)
        return StepResult(
            exec_epoch=self._plan.exec_epoch,
            step=self._plan.step,
            ids=ints([-1]) * rows,
            done=ints([0]) * rows,
            start_wall_us=self._start_wall_us,
            end_wall_us=self._clock.wall_us(),
            error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS],
            queued_us=self._queued_us,
        )


MAX_PENDING = 2  # the two steps of two_batch; with more, results would only wait longer here


@dataclass(frozen=True, slots=True)
class _Pending:
    slots: frozenset[int]  # their next tokens are not chosen yet
    since_us: int
    finish: Callable[[], None]


class HostThread:
    """The thread starts with the first step. Only one other thread may call `put`."""

    def __init__(self, most: int = MAX_PENDING) -> None:
        self._most = most
        self._pending: deque[_Pending] = deque()  # the first one runs
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """True until the result of every step has been delivered. No lock: only the caller adds."""
        return bool(self._pending)

    @property
    def since_us(self) -> int:
        """When the oldest step here began, 0 without one."""
        with self._changed:
            return self._pending[0].since_us if self._pending else 0

    def put(self, slots: Collection[int], since_us: int, finish: Callable[[], None]) -> None:
        """Call `finish` on the host thread; it must not raise. Waits while `most` steps are here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host-thread", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) < self._most)
            self._pending.append(_Pending(frozenset(slots), since_us, finish))
            self._changed.notify_all()

    def wait_for(self, slots: Collection[int]) -> None:
        """Wait until no step here chooses a token of one of `slots`."""
        with self._changed:
            self._changed.wait_for(lambda: all(step.slots.isdisjoint(slots) for step in self._pending))

    def drain(self) -> None:
        """Wait until every step has left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def close(self) -> None:
        """End the thread after its steps."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                step = self._pending[0]
            try:
                step.finish()
            finally:
                with self._changed:
                    self._pending.popleft()
                    self._changed.notify_all()
