"""Pauses at will, each followed by the loss of everything that the device still holds of the paused: so it
comes back from a tier below, or is computed again, but never from the device.

    hook(event) ─▶ pause the sequences of `wanted` ─▶ no slot is free until their blocks have been copied down
                ─▶ their blocks are forgotten and spoiled ─▶ the slots are free again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from support.recording import Recording

from services.scheduler import preemption
from services.scheduler.actor import SchedulerActor
from services.scheduler.state.requests import Arrived, Event, Sequence, Ticked
from services.scheduler.state.state import Executor, State
from shared.messages import KvCopied

Wanted = Callable[[Executor], list[Sequence]]


def copy_all(view: object) -> str:
    """A policy of kind `tier`: every block without a copy is copied, so that all of it can be lost."""
    return "copy"


class Slots(list[int]):
    """Free slots, of which there seem to be none while it is shut: no request is admitted then."""

    shut = False

    def __len__(self) -> int:
        return 0 if self.shut else super().__len__()


@dataclass
class Forced:
    """Stands before the scheduler's event handler. It checks the bytes of each load, too."""

    actor: SchedulerActor
    engine: Recording
    wanted: Wanted = lambda executor: []
    stored: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)  # by key: what went down
    restored: int = 0  # blocks that came up with the bytes that had gone down
    wrong: int = 0  # ... with others
    pauses: int = 0
    indices: list[int] = field(default_factory=list)  # steps planned before each pause of `pause_at`
    away: set[int] = field(default_factory=set)  # sequences whose blocks are on their way down

    def __post_init__(self) -> None:
        self._handle = self.actor._handle
        self.actor._handle = self.hook

    @property
    def state(self) -> State:
        return self.actor._core.state

    @property
    def executor(self) -> Executor:
        """The one that there is."""
        return next(iter(self.state.executors.values()))

    def pause_at(self, *steps: int) -> None:
        """Pause all that run once so many steps have been planned from now on, for each of these numbers."""
        first, left = self.executor.step, sorted(steps, reverse=True)

        def wanted(executor: Executor) -> list[Sequence]:
            victims = [s for s in executor.running if not s.copies.load_job]
            if not left or not victims or executor.step < first + left[-1]:
                return []
            self.indices.append(executor.step - first)
            left.pop()
            return victims

        self.wanted = wanted

    def hook(self, event: Event) -> None:
        """In place of the actor's own handler."""
        if isinstance(event, Arrived) and isinstance(event.message, KvCopied):
            self._copied(event.message)
        self._handle(event)
        for executor in self.state.executors.values():
            if self.away:
                self._see_off(executor)
            else:
                self._pause(executor, self.wanted(executor))

    def look(self) -> bool:
        """Let the scheduler look at its dirty blocks now. True when all are copied."""
        executor = self.executor
        pool = executor.pool
        executor.store_pace.judged_us = -(10**9)
        self._handle(Ticked())
        return not (pool.dirty_blocks or pool.fenced_blocks or self.state.tiers.jobs)

    def evict(self) -> int:
        """Everything that the device holds unowned is lost. How many blocks it was."""
        pool = self.executor.pool
        return self._forget(self.executor, [*pool._cached, *pool._spent, *pool._dirty])

    def _pause(self, executor: Executor, victims: list[Sequence]) -> None:
        if not victims:
            return
        self.state.now_us = self.actor._mailbox.clock.now_us()
        self._slots(executor).shut = True
        for victim in victims:
            if victim in executor.running:
                preemption.preempt(self.state, executor, victim, f"seq {victim.seq} forced", [victim])
                self.away.add(victim.seq)
                self.pauses += 1
        self._see_off(executor)
        self._handle(Ticked())  # the messages of the pause go out

    def _see_off(self, executor: Executor) -> None:
        pool = executor.pool
        executor.store_pace.judged_us = -(10**9)  # its dirty blocks are judged at once
        theirs = {block for block in range(pool.blocks) if pool.owner_of[block][0] in self.away}
        waiting = [*pool._dirty, *pool._copying, *(b for fence in pool._fences.values() for b in fence)]
        if theirs.intersection(waiting):
            return
        self._forget(executor, [block for block in (*pool._cached, *pool._spent) if block in theirs])
        self.away.clear()
        self._slots(executor).shut = False
        self._handle(Ticked())

    def _slots(self, executor: Executor) -> Slots:
        pool = executor.pool
        if not isinstance(pool.free_slots, Slots):
            pool.free_slots = Slots(pool.free_slots)
        return pool.free_slots

    def _forget(self, executor: Executor, blocks: list[int]) -> int:
        for block in blocks:
            executor.pool.forget(block)
        self.engine.spoil(blocks)
        return len(blocks)

    def _copied(self, copied: KvCopied) -> None:
        job = self.state.tiers.jobs.get(copied.job)
        if job is None or copied.status != "ok":
            return
        digests = [self.engine.digests(block) for block in job.blocks]
        if job.up:  # after the last valid token steps in flight may have written since the copy down
            rows = zip(job.keys, digests, job.valid, strict=True)
            same = [key in self.stored and self.stored[key][n - 1] == of[n - 1] for key, of, n in rows]
            self.wrong += same.count(False)
            self.restored += same.count(True)
        else:
            made = zip(job.keys, digests, job.written, strict=True)
            self.stored |= {key: of for key, of, written in made if written}
