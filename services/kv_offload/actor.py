"""The shell of kv_offload, one per host: connects the core with its mailbox and the threads of L2.

The arena opens on a thread; until then every lookup is answered with "nothing stored". The functions after
`build` compute heartbeat numbers, `headrace status`, `headrace kv` and metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

from services.kv_offload import events
from services.kv_offload.backends import arena as arenas
from services.kv_offload.backends.arena import SHM, Arena, NoRoom, Opened, Plan
from services.kv_offload.backends.interface import Remote, connector
from services.kv_offload.core import KvCore
from services.kv_offload.l2.worker import L2Job, L2Pool
from services.kv_offload.peers.book import Book
from services.kv_offload.peers.wire import OpenWire, PeerThreads, wire
from services.kv_offload.state import Counters, ReadLease, State, WriteLease
from shared.actor.mailbox import Mailbox
from shared.actor.membership import ONLY_TIER, PEER_READS, Peer
from shared.actor.runtime import Actor, HeartbeatPayload
from shared.clock import timer_s
from shared.config import Settings
from shared.messages import Message
from shared.telemetry.counters import Counted, MetricPoint, Metrics, in_load, in_status, lately, points
from shared.telemetry.counters import KvOffloadCounter as Count
from shared.telemetry.counters import KvOffloadLinkCounter as Links

log = logging.getLogger("headrace.kv_offload")

AGAIN_US = 30_000_000  # until the arena is tried again for which there was no room

Connect = Callable[[], Remote]


class KvOffloadActor(Actor):
    """Runs the core with messages, peers and a timer, and executes its commands."""

    kind = "kv_offload"

    def __init__(
        self, plan: Plan, connect: Connect | None = None, l2_url: str = "", open_wire: OpenWire | None = None
    ) -> None:
        self._plan = plan
        self._open_wire = open_wire  # to peers, for the file of the arena; None: no peers
        self._peers: PeerThreads | None = None  # once there is another host
        self._peers_seen: dict[str, int] = {}
        self._l2_url = l2_url  # for the status, without password
        self._connect = connect  # to L2; None: no L2
        self._core = KvCore(Arena(0, generation=0))
        self._opening: asyncio.Future[Opened] | None = None
        self._opens: asyncio.Task[None] | None = None  # later than at the start
        self._again_us = 0
        self._l2_pool: L2Pool | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._problem: Exception | None = None
        self._why_off = ""  # why there are no tiers although they are configured

    async def start(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        if self._plan.bytes and self._can_wait():
            log.info("no L1 yet: nothing shares it")
        elif self._plan.bytes:
            await self._open()

    async def _open(self) -> None:
        """Open the arena and L2. Raises SetupError."""
        mailbox, loop = self._mailbox, asyncio.get_running_loop()
        self._opening = loop.run_in_executor(None, arenas.open_arena, self._plan, mailbox.epoch)
        try:
            arena = (await asyncio.shield(self._opening)).arena
        except NoRoom as error:  # without tiers, lost blocks are recomputed: slower, but correct
            if not self._why_off:
                log.warning("no KV tiers: %s", error.message)
            self._why_off = error.message
            self._opening, self._again_us = None, mailbox.clock.now_us() + AGAIN_US
            return
        self._why_off = ""
        if self._connect is not None:
            remote = await asyncio.to_thread(self._connect)  # imports modules, and checks the URL
            await asyncio.to_thread(remote.close)
            self._l2_pool = L2Pool(self._connect, arena.view, self._on_l2_ended)
            await self._l2_pool.greet()
        self._core = KvCore(arena, l2=self._l2_pool is not None, peers=self._open_wire is not None)
        for source in mailbox.peers.ready("executor"):
            if (peer := mailbox.peers.get(f"executor.{source}")) is not None:
                self.on_peer(peer)
        log.info("L1: %d MiB in %s", self._plan.bytes >> 20, arena.name)

    def receive(self, source: str, message: Message, trace: str) -> None:
        self._handle(events.Arrived(source, self._mailbox.epoch_of(source), message, trace))

    def on_peer(self, peer: Peer) -> None:
        if peer.heartbeat.state not in ("stopped", "failed"):
            self._handle(events.PeerSeen(peer.source, peer.epoch))

    def on_restart(self, source: str) -> None:
        self._handle(events.PeerLost(source) if source.startswith("executor.") else events.Restarted(source))

    def on_peer_gone(self, peer: Peer) -> None:
        self._handle(events.PeerLost(peer.source))

    def upkeep(self) -> None:
        if self._problem is not None:
            raise self._problem
        due = self._opening is None and self._mailbox.clock.now_us() >= self._again_us
        if self._plan.bytes and due and not self._can_wait():
            self._opens = asyncio.get_running_loop().create_task(self._open())
        if self._opens is not None and self._opens.done():
            self._opens.result()
        if self._l2_pool is not None:
            self._l2_pool.check()
        if self._core.peers is not None:
            self._meet_peers()

    def heartbeat_payload(self) -> HeartbeatPayload:
        state = self._core.state
        if not state.l1.capacity_bytes:
            return HeartbeatPayload()
        arena = state.l1.arena
        return HeartbeatPayload(
            load=(
                *load(state),
                *(((PEER_READS, 1),) if self._peers is not None and self._peers.address else ()),
            ),
            counts=lately(counted(state)),
            arena=arena.name,
            arena_generation=arena.generation,
            tiers=tiers(state),
            rates=rates(state),
        )

    @property
    def metrics(self) -> Metrics:
        return metric_points(self._core.state)

    def status(self) -> dict[str, object]:
        pool = self._l2_pool
        why, refusal, stuck = ("", "", 0) if pool is None else (pool.why, pool.refusal, pool.stuck)
        kept: dict[str, object] = {
            "l2_url": self._l2_url, "l2_error": why, "l2_refusal": refusal, "stuck_calls": stuck,
        }  # fmt: skip
        if self._peers is not None:
            kept["peer_error"] = self._peers.why
        off: dict[str, object] = {"why_off": self._why_off} if self._why_off else {}
        if self._plan.bytes and self._opening is None and not self._why_off:
            off["not_shared"] = True
        return {**status(self._core.state, self._core.peers), **kept, **off}

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._l2_pool is not None:
            await asyncio.to_thread(self._l2_pool.close)
        if self._peers is not None:
            await self._peers.close()
        if self._opening is not None:
            await asyncio.wait({self._opening})  # the start may have been cancelled
            if self._opening.exception() is None:
                await asyncio.to_thread(self._opening.result().close)

    # ---- internals ------------------------------------------------------------------------------

    def _can_wait(self) -> bool:
        """Whether nothing would share L1: there is no L2, no other host that may read it, and on this host at
        most one executor of each model, whose KV cache has the memory of L1."""
        if not self._plan.by_need or self._connect is not None:
            return False
        peers = self._mailbox.peers
        found = [peer.heartbeat for source in peers.sources() if (peer := peers.get(source)) is not None]
        own = peers.get(self._mailbox.source)
        if own is None:
            return True  # its own heartbeat has not come yet
        here = own.heartbeat.host_id
        if self._open_wire is not None and any(
            beat.kind == "kv_offload" and beat.host_id != here for beat in found
        ):
            return False
        engines = [
            b for b in found if b.kind == "executor" and b.state == "ready" and b.host_id == here and b.model
        ]
        models = {beat.model for beat in engines}
        return len(models) == len(engines) and all((ONLY_TIER, 1) in beat.load for beat in engines)

    def _meet_peers(self) -> None:
        """Open the transport once another host has an L1, and give the core those that may be read."""
        peers = self._mailbox.peers
        own = peers.get(self._mailbox.source)
        found = [peers.get(f"kv_offload.{actor}") for actor in peers.ready("kv_offload")]
        others = [
            p
            for p in found
            if p and own and p.heartbeat.arena and p.heartbeat.host_id != own.heartbeat.host_id
        ]
        if self._peers is None and others and self._open_wire is not None:
            arena = self._core.state.l1.arena
            self._peers = PeerThreads(
                partial(self._open_wire, SHM / arena.name),
                arena.view,
                lambda event, values: self._later(
                    partial(self._handle, event, partial(copy_in, arena, values))
                ),
            )
        if self._peers is not None and (self._peers.problem is not None):
            raise self._peers.problem
        seen = {p.source: p.heartbeat.arena_generation for p in others if (PEER_READS, 1) in p.heartbeat.load}
        if self._peers is not None and self._peers.address and seen != self._peers_seen:
            self._peers_seen = seen
            self._handle(events.PeersChanged(self._peers.address, seen))

    def _handle(self, event: events.Event, fill: Callable[[events.Fill], None] | None = None) -> None:
        for command in self._core.handle(event, self._mailbox.clock.now_us()):
            if isinstance(command, events.Fill):
                assert fill is not None, "Fill follows only the end of a get"
                fill(command)
            else:
                self._execute(command)
        self._arm()

    def _execute(self, command: events.Command) -> None:
        if isinstance(command, events.Send):
            self._mailbox.send(command.to, command.message, command.trace)
            return
        if isinstance(command, events.PeerSum | events.PeerRead):
            assert self._peers is not None, "a core without peers makes no reads"
            self._peers.run(command)
            return
        assert self._l2_pool is not None, "a core without L2 makes no calls"
        if isinstance(command, events.Abandon):
            self._l2_pool.abandon(command.call)
        elif not isinstance(command, events.Fill):
            self._l2_pool.run(command)

    def _on_l2_ended(self, job: L2Job) -> None:
        arena = self._core.state.l1.arena
        if job.ended is not None:
            self._later(partial(self._handle, job.ended, partial(copy_in, arena, [job.payload])))

    def _arm(self) -> None:
        """Set the timer to the core's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due_us := self._core.due_us()) is not None:
            wait_s = timer_s(due_us - self._mailbox.clock.now_us())
            tick = partial(self._later, partial(self._handle, events.Ticked()))
            self._timer = asyncio.get_running_loop().call_later(wait_s, tick)

    def _later(self, what: Callable[[], None]) -> None:
        """Call `what`; an exception fails the actor at the next heartbeat, as one in a message would."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - raised again in `upkeep`
            self._problem = self._problem or error


def copy_in(arena: Arena, values: Sequence[memoryview], command: events.Fill) -> None:
    """Copy verified bytes that were read to their range in L1. On the event loop, so that the range cannot be
    freed meanwhile. 0.1 ms a MiB."""
    with arena.view(command.slot) as range_:
        range_[:] = values[command.index]


def build(settings: Settings) -> KvOffloadActor:
    """kv_offload with the tiers of the settings. Raises SetupError."""
    plan = arenas.plan(settings.l1, settings.fleet, settings.host_id)
    if not settings.l2:
        return KvOffloadActor(plan, open_wire=wire())
    if not plan.bytes:
        log.warning("l2 is not used: values pass through L1, which is off")
    return KvOffloadActor(plan, connector(settings.l2), _without_password(settings.l2), wire())


def _without_password(url: str) -> str:
    """The URL for the status, without user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def load(state: State) -> tuple[tuple[str, int], ...]:
    """Numbers for the heartbeat."""
    return in_load(counted(state))


