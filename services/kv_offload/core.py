"""The decisions of kv_offload: events in, commands out. No await, clock, socket, randomness or thread.

    core = KvCore(arena, l2=True)                  # arena.Arena
    for command in core.handle(event, now_us): …   # in order, each done before the next
    core.due_us()                                  # when it needs a Ticked; None: not before another event

Events (`events.py`): `Arrived(source, epoch, message, trace)` for KvLookup, KvReserve, KvCommit, KvPrefetch,
KvRelease, KvForget, KvTouch and ArenaReleased; `Restarted(source)` before an incarnation's first message;
`PeerSeen(source, epoch)` and `PeerLost(source)` for executors and schedulers; `L2Ended(call, status, …)`
once for each L2 command, unless it was abandoned; `Ticked()`. With `peers` also what peers/book.py reads:
messages of other kv_offloads, `PeersChanged`, `PeerSummed`, `PeerReadEnded`.

Commands: `Send(to, message, trace)`; the L2 calls `L2Has`, `L2Get`, `L2Put`, `L2Delete` and `L2Probe`, which
the caller runs at once on threads (at most 8 in flight; canaries are not counted; the queues are in the
core), as it does `PeerSum` and `PeerRead`;
`Abandon(call)`; `Fill(call, slot)`: copy the bytes of L2Get `call` to this slot of the arena before the next
command. The core does not access KV bytes.

Each message is answered at once, or by its deadline, also if L2 hangs.
"""

from __future__ import annotations

from services.kv_offload import events, jobs
from services.kv_offload.backends.arena import Arena
from services.kv_offload.l1_cache import L1
from services.kv_offload.l2 import dispatch
from services.kv_offload.peers.book import Book
from services.kv_offload.state import L2, Call, State
from shared.messages import (
    ArenaReleased,
    KvCommit,
    KvForget,
    KvGone,
    KvLookup,
    KvPrefetch,
    KvRelease,
    KvReserve,
    KvTouch,
)

KEYS_A_MESSAGE = 1_024  # 32 KiB of keys


