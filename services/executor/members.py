"""The other ranks of a group as its leader has them: processes, what they are told, and their end.

    leader ── orders ──▶ rank 1, rank 2, ...      one pipe each; a closed pipe ends the follower
           ◀─ answers ──                          its end, however it comes, is the end of the group

A group lives and dies as one. A rank that is gone cannot be replaced: the KV of every sequence is cut across
all ranks, and the others may be waiting for it in the middle of a sum, on a GPU for ever.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import NoReturn

from services.executor.orders import Answer, Do, Gone, Order, Sampled
from shared.errors import EngineError

log = logging.getLogger("headrace.executor")

END_WITHIN_S = 5.0


class Members:
    """The followers of one leader. `tell` may be called by any thread, `answers` by one at a time."""

    def __init__(self, count: int, environment: Mapping[str, str], lost: Callable[[str], None]) -> None:
        """Start them. `lost` is called once, on a thread of its own, when one is gone before `end`."""
        self._lost = lost
        self._over = False  # lost or ended
        self._telling = threading.Lock()
        self._answers: queue.SimpleQueue[Answer | EngineError] = queue.SimpleQueue()
        self._sampled: queue.SimpleQueue[Sampled] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for rank in range(1, count + 1):
            ours, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-m", "services.executor.follower", str(theirs.fileno())]
            process = subprocess.Popen(
                [*command, str(rank)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        threading.Thread(target=self._listen, name="members", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank from 1 on."""
        return [process.pid for process in self._processes]

    def tell(self, order: Order) -> None:
        """Send an order to all; they have those of one thread in order."""
        data = ForkingPickler.dumps(order)
        with self._telling:
            for pipe in self._pipes:
                self._send(pipe, data)

    def tell_each(self, orders: list[Order]) -> None:
        """Send each follower its own order."""
        with self._telling:
            for pipe, order in zip(self._pipes, orders, strict=True):
                self._send(pipe, ForkingPickler.dumps(order))

    def answers(self) -> int:
        """Wait for an answer of each; the longest time of them. Raises EngineError for an error in any, or
        once one is gone."""
        found = [self._answer() for _ in self._pipes]
        if errors := [answer.error for answer in found if answer.error]:
            raise EngineError(errors[0])
        return max(answer.took_us for answer in found)

    def sampled(self) -> Sampled:
        """Wait for the last stage's next step. Never returns once one is gone, as `give_up`."""
        return self._sampled.get()

    def give_up(self, why: str) -> NoReturn:
        """The group cannot go on: say so, and never return. What the ranks were at has no answer, and a
        sequence whose step fails would be told so, where one whose executor dies goes on elsewhere."""
        self._gone(why)
        threading.Event().wait()
        raise AssertionError("nothing sets that event")

    def end(self) -> None:
        """Have them end; kill who does not."""
        if self._over:
            return
        self._over = True
        self.tell(Do.END)
        for process in self._processes:
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answer(self) -> Answer:
        answer = self._answers.get()
        if isinstance(answer, EngineError):
            self._answers.put(answer)  # for whoever asks next
            raise answer
        return answer

    def _send(self, pipe: Connection, data: memoryview) -> None:
        with contextlib.suppress(OSError):  # whoever is gone is noticed by its end of the pipe
            pipe.send_bytes(data)

    def _listen(self) -> None:
        ranks: dict[object, int] = {pipe: rank for rank, pipe in enumerate(self._pipes, 1)}
        while True:
            for pipe in wait(self._pipes):
                assert isinstance(pipe, Connection), "only pipes are waited for"
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    said = Gone("its process has ended")
                if isinstance(said, Answer):
                    self._answers.put(said)
                elif isinstance(said, Sampled):
                    self._sampled.put(said)
                else:
                    self._gone(f"rank {ranks[pipe]} is gone: {said.why}")
                    return

    def _gone(self, why: str) -> None:
        if self._over:
            return
        self._over = True
        for process in self._processes:
            process.kill()
        self._answers.put(EngineError(why))
        self._lost(why)
