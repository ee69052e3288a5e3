"""The threads that talk to L2. Each has a connection and scratch memory of its own.

    loop: run(command) ──▶ worker: errand ──▶ loop: done(errand), then the worker is free again

A call that hangs costs its thread and nothing else: the core gives the call up at its deadline, the lane
starts another thread when it needs one, and with STUCK threads hanging `check` says that the process must
be replaced: there is no way to end a thread, and a new process costs L1 its contents, no request its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from services.kv_offload.errands import Errand
from services.kv_offload.events import L2Command, L2Probe
from services.kv_offload.store import Remote
from shared.errors import EngineError

STUCK = 16
GREETING = 0  # the call of the first canary; the core counts from 1
GREET_S = 2.0  # for it: an L2 that is slower is met by the breaker
CLOSE_S = 2.0  # for threads to end; they are daemons, and none is waited for longer


class _Worker:
    """One thread."""

    def __init__(self, lane: Lane, number: int) -> None:
        self.errands: SimpleQueue[Errand | None] = SimpleQueue()
        self.generation = 0
        self._lane = lane
        self._remote: Remote | None = None
        self._scratch = bytearray()
        self.thread = threading.Thread(target=self._work, name=f"l2-{number}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (errand := self.errands.get()) is not None:
            problem: BaseException | None = None
            try:
                errand.run(partial(self._connected, isinstance(errand.command, L2Probe)), self._take)
            except Exception as error:  # noqa: BLE001 - reported on the loop: the actor fails of it
                problem = error
            self._lane.settle(self, errand, problem)
        if self._remote is not None:
            self._remote.close()

    def _connected(self, anew: bool) -> Remote:
        if self._remote is not None and (anew or self.generation != self._lane.generation):
            self._remote.close()
            self._remote = None
        if self._remote is None:
            self._remote = self._lane.open_remote()
            self.generation = self._lane.generation
        return self._remote

    def _take(self, size_bytes: int) -> memoryview:
        """Scratch, the same again and again: the errand before is settled."""
        if len(self._scratch) < size_bytes:
            self._scratch = bytearray(size_bytes)
        return memoryview(self._scratch)[:size_bytes]


class Lane:
    """Runs commands beside the loop. All methods but `settle` are called on the loop."""

    def __init__(
        self,
        open_remote: Callable[[], Remote],
        view: Callable[[bytes], memoryview],
        done: Callable[[Errand], None],
    ) -> None:
        self.open_remote = open_remote
        self.generation = 0  # of connections: a canary that works makes all others be opened anew
        self._view = view
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._running: dict[int, Errand] = {}
        self._abandoned: set[int] = set()
        self._problem: BaseException | None = None
        self._greeted = asyncio.Event()

    async def greet(self) -> None:
        """Open the connection that the first call finds, by way of a canary: a lookup has 10 ms, and a
        connection takes longer. Within GREET_S, whatever L2 does."""
        self.run(L2Probe(GREETING))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._greeted.wait(), GREET_S)

    def run(self, command: L2Command) -> None:
        """Begin it; `done` is called with the errand when it has ended, unless it was abandoned."""
        errand = self._running[command.call] = Errand(command, self._view)
        if not self._idle:
            self._idle.append(_Worker(self, len(self._workers)))
            self._workers += self._idle
        self._idle.pop().errands.put(errand)

    def abandon(self, call: int) -> None:
        """The call took too long."""
        self._running[call].abandon()
        self._abandoned.add(call)

    @property
    def stuck(self) -> int:
        """Threads in a call that was given up, or in a canary, which hangs or is about to end."""
        canaries = sum(isinstance(errand.command, L2Probe) for errand in self._running.values())
        return len(self._abandoned) + canaries

    def check(self) -> None:
        """Raises EngineError when so many threads hang that only a new process helps, and whatever a worker
        failed of."""
        if self._problem is not None:
            raise self._problem
        if self.stuck > STUCK:
            raise EngineError(f"{self.stuck} calls to L2 never returned: this process must be replaced")

    def close(self) -> None:
        """End the threads that do not hang."""
        for worker in self._workers:
            worker.errands.put(None)
        for worker in self._idle:
            worker.thread.join(CLOSE_S)

    def settle(self, worker: _Worker, errand: Errand, problem: BaseException | None) -> None:
        """On the worker's thread: the errand has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
            self._loop.call_soon_threadsafe(self._settle, worker, errand, problem)

    def _settle(self, worker: _Worker, errand: Errand, problem: BaseException | None) -> None:
        call = errand.command.call
        del self._running[call]
        self._problem = self._problem or problem
        if call in self._abandoned:
            self._abandoned.remove(call)
        elif problem is None:
            works = errand.ended is not None and errand.ended.status == "ok"
            if isinstance(errand.command, L2Probe) and works:
                self.generation += 1
                worker.generation = self.generation
            self._done(errand)
        if call == GREETING:
            self._greeted.set()
        self._idle.append(worker)
