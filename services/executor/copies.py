"""The copy lane: blocks between the cache and the host's arena, beside the steps.

    device thread: step 7 ────┐ step 8 ──────── step 9 ...
    copy lane:                └ KvCopy(after_step=7): piece, piece, piece ─▶ KvCopied

It takes the oldest copy whose step has been computed; one that still waits for its step holds nobody up.
A copy stops between two pieces: a new incarnation may use its blocks for something else, so that
incarnation is not announced before the lane is quiet; a new arena ends the mapping that it copies through.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.executor.backend import Copier
from services.executor.copy_rate import CopyRate
from services.executor.mapping import NO_ARENA, Mapping
from shared.clock import Clock
from shared.messages import KvCopied, KvCopy

log = logging.getLogger("headrace.executor")

MOST_QUEUED = 4_096  # copies; a scheduler has a few for each sequence


@dataclass(frozen=True, slots=True)
class _Job:
    copy: KvCopy
    epoch: int
    arrived_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Whom the lane tells what, on its own thread."""

    copied: Callable[[int, KvCopied], None]  # of that incarnation
    quiet: Callable[[], None]  # the copy that ran when a new incarnation began has ended
    unmapped: Callable[[int], None]  # no mapping of this arena generation is left


class CopyLane:
    """A thread. `stepped` is called by the device thread or the host lane, the rest by one other thread."""

    def __init__(self, copier: Copier, clock: Clock, told: Told) -> None:
        self._copier = copier
        self._clock = clock
        self._told = told
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._began_us = 0
        self._epoch = 0
        self._computed = -1  # last step of this incarnation; 0 once the device has begun it
        self._mapping = Mapping(copier)  # the thread's to change
        self._wanted = NO_ARENA  # name and generation
        self._closed = False
        self.stored, self.loaded = CopyRate(), CopyRate()
        self._thread = threading.Thread(target=self._run, name="copy-lane", daemon=True)
        self._thread.start()

    @property
    def quiet(self) -> bool:
        """True when no copy of an earlier incarnation runs."""
        running = self._running
        return running is None or running.epoch == self._epoch

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def since_us(self) -> int:
        """When the copy that runs began, 0 when none does."""
        return self._began_us

    @property
    def generation(self) -> int:
        """Of the arena that is mapped, 0 without one."""
        arena = self._mapping.arena
        return 0 if arena is None else arena.generation

    def begin(self, epoch: int) -> None:
        """A new incarnation: forget what is queued and stop what runs, without an answer. Nothing of the new
        one runs before `stepped(epoch, 0)`."""
        with self._changed:
            self._epoch, self._computed = epoch, -1
            self._queue.clear()

    def stepped(self, epoch: int, step: int) -> None:
        """A step has been computed, and all before it."""
        with self._changed:
            if epoch == self._epoch:
                self._computed = step
                if self._queue:
                    self._changed.notify()

    def put(self, copy: KvCopy) -> bool:
        """Queue a copy of the present incarnation; False when there are too many. Never blocks for long."""
        with self._changed:
            if len(self._queue) >= MOST_QUEUED:
                return False
            self._queue.append(_Job(copy, self._epoch, self._clock.now_us()))
            self._changed.notify()
        return True

    def map(self, name: str, generation: int) -> None:
        """Use this arena instead of the present one; NO_ARENA: none."""
        with self._changed:
            self._wanted = (name, generation)
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Stop what runs, unmap, end the thread."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join(timeout_s)

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                wanted = NO_ARENA if self._closed else self._wanted
                remap = wanted != self._mapping.of
                job = None if remap or self._closed else self._take()
            if remap:
                if generation := self._mapping.change(*wanted):
                    self._told.unmapped(generation)
            elif job is not None:
                self._finish(job, self._copy(job))
            else:
                return

    def _has_work(self) -> bool:
        return self._closed or self._wanted != self._mapping.of or self._ready() is not None

    def _ready(self) -> _Job | None:
        return next((job for job in self._queue if job.copy.after_step <= self._computed), None)

    def _take(self) -> _Job | None:
        job = self._running = self._ready()
        if job is not None:
            self._queue.remove(job)
            self._began_us = self._clock.now_us()
        return job

    def _finish(self, job: _Job, copied: KvCopied) -> None:
        with self._changed:
            self._running, self._began_us = None, 0
            of_now = job.epoch == self._epoch
        if not of_now:
            self._told.quiet()
        elif not self._closed:
            self._told.copied(job.epoch, copied)

    def _copy(self, job: _Job) -> KvCopied:
        began_us = self._began_us
        try:
            status, done, moved_us = self._pieces(job)
        except Exception as error:  # noqa: BLE001 - a dead thread would leave every copy waiting
            log.error("the copy of job %d failed: %s: %s", job.copy.job, type(error).__name__, error)
            status, done, moved_us = "failed", 0, 0
        took_us = self._clock.now_us() - began_us
        moved = done * job.copy.block_bytes
        if status == "ok":
            (self.stored if job.copy.to_arena else self.loaded).add(moved, took_us)
        return KvCopied(
            job=job.copy.job,
            status=status,
            bytes=moved,
            took_us=min(moved_us or took_us, took_us),  # what is the host's part counts as its messages' way
            wait_us=began_us - job.arrived_us,
        )

    def _pieces(self, job: _Job) -> tuple[str, int, int]:
        """Copy until the end or a reason to stop; the status, how many blocks were copied, and how long that
        took by the device's clock, if it has one."""
        copy, arena = job.copy, self._mapping.arena
        if not copy.blocks:
            return "ok", 0, 0
        if arena is None:
            return "no_arena", 0, 0
        if copy.arena_generation != arena.generation:
            return "stale_arena", 0, 0
        if flaw := arena.flaw(copy.offsets, copy.block_bytes):
            log.error("the copy of job %d failed: %s", copy.job, flaw)
            return "failed", 0, 0
        try:
            status, done = self._move(job)
        except Exception:
            self._copier.finish()
            raise
        return status, done, self._copier.finish()

    def _move(self, job: _Job) -> tuple[str, int]:
        """As `_pieces`; of what was asked of the copier some may still be under way."""
        copy = job.copy
        move = self._copier.store if copy.to_arena else self._copier.load
        piece = max(1, self._copier.piece_bytes // copy.block_bytes)
        for first in range(0, len(copy.blocks), piece):
            if self._closed or job.epoch != self._epoch:
                return "failed", first
            if self._wanted != self._mapping.of:
                return "stale_arena", first
            move(copy.blocks[first : first + piece], copy.offsets[first : first + piece])
        return "ok", len(copy.blocks)
