"""Pauses at will, each followed by the loss of everything that the device still holds of the paused: so it
comes back from a tier below, or is computed again, but never from the device.

    hook(event) ─▶ pause whom `wanted` names ─▶ no slot is free until their blocks have been copied down
                ─▶ their blocks are forgotten and spoiled ─▶ the slots are free again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from recording import Recording

from services.scheduler import preempt
from services.scheduler.actor import SchedulerActor
from services.scheduler.events import Arrived, Event, Ticked
from services.scheduler.records import Sequence
from services.scheduler.state import Executor, State
from shared.messages import KvCopied

Wanted = Callable[[Executor], list[Sequence]]


def copy_all(view: object) -> str:
    """A policy of kind `tier`: every block without a copy is copied, so that all of it can be lost."""
    return "copy"


class Slots(list[int]):
    """Free slots, of which there seem to be none while it is shut: nobody is admitted then."""

    shut = False

    def __len__(self) -> int:
        return 0 if self.shut else super().__len__()


@dataclass
class Forced:
    """Stands before the scheduler's event handler. It checks the bytes of each load, too."""

    actor: SchedulerActor
    engine: Recording
    wanted: Wanted = lambda executor: []
    stored: dict[bytes, bytes] = field(default_factory=dict)  # key -> digest of the block that was copied down
    restored: int = 0  # blocks that came up with the bytes that had gone down
    pauses: int = 0
    away: set[int] = field(default_factory=set)  # sequences whose blocks are on their way down

    def __post_init__(self) -> None:
        self._handle = self.actor._handle
        self.actor._handle = self.hook  # type: ignore[method-assign]  # white box

    @property
    def state(self) -> State:
        return self.actor._core.state

    def executor(self) -> Executor | None:
        return next(iter(self.state.executors.values()), None)

    def hook(self, event: Event) -> None:
        """In place of the actor's own handler."""
        if isinstance(event, Arrived) and isinstance(event.message, KvCopied):
            self._copied(event.message)
        self._handle(event)
        executor = self.executor()
        if executor is None:
            return
        if self.away:
            self._see_off(executor)
        else:
            self._pause(executor, self.wanted(executor))

    def evict(self) -> int:
        """Everything that the device holds for nobody is lost. How many blocks it was."""
        executor = self.executor()
        assert executor is not None
        return self._forget(executor, [*executor.ledger._cached, *executor.ledger._dirty])

    def _pause(self, executor: Executor, victims: list[Sequence]) -> None:
        if not victims:
            return
        self.state.now_us = self.actor._port.clock.now_us()
        self._slots(executor).shut = True
        for victim in victims:
            if victim in executor.running:
                preempt.pause(self.state, executor, victim, f"seq {victim.seq} forced", [victim])
                self.away.add(victim.seq)
                self.pauses += 1
        self._see_off(executor)
        self._handle(Ticked())  # what the pause has to say goes out

    def _see_off(self, executor: Executor) -> None:
        ledger = executor.ledger
        executor.looked_us = -(10**9)  # its dirty blocks are judged at once
        theirs = {block for block in range(ledger.blocks) if ledger._owner[block][0] in self.away}
        waiting = [*ledger._dirty, *ledger._copying, *(b for fence in ledger._fences.values() for b in fence)]
        if theirs.intersection(waiting):
            return
        self._forget(executor, [block for block in ledger._cached if block in theirs])
        self.away.clear()
        self._slots(executor).shut = False
        self._handle(Ticked())

    def _slots(self, executor: Executor) -> Slots:
        ledger = executor.ledger
        if not isinstance(ledger._free_slots, Slots):
            ledger._free_slots = Slots(ledger._free_slots)
        return ledger._free_slots

    def _forget(self, executor: Executor, blocks: list[int]) -> int:
        for block in blocks:
            executor.ledger.forget(block)
        self.engine.spoil(blocks)
        return len(blocks)

    def _copied(self, copied: KvCopied) -> None:
        job = self.state.tiers.jobs.get(copied.job)
        if job is None or copied.status != "ok":
            return
        digests = [self.engine.digest(block) for block in job.blocks]
        if job.up:
            assert digests == [self.stored[key] for key in job.keys], "other bytes came up than went down"
            self.restored += len(digests)
        else:
            rows = zip(job.keys, digests, job.written, strict=True)
            self.stored |= {key: digest for key, digest, written in rows if written}
