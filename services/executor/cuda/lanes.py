"""Two streams: programs compute on one, in turn, and talk on another, of high priority, under each other.

    compute   A ─── B ─── A ─── B ───     waits for A's talk before A goes on
    talk            A     B     A         waits for the compute that it sends

Every rank runs its programs in the same order, so that the talks of all ranks meet. The programs of a step
may be two halves of one prompt: what B reads of A's (its KV) was queued before on the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import Event, Stream

from services.executor.programs import Program, Talk

_HIGH = -1  # a talk waits for no compute: its few programs get processors before the other stream's


class Lanes:
    """The stream that talks. One for a thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._talking = Stream(device, priority=_HIGH)  # type: ignore[no-untyped-call]  # torch annotates it not

    def together(self, programs: Sequence[Program]) -> list[Tensor]:
        """Run programs to their ends; what they return, on the current stream. May be captured in a graph."""
        compute, talking = torch.cuda.current_stream(), self._talking
        said: dict[int, tuple[Talk, Event]] = {}  # a talk holds its tensors until compute has waited for it
        found: dict[int, Tensor] = {}
        while len(found) < len(programs):
            for i, program in enumerate(programs):
                if i in found:
                    continue
                if i in said:
                    compute.wait_event(said.pop(i)[1])
                try:
                    talk = next(program)
                except StopIteration as end:
                    found[i] = end.value
                    continue
                talking.wait_stream(compute)
                with torch.cuda.stream(talking):
                    talk()
                    done = talking.record_event()
                said[i] = talk, done
        compute.wait_stream(talking)
        return [found[i] for i in range(len(programs))]
