"""Two threads: programs compute on one, in turn, and talk on another, under each other. For ranks of CPUs.

    compute   A ─── B ─── A ─── B ───
    talk            A     B     A         one at a time, in the same order on all ranks

While gloo waits for what comes it needs no core, and no lock of Python's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from services.executor.pieces import COMM, COMPUTE, Notes
from services.executor.programs import Program, Talk, together

_Said = SimpleQueue[Exception | None]  # gets one, when it is


class HostLanes:
    """The thread that talks. One for a thread that computes."""

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
