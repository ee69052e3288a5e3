"""The shell of kv_offload: one per host. Mailbox to core, core to mailbox, and to the threads of L2.

The arena opens on a thread; until it is there every lookup answers that nothing is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from services.kv_offload import opening, status
from services.kv_offload.core import KvCore
from services.kv_offload.errands import Errand
from services.kv_offload.events import (
    Abandon,
    Arrived,
    Command,
    Event,
    Fill,
    PeerLost,
    PeerSeen,
    Restarted,
    Send,
    Ticked,
)
from services.kv_offload.lane import Lane
from services.kv_offload.opening import Opened, Plan
from services.kv_offload.store import Arena, Remote
from services.kv_offload.virtual import CountingArena
from shared.actor import Actor, Facts
from shared.config import Settings
from shared.messages import Message
from shared.peers import Peer
from shared.port import Port
from shared.readings import Readings

log = logging.getLogger("headrace.kv_offload")

Connect = Callable[[], Remote]


class KvOffloadActor(Actor):
    """Answers each lookup, reservation and prefetch to whoever asked."""

    kind = "kv_offload"

    def __init__(self, plan: Plan, connect: Connect | None = None, l2_url: str = "") -> None:
        self._plan = plan
        self._l2_url = l2_url  # to be shown
        self._connect = connect  # to L2; None: there is none
        self._core = KvCore(CountingArena(0, generation=0))
        self._opening: asyncio.Future[Opened] | None = None
        self._lane: Lane | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._problem: Exception | None = None

    async def start(self, port: Port) -> None:
        self._port = port
        if not self._plan.bytes:
            return
        loop = asyncio.get_running_loop()
        self._opening = loop.run_in_executor(None, opening.open_arena, self._plan, port.epoch)
        arena = (await asyncio.shield(self._opening)).arena
        if self._connect is not None:
            remote = await asyncio.to_thread(self._connect)  # imports what it needs, finds a wrong URL
            await asyncio.to_thread(remote.close)
            self._lane = Lane(self._connect, arena.view, self._l2_ended)
            await self._lane.greet()
        self._core = KvCore(arena, l2=self._lane is not None)
        for source in port.peers.ready("executor"):
            if (peer := port.peers.get(f"executor.{source}")) is not None:
                self.on_peer(peer)
        log.info("L1: %d MiB in %s, kept by %s", self._plan.bytes >> 20, arena.name, self._plan.store)

    def receive(self, source: str, message: Message, trace: str) -> None:
        self._handle(Arrived(source, self._port.epoch_of(source), message, trace))

    def on_peer(self, peer: Peer) -> None:
        if peer.beat.state not in ("stopped", "failed"):
            self._handle(PeerSeen(peer.source, peer.epoch))

    def on_restart(self, source: str) -> None:
        self._handle(PeerLost(source) if source.startswith("executor.") else Restarted(source))

    def on_peer_gone(self, peer: Peer) -> None:
        self._handle(PeerLost(peer.source))

    def upkeep(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self._lane is not None:
            self._lane.check()

    def facts(self) -> Facts:
        state = self._core.state
        if not state.l1.capacity_bytes:
            return Facts()
        arena = state.l1.arena
        return Facts(
            load=status.load(state),
            arena=arena.name,
            arena_generation=arena.generation,
            tiers=status.tiers(state),
            rates=status.rates(state),
        )

    @property
    def readings(self) -> Readings:
        return status.readings(self._core.state)

    def status(self) -> dict[str, object]:
        stuck = 0 if self._lane is None else self._lane.stuck
        kept = {"store": self._plan.store, "l2_url": self._l2_url, "stuck_calls": stuck}
        return {**status.status(self._core.state), **kept}

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._lane is not None:
            await asyncio.to_thread(self._lane.close)
        if self._opening is not None:
            await asyncio.wait({self._opening})  # a start that was broken off
            if self._opening.exception() is None:
                await asyncio.to_thread(self._opening.result().close)

    # ---- internals ------------------------------------------------------------------------------

    def _handle(self, event: Event, fill: Callable[[Fill], None] | None = None) -> None:
        for command in self._core.handle(event, self._port.clock.now_us()):
            if isinstance(command, Fill):
                assert fill is not None, "only a get that ended is copied on"
                fill(command)
            else:
                self._execute(command)
        self._arm()

    def _execute(self, command: Command) -> None:
        if isinstance(command, Send):
            self._port.send(command.to, command.message, command.trace)
            return
        assert self._lane is not None, "a core without L2 calls nobody"
        if isinstance(command, Abandon):
            self._lane.abandon(command.call)
        elif not isinstance(command, Fill):
            self._lane.run(command)

    def _l2_ended(self, errand: Errand) -> None:
        arena = self._core.state.l1.arena
        if errand.ended is not None:
            self._later(partial(self._handle, errand.ended, partial(copy_in, arena, errand)))

    def _arm(self) -> None:
        """Look again when the core wants to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due_us := self._core.due_us()) is not None:
            wait_s = max(due_us - self._port.clock.now_us(), 0) / 1e6
            tick = partial(self._later, partial(self._handle, Ticked()))
            self._timer = asyncio.get_running_loop().call_later(wait_s, tick)

    def _later(self, what: Callable[[], None]) -> None:
        """What does not come by the mailbox fails the actor, too, at the next beat."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - raised again in `upkeep`
            self._problem = self._problem or error


def copy_in(arena: Arena, errand: Errand, command: Fill) -> None:
    """The verified bytes of a get go to their place in L1. On the loop: nobody can take the place away
    meanwhile. 0.1 ms a MiB."""
    with arena.view(command.slot) as place:
        place[:] = errand.payload


def build(settings: Settings) -> KvOffloadActor:
    """kv_offload with the tiers that the settings ask for. Raises SetupError."""
    plan = opening.plan(settings.l1, settings.l1_store, settings.fleet, settings.host_id)
    if not settings.l2:
        return KvOffloadActor(plan)
    if not plan.bytes:
        log.warning("l2 is not used: values pass through L1, which is off")
    from services.kv_offload.lmcache_remote import open_remote

    return KvOffloadActor(plan, partial(open_remote, settings.l2), _without_password(settings.l2))


def _without_password(url: str) -> str:
    """As it may be shown to whoever asks for the status."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
