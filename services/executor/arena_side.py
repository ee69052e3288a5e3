"""The actor's side of the KV tiers: which arena to map, which copies to make, and whom to tell.

    Beat of kv_offload ──▶ on_peer ──▶ copy lane: map        ──▶ ArenaReleased of the one before
    KvCopy             ──▶ copy    ──▶ copy lane: pieces ... ──▶ KvCopied

Everything here is called on the event loop; the lane's answers come back through it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec

from services.executor.backend import Backend
from services.executor.copies import CopyLane, Told
from services.executor.copy_rate import CopyRate
from services.executor.guard import copy_flaw
from services.executor.mapping import NO_ARENA
from shared.messages import ArenaReleased, KvCopied, KvCopy
from shared.peers import Peer
from shared.port import Port

log = logging.getLogger("headrace.executor")
P = ParamSpec("P")


class ArenaSide:
    """Of one executor, from the moment that its engine is built."""

    def __init__(self, backend: Backend, port: Port, host_id: str, quiet: Callable[[], None]) -> None:
        """`quiet` is called when the last copy of an earlier incarnation has ended."""
        loop = asyncio.get_running_loop()

        def on_loop(handler: Callable[P, None]) -> Callable[P, None]:
            def later(*args: P.args, **kwargs: P.kwargs) -> None:
                loop.call_soon_threadsafe(lambda: handler(*args, **kwargs))

            return later

        self._info = backend.info
        self._port = port
        self._host_id = host_id
        self._scheduler = ""
        self._epoch = 0
        self._since = 0  # the epoch of the kv_offload whose arena it is
        told = Told(
            copied=on_loop(self._on_copied), quiet=on_loop(quiet), unmapped=on_loop(self._on_unmapped)
        )
        self._lane = CopyLane(backend.copier(), port.clock, told)
        self.stepped = self._lane.stepped  # by the threads that compute
        self.close = self._lane.close
        for actor in port.peers.ready("kv_offload"):
            if (peer := port.peers.get(f"kv_offload.{actor}")) is not None:
                self.on_peer(peer)

    @property
    def generation(self) -> int:
        """Of the arena that is mapped, 0 without one."""
        return self._lane.generation

    @property
    def quiet(self) -> bool:
        """True when no copy of an earlier incarnation runs: the blocks may be used for something else."""
        return self._lane.quiet

    @property
    def since_us(self) -> int:
        """When the copy that runs began, 0 when none does."""
        return self._lane.since_us

    def begin(self, scheduler: str, epoch: int) -> None:
        """A new incarnation, of this scheduler."""
        self._scheduler, self._epoch = scheduler, epoch
        self._lane.begin(epoch)

    def on_peer(self, peer: Peer) -> None:
        """Map the arena of this host's kv_offload, the latest that said it is ready. One that died leaves its
        mapping here until the next."""
        beat = peer.beat
        if beat.kind != "kv_offload" or beat.host_id != self._host_id or beat.state != "ready":
            return
        if peer.epoch < self._since:
            log.warning("%s is a second kv_offload on this host: the later one is used", peer.source)
            return
        self._since = peer.epoch
        self._lane.map(*((beat.arena, beat.arena_generation) if beat.arena else NO_ARENA))

    def copy(self, copy: KvCopy) -> None:
        """Make a copy, or say why not."""
        flaw = copy_flaw(copy, self._info)
        if not flaw and not self._lane.put(copy):
            flaw = "too many copies wait"
        if flaw:
            log.error("the copy of job %d is refused: %s", copy.job, flaw)
            self._port.send(self._scheduler, KvCopied(job=copy.job, status="failed"))

    @property
    def copied(self) -> dict[str, CopyRate]:
        """What was copied so far, by direction."""
        return {"store": self._lane.stored, "load": self._lane.loaded}

    @property
    def queued(self) -> int:
        """Copies that wait."""
        return self._lane.queued

    def status(self) -> dict[str, object]:
        """Facts of the copies for `headrace status`."""
        stored, loaded = self._lane.stored, self._lane.loaded
        return {
            "arena_generation": self._lane.generation,
            "copies_queued": self.queued,
            "copies_stored": stored.copies,
            "copies_loaded": loaded.copies,
            "stored_bytes": stored.bytes,
            "loaded_bytes": loaded.bytes,
            "stored_us": stored.us,
            "loaded_us": loaded.us,
            "store_mb_s": stored.mb_s,
            "load_mb_s": loaded.mb_s,
        }

    def _on_copied(self, epoch: int, copied: KvCopied) -> None:
        if epoch == self._epoch:
            self._port.send(self._scheduler, copied)

    def _on_unmapped(self, generation: int) -> None:
        if self._scheduler:
            released = ArenaReleased(executor=self._port.actor, arena_generation=generation)
            self._port.send(self._scheduler, released)
