"""The copy worker copies blocks between the cache and the host's arena while steps run.

    device thread: step 7 ────┐ step 8 ──────── step 9 ...
    copy worker:                └ KvCopy(after_step=7): piece, piece, piece ─▶ KvCopied

The worker takes the oldest copy with a computed `after_step`; a copy that waits for its step delays no other.
A copy can stop between two pieces: for a new incarnation, which may reuse its blocks and is announced only
after the copy has ended, or for a new arena, which ends the copy's mapping.

ExecutorActor uses `ArenaTransfers`; a `Mapping` attaches the copier to at most one arena.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from services.executor.engine import Arena, Backend, Copier, YieldDevice, copy_error
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peer
from shared.clock import Clock
from shared.messages import ArenaReleased, KvCopied, KvCopy
from shared.telemetry.counters import ExecutorCounter

log = logging.getLogger("headrace.executor")

NO_ARENA = ("", 0)  # name and generation
REST = 3  # while steps run, `attach` pauses for so many times the length of each slice
RECENT_US = 50_000  # steps count as running for so long after the last one
MAX_QUEUED = 4_096  # copies; a scheduler has a few for each sequence
_KEEP = 7 / 8  # weight of the earlier copies in a rate: about the last dozen copies count
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class _Job:
    copy: KvCopy
    epoch: int
    arrived_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCallbacks:
    """The worker calls these on its own thread."""

    on_copied: Callable[[int, KvCopied], None]  # with the incarnation
    on_idle: Callable[[], None]  # the last copy of an earlier incarnation has ended
    on_unmapped: Callable[[int], None]  # no mapping of this arena generation is left


class CopyWorker:
    """Owns the copy thread. The device or host thread calls `on_stepped`, one other thread the rest."""

    def __init__(
        self,
        copier: Copier,
        clock: Clock,
        callbacks: CopyCallbacks,
        computing: Callable[[], bool] = lambda: False,
    ) -> None:
        """`computing`: whether a step is running."""
        self._copier = copier
        self._clock = clock
        self._callbacks = callbacks
        self._computing = computing
        self._stepped_us = -RECENT_US  # when the last step ended
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self.since_us = 0  # when the running copy began, 0 without one
        self._epoch = 0
        self._computed = -1  # last computed step of this incarnation; 0 once the device has reset
        self._mapping = Mapping(copier, self._yield_device)  # only the thread changes it
        self._wanted = NO_ARENA  # name and generation
        self._closed = False
        self.stored, self.loaded = CopyRate(), CopyRate()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """True when no copy of an earlier incarnation runs: its blocks may be reused."""
        running = self._running
        return running is None or running.epoch == self._epoch

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def generation(self) -> int:
        """The generation of the mapped arena, 0 without one."""
        arena = self._mapping.arena
        return 0 if arena is None else arena.generation

    def begin(self, epoch: int) -> None:
        """Start a new incarnation: drop the queued copies and stop the running one, without answers. Copies
        of the new one wait for `on_stepped(epoch, 0)`."""
        with self._changed:
            self._epoch, self._computed = epoch, -1
            self._queue.clear()

    def on_stepped(self, epoch: int, step: int) -> None:
        """Report that this step and all before it have been computed."""
        with self._changed:
            if epoch == self._epoch:
                self._computed = step
                self._stepped_us = self._clock.now_us() if step else -RECENT_US
                if self._queue:
                    self._changed.notify()

    def queue_copy(self, copy: KvCopy) -> bool:
        """Queue a copy of this incarnation; False if MAX_QUEUED are queued. Never blocks for long."""
        with self._changed:
            if len(self._queue) >= MAX_QUEUED:
                return False
            self._queue.append(_Job(copy, self._epoch, self._clock.now_us()))
            self._changed.notify()
        return True

    def map(self, name: str, generation: int) -> None:
        """Map this arena instead of the present one; NO_ARENA: none."""
        with self._changed:
            self._wanted = (name, generation)
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Stop the running copy, unmap, end the thread."""
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
                job = None if remap or self._closed else self._next_job()
            if remap:
                if generation := self._mapping.change(*wanted):
                    self._callbacks.on_unmapped(generation)
            elif job is not None:
                self._finish(job, self._copy(job))
            else:
                return

    def _yield_device(self, took_s: float) -> bool:
        """See Copier.attach. Without running steps the next slice starts at once."""
        with self._changed:
            if self._computing() or self._clock.now_us() - self._stepped_us < RECENT_US:
                self._changed.wait_for(self._is_unwanted, REST * took_s)
            return not self._is_unwanted()

    def _is_unwanted(self) -> bool:
        return self._closed or self._wanted != self._mapping.of

    def _has_work(self) -> bool:
        return self._is_unwanted() or self._ready() is not None

    def _ready(self) -> _Job | None:
        return next((job for job in self._queue if job.copy.after_step <= self._computed), None)

    def _next_job(self) -> _Job | None:
        job = self._running = self._ready()
        if job is not None:
            self._queue.remove(job)
            self.since_us = self._clock.now_us()
        return job

    def _finish(self, job: _Job, copied: KvCopied) -> None:
        with self._changed:
            self._running, self.since_us = None, 0
            is_current = job.epoch == self._epoch
        if not is_current:
            self._callbacks.on_idle()
        elif not self._closed:
            self._callbacks.on_copied(job.epoch, copied)

    def _copy(self, job: _Job) -> KvCopied:
        began_us = self.since_us
        try:
            status, done, moved_us = self._pieces(job)
        except Exception as error:  # noqa: BLE001 - all copies would wait for a dead thread
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
            took_us=min(moved_us or took_us, took_us),  # the host's part counts as message time
            wait_us=began_us - job.arrived_us,
        )

    def _pieces(self, job: _Job) -> tuple[str, int, int]:
        """Copy until the end or a reason to stop. Returns the status, the number of copied blocks, and the
        device clock's time in us (0 without one)."""
        copy, arena = job.copy, self._mapping.arena
        if not copy.blocks:
            return "ok", 0, 0
        if arena is None:
            return "no_arena", 0, 0
        if copy.arena_generation != arena.generation:
            return "stale_arena", 0, 0
        if error := arena.range_error(copy.offsets, copy.block_bytes):
            log.error("the copy of job %d failed: %s", copy.job, error)
            return "failed", 0, 0
        try:
            status, done = self._move(job)
        except Exception:
            self._copier.finish()
            raise
        return status, done, self._copier.finish()

    def _move(self, job: _Job) -> tuple[str, int]:
        """Like `_pieces`; the copier may still be moving bytes on return."""
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