def tiers(state: State) -> tuple[str, ...]:
    """For the heartbeat: the tiers in which a lookup may find blocks."""
    return ("l1", "l2") if state.l2.is_usable else ("l1",)


def rates(state: State) -> tuple[int, int]:
    """For the heartbeat: bytes a second to L2 and from it; 0 until measured."""
    return (state.l2.put_rate.bytes_per_s, state.l2.get_rate.bytes_per_s)


def writing_bytes(state: State) -> int:
    """Bytes of ranges that executors may be writing, without quarantined ones."""
    leases = (lease for lease in state.leases.values() if isinstance(lease, WriteLease))
    return sum(range_.size_bytes for lease in leases for range_ in lease.ranges if range_ is not None)


def counted(state: State) -> Counted:
    """What is counted. Lookups, loads, leases and quarantine are 0 when idle."""
    l1, counters = state.l1, state.counters
    return {
        Count.LOOKUPS_OPEN: len(state.lookups),
        Count.LOADS_OPEN: len(state.loads),
        Count.READS: sum(isinstance(lease, ReadLease) for lease in state.leases.values()),
        Count.WRITES: sum(isinstance(lease, WriteLease) for lease in state.leases.values()),
        Count.QUARANTINE: len(state.quarantine),
        Count.L1_BYTES: l1.capacity_bytes,
        Count.L1_USED: l1.used_bytes,
        Count.L1_ENTRIES: len(l1.entries),
        Count.L1_READ: l1.pinned_bytes,
        Count.L1_WRITTEN: writing_bytes(state),
        Count.L1_QUARANTINED: state.quarantined_bytes,
        Count.EVICTED: l1.evictions,
        Count.LEASED: l1.pinned_bytes + writing_bytes(state),
        Count.HITS: counters.hits,
        Count.LOOKUPS: counters.lookups,
        Count.HITS_L1: counters.hits_l1,
        Count.HITS_L2: counters.hits_l2,
        Count.MISSES: counters.lookups - counters.hits,
        Count.HIT_RATE: round(counters.hit_rate, 4),
        Count.LOADED: counters.loaded,
        Count.LOADS_LATE: counters.loads_late,
        Count.ABSENT: counters.l2_absent,
        Count.STORED: counters.stored,
        Count.NO_ROOM: counters.no_room,
        Count.LATE_COMMITS: counters.late_commits,
        Count.EXPIRED: counters.expired_leases,
        Count.PROMOTIONS: counters.promotions,
        Count.L2_PUTS: counters.l2_puts,
        Count.L2_GETS: counters.l2_gets,
        Count.CORRUPT: counters.corrupt,
        Links.PEER_BYTES: counters.peer_bytes,
        Links.PEER_FAILURES: counters.peer_failures,
        **_of_l2(state),
    }


