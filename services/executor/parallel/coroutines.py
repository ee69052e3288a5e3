"""A forward pass is a program that stops at each collective, so that another one's compute can run meanwhile.

    alone      A compute ─ comm ─ compute ─ comm ─ …
    together   compute   A ─── B ─── A ─── B ─── A …
               comm            A     B     A     B

A program is a generator. It yields its next `Collective`, and goes on when that is done. A Collective reads
and writes tensors that the program made before and holds: on a GPU the allocator then gives none of them
away while a collective still uses it, for a program's memory is used again in the order of its own stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from services.executor.engine import COMM, COMPUTE, HostSegmentTimer

Collective = Callable[[], object]
ForwardPass = Generator[Collective, None, Tensor]
StartCollective = Callable[[int, Collective], Callable[[], object]]  # of a pass; the result waits for it
TimeCompute = Callable[
    [int], AbstractContextManager[object]
]  # around what a program computes between two collectives
_Done = SimpleQueue[Exception | None]  # gets one when a collective is done


class AllReduces(Protocol):
    """The sums between the ranks of a pass."""

    def all_reduce(self, x: Tensor) -> object:
        """`x` becomes the sum over all ranks of their `x`."""


def run_alone(forward_pass: ForwardPass) -> Tensor:
    """Run a program, each collective where it stands; what it returns."""
    while True:
        try:
            collective = next(forward_pass)
        except StopIteration as end:
            found: Tensor = end.value
            return found
        collective()


def run_interleaved(
    forward_passes: Sequence[ForwardPass],
    start: StartCollective,
    watch: TimeCompute = lambda forward_pass: nullcontext(),
) -> list[Tensor]:
    """Run programs to their ends, in turn, each as far as its next collective; what they return. All run
    their collectives in the order of the programs, so that the collectives of all ranks meet. The programs of
    a step may be two micro-batches of one prompt: what the second reads of the first's (its KV) was computed
    before."""
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


def run_in_turn(forward_passes: Sequence[ForwardPass]) -> list[Tensor]:
    """Run programs as `run_interleaved`, with nothing under anything."""

    def start(forward_pass: int, collective: Collective) -> Callable[[], object]:
        collective()
        return _nothing

    return run_interleaved(forward_passes, start)


def _nothing() -> None:
    """There is nothing to wait for."""


class CommThread:
    """Two threads: programs compute on one, in turn, and communicate on another, under each other. For ranks
    of CPUs.

        compute   A ─── B ─── A ─── B ───
        comm            A     B     A         one at a time, in the same order on all ranks

    While gloo waits for what comes it needs no core, and no lock of Python's. Owns the thread that
    communicates. One for a thread that computes."""

    def __init__(self) -> None:
        self._collectives: SimpleQueue[tuple[Callable[[], None], _Done] | None] = SimpleQueue()
        threading.Thread(
            target=self._run_collectives, name="collectives", daemon=True
        ).start()  # one may wait for the dead

    def run_interleaved(self, forward_passes: Sequence[ForwardPass], timer: HostSegmentTimer) -> list[Tensor]:
        """Run two programs to their ends; what they return."""

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
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                done.put(error)


def _wait(done: _Done) -> None:
    error = done.get()
    if error is not None:
        raise error