class KvCore:
    """Owns the arena's ranges and the index of the tiers."""

    def __init__(self, arena: Arena, *, l2: bool = False, peers: bool = False) -> None:
        book = L2(enabled=l2)
        self.state = State(L1(arena, book.has_value if l2 else None), book)
        self.peers = Book(self.state) if peers else None
        self.state.peers = self.peers

    def handle(self, event: events.Event, now_us: int) -> list[events.Command]:
        """Apply one event at `now_us` (monotonic) and return the commands, in order."""
        state = self.state
        state.now_us = now_us
        self._expire()
        self._apply(event)
        dispatch.pump(state)
        if self.peers is not None:
            self.peers.pump()
        self._send_evicted()
        commands, state.out = state.out, []
        return commands

    def due_us(self) -> int | None:
        """The next deadline of a lease, an answer, a call or a canary; None if there is none."""
        l2 = self.state.l2
        peers_us = self.peers.next_us() if self.peers is not None else None
        dues = (self.state.due.next_us(), l2.deadlines.next_us(), l2.breaker.next_us(), peers_us)
        return min((due for due in dues if due is not None), default=None)

    def _apply(self, event: events.Event) -> None:
        state = self.state
        if self.peers is not None and self.peers.apply(event):
            return
        match event:
            case events.Arrived():
                self._on_arrived(event)
            case events.L2Ended():
                self._on_l2_ended(event)
            case events.Restarted(source):
                self._forget(source)
                jobs.on_scheduler_restarted(state, source)
            case events.PeerSeen(source, epoch) if source.startswith("executor."):
                jobs.on_executor_seen(state, source, epoch)
            case events.PeerLost(source) if source.startswith("executor."):
                jobs.on_executor_lost(state, source)
            case events.PeerLost(source):
                self._forget(source)

    def _on_arrived(self, event: events.Arrived) -> None:
        state, message, trace = self.state, event.message, event.trace
        if isinstance(message, ArenaReleased):
            jobs.on_arena_released(state, message)
            return
        state.schedulers[event.source] = None
        lease = (event.source, event.epoch, getattr(message, "job", 0))
        match message:
            case KvLookup():
                jobs.on_lookup(state, lease, message, trace)
            case KvReserve():
                jobs.on_reserve(state, lease, message, trace)
            case KvCommit():
                jobs.on_commit(state, lease, message, trace)
            case KvPrefetch():
                jobs.on_prefetch(state, lease, message, trace)
            case KvForget():
                jobs.on_forget(state, message)
            case KvTouch():
                jobs.on_touch(state, message)
            case KvRelease(jobs=released):
                for job in released:
                    jobs.drop_load(state, (event.source, event.epoch, job))
                jobs.on_release(state, event.source, event.epoch, message)

    def _forget(self, source: str) -> None:
        """A scheduler waits for no answer any more: drop its lookups and loads."""
        state = self.state
        state.schedulers.pop(source, None)
        for lease in [lease for lease in state.lookups if lease[0] == source]:
            jobs.drop_lookup(state, lease)
        for lease in [lease for lease in state.loads if lease[0] == source]:
            jobs.drop_load(state, lease)

    # ---- time -----------------------------------------------------------------------------------

    def _expire(self) -> None:
        state = self.state
        for call in dispatch.give_up_late(state):
            self._on_failed(call)
        if self.peers is not None:
            self.peers.expire()
        while (due := state.due.pop(state.now_us)) is not None:
            what, lease = due
            match what:
                case "lookup":
                    jobs.finish_lookup(state, lease)
                case "load":
                    jobs.finish_load(state, lease)
                case "lease":
                    jobs.expire_lease(state, lease)
                case _:
                    jobs.end_quarantine(state, lease)

    # ---- L2 -------------------------------------------------------------------------------------

    def _on_l2_ended(self, event: events.L2Ended) -> None:
        state = self.state
        if state.l2.breaker.on_probed(event.call, event.status == "ok", state.now_us):
            state.l2.presence.clear()  # L2 may have lost its content
            state.l2.announced.clear()
        call = dispatch.end(state, event)
        if call is None:
            return
        if event.status == "failed":
            self._on_failed(call)
        elif call.kind == "has":
            self._on_answered(call, event)
        elif call.kind == "get":
            self._on_got(call.names[0], event)
        elif call.kind == "put" and event.status == "ok":
            state.counters.l2_puts += 1
            state.l2.presence.add(call.names[0])
            state.l2.announced.add(call.names[0][0])

    def _on_failed(self, call: Call) -> None:
        """A call failed or timed out: answer the lookups and loads that wait for it."""
        state = self.state
        if state.l2.breaker.on_failed(state.now_us):
            state.l2.forget_wants()
            for lease in list(state.lookups):
                jobs.finish_lookup(state, lease)
            for lease in list(state.loads):
                jobs.finish_load(state, lease)
        if call.lookup is not None:
            jobs.on_lookup_answered(state, call.lookup)
        if call.kind == "get":
            jobs.on_value(state, call.names[0], None)

    def _on_answered(self, call: Call, event: events.L2Ended) -> None:
        state = self.state
        if event.value_bytes:
            state.l2.sizes[call.names[0][0]] = event.value_bytes
        if call.names[0][0] in state.l2.sizes:  # without their size no values can be read
            for name, present in zip(call.names, event.present, strict=False):
                if present:
                    state.l2.presence.add(name)
        if call.lookup is not None:
            jobs.on_lookup_answered(state, call.lookup)

    def _on_got(self, name: events.Name, event: events.L2Ended) -> None:
        """A get has ended: with the value, or because it is lost or damaged."""
        state = self.state
        entry = state.l1.entries.get(name)
        if event.status == "ok":
            state.counters.l2_gets += 1
            state.counters.promotions += entry is None
            state.l2.presence.add(name)
            entry = jobs.bring_up(
                state, name, events.Fill(event.call, b""), event.value_bytes, event.valid_tokens
            )
        else:
            state.l2.presence.forget(name)
            if event.status == "corrupt":
                state.counters.corrupt += 1
                state.l2.deletes[name] = None
            else:
                state.counters.l2_absent += 1
            if entry is None:
                state.l1.evicted.append(name)
        jobs.on_value(state, name, entry)

    # ---- evicted keys ---------------------------------------------------------------------------

    def _send_evicted(self) -> None:
        """Send the schedulers the keys that have left their last tier."""
        state = self.state
        evicted, state.l1.evicted = state.l1.evicted, []
        gone = [name for name in evicted if not state.tier_of(name)]
        for first in range(0, len(gone), KEYS_A_MESSAGE):
            keys = b"".join(key for _, key in gone[first : first + KEYS_A_MESSAGE])
            message = KvGone(keys=keys)
            state.out += [events.Send(to, message) for to in state.schedulers]