class Mapping:
    """Attaches a copier to at most one arena. `arena` is the mapped one, or None."""

    def __init__(self, copier: Copier, yield_device: YieldDevice) -> None:
        self._copier = copier
        self._yield_device = yield_device
        self.of = NO_ARENA  # the last wanted arena, also if it could not be mapped
        self.arena: Arena | None = None

    def change(self, name: str, generation: int) -> int:
        """Map this arena instead, or none. Returns the generation that is unmapped now, 0 without one. If an
        arena cannot be mapped, an error is logged and the engine works without copies."""
        released = self._unmap()
        self.of = (name, generation)
        if self.of != NO_ARENA:
            self._map(name, generation)
        return released

    def _map(self, name: str, generation: int) -> None:
        arena = None
        try:
            arena = Arena(name, generation)
            self._copier.attach(arena, self._yield_device)
        except Exception as error:  # noqa: BLE001 - a device's driver raises other types
            log.error("no arena: %s", error)
        else:
            self.arena, arena = arena, None
        if arena is not None:
            _close(arena)

    def _unmap(self) -> int:
        arena, self.arena = self.arena, None
        if arena is None:
            return 0
        self._copier.detach()
        return arena.generation if _close(arena) else 0


def _close(arena: Arena) -> bool:
    """False while a copier keeps a view of it."""
    try:
        arena.close()
    except BufferError:  # a copier keeps a view: the memory stays mapped until the process ends
        log.error("the arena of generation %d is still in use and stays mapped", arena.generation)
        return False
    return True


class CopyRate:
    """Counters of the copies in one direction, and their recent rate in bytes a microsecond, which is
    MB/s."""

    def __init__(self) -> None:
        self.copies = 0
        self.bytes = 0
        self.us = 0
        self._recent_bytes = self._recent_us = 0.0

    def add(self, copied_bytes: int, took_us: int) -> None:
        """Count a complete copy."""
        self.copies += 1
        self.bytes += copied_bytes
        self.us += took_us
        self._recent_bytes = self._recent_bytes * _KEEP + copied_bytes
        self._recent_us = self._recent_us * _KEEP + took_us

    @property
    def mb_s(self) -> int:
        """The rate of the last copies, 0 without any."""
        return round(self._recent_bytes / self._recent_us) if self._recent_us else 0


