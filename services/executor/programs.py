"""A forward pass as a program that stops where ranks talk, so that another one's compute can run meanwhile.

    alone      A compute ─ talk ─ compute ─ talk ─ …
    together   compute   A ─── B ─── A ─── B ─── A …
               talk            A     B     A     B

A program is a generator. It yields what is to be said, a `Talk`, and goes on when that is done. A Talk reads
and writes tensors that the program made before and holds: on a GPU the allocator then gives none of them
away while a talk still uses it, for a program's memory is used again in the order of its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

Talk = Callable[[], object]
Program = Generator[Talk, None, Tensor]
Say = Callable[[int, Talk], Callable[[], object]]  # have a program's talk said; wait for it
Watch = Callable[[int], AbstractContextManager[object]]  # around what a program computes between two talks


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
