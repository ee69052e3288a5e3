"""A forward pass is a program that stops where ranks talk, so that another one's compute can run meanwhile.

    alone      A compute ─ talk ─ compute ─ talk ─ …
    together   compute   A ─── B ─── A ─── B ─── A …
               talk            A     B     A     B

A program is a generator. It yields what is to be said, a `Talk`, and goes on when that is done. A Talk reads
and writes tensors that the program made before and holds: on a GPU the allocator then gives none of them
away while a talk still uses it, for a program's memory is used again in the order of its own stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from services.executor.engine import COMM, COMPUTE, Notes

Talk = Callable[[], object]
Program = Generator[Talk, None, Tensor]
Say = Callable[[int, Talk], Callable[[], object]]  # have a program's talk said; wait for it
Watch = Callable[[int], AbstractContextManager[object]]  # around what a program computes between two talks
_Said = SimpleQueue[Exception | None]  # gets one when a talk is said


class Sums(Protocol):
    """What the ranks of a pass say to each other."""

    def all_reduce(self, x: Tensor) -> object:
        """`x` becomes the sum over all ranks of their `x`."""


def alone(program: Program) -> Tensor:
    """Run a program, each talk where it stands; what it returns."""
    while True:
        try:
            talk = next(program)
        except StopIteration as end:
            found: Tensor = end.value
            return found
        talk()


def together(
    programs: Sequence[Program], say: Say, watch: Watch = lambda program: nullcontext()
) -> list[Tensor]:
    """Run programs to their ends, in turn, each as far as its next talk; what they return. All talk in the
    order of the programs, so that the talks of all ranks meet. The programs of a step may be two halves of
    one prompt: what the second reads of the first's (its KV) was computed before."""
    waits: dict[int, Callable[[], object]] = {}
    found: dict[int, Tensor] = {}
    while len(found) < len(programs):
        for i, program in enumerate(programs):
            if i in found:
                continue
            if i in waits:
                waits.pop(i)()
            try:
                with watch(i):
                    talk = next(program)
            except StopIteration as end:
                found[i] = end.value
                continue
            waits[i] = say(i, talk)
    return [found[i] for i in range(len(programs))]


def in_turn(programs: Sequence[Program]) -> list[Tensor]:
    """Run programs as `together`, with nothing under anything."""

    def say(program: int, talk: Talk) -> Callable[[], object]:
        talk()
        return _nothing

    return together(programs, say)


def _nothing() -> None:
    """There is nothing to wait for."""


class HostLanes:
    """Two threads: programs compute on one, in turn, and talk on another, under each other. For ranks of
    CPUs.

        compute   A ─── B ─── A ─── B ───
        talk            A     B     A         one at a time, in the same order on all ranks

    While gloo waits for what comes it needs no core, and no lock of Python's. Owns the thread that talks. One
    for a thread that computes."""

    def __init__(self) -> None:
        self._talks: SimpleQueue[tuple[Callable[[], None], _Said] | None] = SimpleQueue()
        threading.Thread(target=self._talk, name="talk", daemon=True).start()  # one may wait for the dead

    def together(self, programs: Sequence[Program], notes: Notes) -> list[Tensor]:
        """Run two programs to their ends; what they return."""

        def say(half: int, talk: Talk) -> Callable[[], object]:
            def noted() -> None:
                with torch.inference_mode(), notes.on(COMM[half]):
                    talk()

            said: _Said = SimpleQueue()
            self._talks.put((noted, said))
            return lambda: _wait(said)

        return together(programs, say, lambda half: notes.on(COMPUTE[half]))

    def close(self) -> None:
        """End the thread."""
        self._talks.put(None)

    def _talk(self) -> None:
        while (order := self._talks.get()) is not None:
            talk, said = order
            try:
                talk()
                said.put(None)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                said.put(error)


def _wait(said: _Said) -> None:
    error = said.get()
    if error is not None:
        raise error