def on_loop(mailbox: Mailbox, handler: Callable[P, None]) -> Callable[P, None]:
    """A function for other threads that calls an actor's `handler` on the running event loop. It does nothing
    once the loop is closed."""
    loop, guarded = asyncio.get_running_loop(), mailbox.guarded(handler)

    def later(*args: P.args, **kwargs: P.kwargs) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: guarded(*args, **kwargs))

    return later


class ArenaTransfers:
    """The actor's side of the KV tiers: it maps the host's arena, makes copies and sends the answers. The
    actor creates it once the engine is built.

        heartbeat of kv_offload ──▶ on_peer ──▶ copy worker: map        ──▶ ArenaReleased of the arena before
        KvCopy                  ──▶ copy    ──▶ copy worker: pieces ... ──▶ KvCopied

    All calls but `worker.on_stepped` are on the event loop; the worker's answers return through the loop."""

    def __init__(
        self,
        backend: Backend,
        mailbox: Mailbox,
        host_id: str,
        on_idle: Callable[[], None],
        computing: Callable[[], bool],
    ) -> None:
        """`on_idle` is called when the last copy of an earlier incarnation has ended; `computing`: whether a
        step is running."""
        self._info = backend.info
        self._mailbox = mailbox
        self._host_id = host_id
        self._scheduler = ""
        self._epoch = 0
        self._owner, self._since = "", 0  # the kv_offload that owns the arena, and its epoch
        callbacks = CopyCallbacks(
            on_copied=on_loop(mailbox, self._on_copied),
            on_idle=on_loop(mailbox, on_idle),
            on_unmapped=on_loop(mailbox, self._on_unmapped),
        )
        self.worker = CopyWorker(backend.copier, mailbox.clock, callbacks, computing)
        self._find_arena()

    def begin(self, scheduler: str, epoch: int) -> None:
        """Start a new incarnation for this scheduler."""
        self._scheduler, self._epoch = scheduler, epoch
        self.worker.begin(epoch)

    def on_peer(self, peer: Peer) -> None:
        """Map the arena of the latest ready kv_offload on this host. The mapping stays after its kv_offload
        has died, until the next one."""
        heartbeat = peer.heartbeat
        if heartbeat.kind != "kv_offload" or heartbeat.host_id != self._host_id or heartbeat.state != "ready":
            return
        if peer.epoch < self._since:
            log.warning("%s is a second kv_offload on this host: the later one is used", peer.source)
            return
        self._owner, self._since = peer.source, peer.epoch
        self.worker.map(*((heartbeat.arena, heartbeat.arena_generation) if heartbeat.arena else NO_ARENA))

    def on_peer_gone(self, peer: Peer) -> None:
        """Without its owner the arena may be replaced by any other, also of an earlier epoch (a clock set
        back)."""
        if peer.source == self._owner:
            self._owner, self._since = "", 0
            self._find_arena()

    def copy(self, copy: KvCopy) -> None:
        """Queue a copy, or send its failure."""
        error = copy_error(copy, self._info)
        if not error and not self.worker.queue_copy(copy):
            error = "too many copies wait"
        if error:
            log.error("the copy of job %d is refused: %s", copy.job, error)
            self._mailbox.send(self._scheduler, KvCopied(job=copy.job, status="failed"))

    def status(self) -> dict[str, object]:
        """Facts of the copies for `headrace status`."""
        stored, loaded = self.worker.stored, self.worker.loaded
        return {
            "arena_generation": self.worker.generation,
            ExecutorCounter.COPIES_QUEUED.status: self.worker.queued,
            "copies_stored": stored.copies,
            "copies_loaded": loaded.copies,
            "stored_bytes": stored.bytes,
            "loaded_bytes": loaded.bytes,
            "stored_us": stored.us,
            "loaded_us": loaded.us,
            "store_mb_s": stored.mb_s,
            "load_mb_s": loaded.mb_s,
        }

    def _find_arena(self) -> None:
        for actor in self._mailbox.peers.ready("kv_offload"):
            if (peer := self._mailbox.peers.get(f"kv_offload.{actor}")) is not None:
                self.on_peer(peer)

    def _on_copied(self, epoch: int, copied: KvCopied) -> None:
        if epoch == self._epoch:
            self._mailbox.send(self._scheduler, copied)

    def _on_unmapped(self, generation: int) -> None:
        if self._scheduler:
            released = ArenaReleased(executor=self._mailbox.actor, arena_generation=generation)
            self._mailbox.send(self._scheduler, released)
