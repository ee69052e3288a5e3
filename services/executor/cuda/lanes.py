"""Two streams: programs compute on one, in turn, and talk on another, of high priority, under each other.

compute   A ─── B ─── A ─── B ───     waits for A's talk before A goes on
talk            A     B     A         waits for the compute that it sends
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.cuda import Event, Stream

from services.executor.cuda.pieces import Noting
from services.executor.pieces import COMM, COMPUTE
from services.executor.programs import Program, Talk, together

_HIGH = -1  # a talk waits for no compute: its few programs get processors before the other stream's


class Lanes:
    """The stream that talks. One for a thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._talking = Stream(device, priority=_HIGH)  # type: ignore[no-untyped-call]  # torch annotates it not

    def together(self, programs: Sequence[Program], notes: Noting | None = None) -> list[Tensor]:
        """Run programs to their ends; what they return, on the current stream. Without notes it may be
        captured in a graph."""
        compute, talking = torch.cuda.current_stream(), self._talking

        def say(half: int, talk: Talk) -> Callable[[], object]:
            talking.wait_stream(compute)
            with torch.cuda.stream(talking), notes.on(COMM[half]) if notes else nullcontext():
                talk()
                done = talking.record_event()
            return functools.partial(_wait, compute, done, talk)

        if notes is None:
            found = together(programs, say)
        else:
            found = together(programs, say, lambda half: notes.on(COMPUTE[half]))
        compute.wait_stream(talking)
        return found


def _wait(compute: Stream, done: Event, talk: Talk) -> None:
    """Until then the `talk` holds its tensors."""
    compute.wait_event(done)
