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

from torch import Tensor

Talk = Callable[[], None]
Program = Generator[Talk, None, Tensor]


def alone(program: Program) -> Tensor:
    """Run a program, each talk where it stands; what it returns."""
    while True:
        try:
            talk = next(program)
        except StopIteration as end:
            found: Tensor = end.value
            return found
        talk()


def in_turn(programs: Sequence[Program]) -> list[Tensor]:
    """Run programs as `together` does, with nothing under anything: what ranks of CPUs do."""
    found: dict[int, Tensor] = {}
    while len(found) < len(programs):
        for i, program in enumerate(programs):
            if i in found:
                continue
            try:
                next(program)()
            except StopIteration as end:
                found[i] = end.value
    return [found[i] for i in range(len(programs))]