def _of_l2(state: State) -> Counted:
    l2, counters = state.l2, state.counters
    if not l2.enabled:
        return {Links.BREAKER: "none"}
    return {
        Links.BREAKER: "open" if l2.breaker.open else "closed",
        Links.BREAKER_OPEN: int(l2.breaker.open),
        Links.OPENED: l2.breaker.opened,
        Links.KNOWN: len(l2.presence),
        Links.IN_FLIGHT: len(l2.calls),
        Links.QUEUED: len(l2.wants) + len(l2.urgent) + len(l2.early) + len(l2.deletes) + len(l2.puts),
        Links.PUT_RATE: l2.put_rate.bytes_per_s,
        Links.GET_RATE: l2.get_rate.bytes_per_s,
        Links.ANSWER_TIME: l2.answer_us,
        Links.ERRORS: counters.l2_errors,
        Links.TIMEOUTS: counters.l2_timeouts,
        Links.REFUSED: counters.l2_refused,
        Links.DAMAGED: counters.corrupt,
    }


def _of_peers(book: Book, counters: Counters) -> Counted:
    return {
        Links.PEERS_READABLE: len(book.peers),
        Links.PEERS_OPEN: len(book.asks),
        Links.PEERS_KNOWN: len(book.known),
        Links.PEERS_ANSWER: book.answer_us,
        Links.PEER_HITS: counters.hits_peer,
        Links.PEER_GETS: counters.peer_gets,
        Links.PEER_BYTES: counters.peer_bytes,
        Links.PEER_ABSENT: counters.peer_absent,
        Links.PEER_CORRUPT: counters.peer_corrupt,
        Links.PEER_FAILURES: counters.peer_failures,
        Links.PEER_LEASED: counters.peer_leased,
    }


