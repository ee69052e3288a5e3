"""A forward pass is a generator that stops at each collective, so that another pass can compute meanwhile.

    alone      A compute ─ comm ─ compute ─ comm ─ …
    together   compute   A ─── B ─── A ─── B ─── A …
               comm            A     B     A     B

The models (cpu, cuda) define the passes; they yield the next `Collective`, and continue when it is done. A
Collective uses only tensors that the pass has made and holds. So on a GPU the allocator, which reuses memory
in the order of the pass's own stream, frees none of them while a collective uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from services.executor.engine import COMM, COMPUTE, MAX_SEGMENTS, Segment

R = TypeVar("R")
Collective = Callable[[], object]
ForwardPass = Generator[Collective, None, Tensor]
StartCollective = Callable[[int, Collective], Callable[[], object]]  # by index of the pass; the result waits
TimeCompute = Callable[[int], AbstractContextManager[object]]  # around compute between two collectives
_Done = SimpleQueue[Exception | None]  # gets one item when a collective is done


class AllReduces(Protocol):
    """The all-reduce of a pass."""

    def all_reduce(self, x: Tensor) -> object:
        """Replace `x` by the sum of all ranks' `x`."""


def run_alone(forward_pass: Generator[Collective, None, R]) -> R:
    """Run a pass to its end, with each collective in its place; the pass's result."""
    while True:
        try:
            collective = next(forward_pass)
        except StopIteration as end:
            found: R = end.value
            return found
        collective()


def run_interleaved(
    forward_passes: Sequence[ForwardPass],
    start: StartCollective,
    watch: TimeCompute = lambda forward_pass: nullcontext(),
) -> list[Tensor]:
    """Run passes in turn, each to its next collective, until all have ended; their results. Collectives start
    in the order of the passes, so that those of all ranks match. The second pass may read KV that the first
    one computes: the first is always ahead."""
    waits: dict[int, Callable[[], object]] = {}
    found: dict[int, Tensor] = {}
    while len(found) < len(forward_passes):
        for i, forward_pass in enumerate(forward_passes):
            if i in found:
                continue
            if i in waits:
                waits.pop(i)()
            try:
                with watch(i):
                    collective = next(forward_pass)
            except StopIteration as end:
                found[i] = end.value
                continue
            waits[i] = start(i, collective)
    return [found[i] for i in range(len(forward_passes))]


class CommThread:
    """Owns a thread for the collectives of CPU ranks. Passes compute in turn on the calling thread.

        compute   A ─── B ─── A ─── B ───
        comm            A     B     A         one at a time, in the same order on all ranks

    While gloo waits for other ranks it holds neither a core nor Python's lock. For one computing thread."""

    def __init__(self) -> None:
        self._collectives: SimpleQueue[tuple[Callable[[], None], _Done] | None] = SimpleQueue()
        # A daemon: a collective may wait for a dead rank.
        threading.Thread(target=self._run_collectives, name="collectives", daemon=True).start()

    def run_interleaved(self, forward_passes: Sequence[ForwardPass], timer: HostSegmentTimer) -> list[Tensor]:
        """Run two passes to their ends; their results."""

        def start(micro_batch: int, collective: Collective) -> Callable[[], object]:
            def timed() -> None:
                with torch.inference_mode(), timer.segment(COMM[micro_batch]):
                    collective()

            done: _Done = SimpleQueue()
            self._collectives.put((timed, done))
            return lambda: _wait(done)

        return run_interleaved(forward_passes, start, lambda micro_batch: timer.segment(COMPUTE[micro_batch]))

    def close(self) -> None:
        """End the thread."""
        self._collectives.put(None)

    def _run_collectives(self) -> None:
        while (queued := self._collectives.get()) is not None:
            collective, done = queued
            try:
                collective()
                done.put(None)
            except Exception as error:  # noqa: BLE001 - _wait raises it
                done.put(error)


def _wait(done: _Done) -> None:
    error = done.get()
    if error is not None:
        raise error


class HostSegmentTimer:
    """Times of one step's micro-batches, for traces: their compute, and their collectives under it. Each lane
    may be timed on its own thread. Only the first MAX_SEGMENTS are kept: a step of a deep model has hundreds,
    and the layers are alike."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._recorded: list[tuple[int, int, int]] = []

    @contextmanager
    def segment(self, lane: int) -> Iterator[None]:
        """Time the body of this context."""
        began_ns = self._now_ns()
        try:
            yield
        finally:
            self._recorded.append((lane, began_ns, self._now_ns()))

    def segments(self) -> tuple[Segment, ...]:
        """The first segments, in the order of their starts."""
        first = sorted(self._recorded, key=lambda timed: timed[1])[:MAX_SEGMENTS]
        return tuple(
            Segment(lane, (began - self._began_ns) // 1000, (ended - began) // 1000)
            for lane, began, ended in first
        )