def status(state: State, peers: Book | None = None) -> dict[str, object]:
    """The status document."""
    document = in_status(counted(state))
    document.pop("peers")
    document["tiers"]["l1"] |= {"arena": state.l1.arena.name, "generation": state.l1.arena.generation}
    return document if peers is None else {**document, **in_status(_of_peers(peers, state.counters))}


def metric_points(state: State) -> Metrics:
    """All metrics, for export."""
    return [*points(counted(state)), *_labelled(state)]


def _labelled(state: State) -> Iterator[MetricPoint]:
    counters, l1, l2 = state.counters, state.l1, state.l2
    for tier, hits in (("l1", counters.hits_l1), ("l2", counters.hits_l2), ("peer", counters.hits_peer)):
        yield Count.HIT_KEYS.point(hits, tier)
    failures = {"error": counters.l2_errors, "timeout": counters.l2_timeouts, "refused": counters.l2_refused}
    for how, calls in failures.items():
        yield Count.FAILURES.point(calls, how)
    peers = {"read": counters.peer_gets, "leased": counters.peer_leased, "corrupt": counters.peer_corrupt}
    for what, keys in peers.items():
        yield Links.PEER_KEYS.point(keys, what)
    for kind, size in (
        ("capacity", l1.capacity_bytes),
        ("used", l1.used_bytes),
        ("read", l1.pinned_bytes),
        ("written", writing_bytes(state)),
        ("quarantined", state.quarantined_bytes),
    ):
        yield Count.SIZE.point(size, kind)
    if l2.enabled:
        yield Links.RATE.point(l2.put_rate.bytes_per_s, "put")
        yield Links.RATE.point(l2.get_rate.bytes_per_s, "get")
