"""Finds blocks in L1 of other hosts, reads them, and leases its own to be read. Pure; part of the core.

    lookup:  PeerLookup to every peer ──▶ PeerFound: which names it holds
    load:    PeerLookup with lease_us ──▶ PeerFound: offsets, headers ──▶ PeerRead ──▶ Fill ──▶ KvRelease

A lookup asks all peers at once and leases nothing; what they hold is remembered, and may be wrong when it
is read. A load leases up to BATCH_BYTES at a peer; one read runs while others get their leases. The peer
hashes the leased blocks: the checksum is that of a value in L2, over layout, key, length and bytes. A read
counts only for blocks whose checksum is right, and only if the peer has the same arena until its end. Any
other end (late, failed, no lease, another generation) means that the block is not there: L2 is tried if it is
known to hold the block, else the load goes on without it. The peer unpins at KvRelease, at the end of the
lease, or for a new incarnation of the reader.

A peer that fails or is late is left alone, for a second at first and for twice as long each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.kv_offload import events, jobs
from services.kv_offload.state import REMEMBERED, LeaseId, ReadLease, State, names_of
from shared.messages import KvRelease, PeerFound, PeerLookup, ints, longs

NOT_HERE = -1
LEASE_US = 5_000_000  # longer than LIMIT_US, so that no lease ends under a read of a living reader
LIMIT_US = {"lookup": 500_000, "read": 2_000_000}  # as for L2; a read counts from its request
BATCH_BYTES, BATCH = 16 << 20, 64  # of one read
AHEAD = 3  # reads of which one runs: the others' leases are on their way meanwhile
PATIENCE_US, MOST_PATIENCE_US = 1_000_000, 64_000_000


@dataclass(slots=True)
class Ask:
    """A PeerLookup without an end."""

    peer: str
    names: list[events.Name]
    began_us: int
    lookup: LeaseId | None = None  # that waits for the answer; None: a read
    found: PeerFound | None = None  # read: the lease
    running: bool = False


@dataclass(slots=True)
class Book:
    """The state of peers. Implements `state.Peers`."""

    state: State
    answer_us: int = 0
    address: bytes = b""  # of our arena; empty: nothing is asked and nothing leased
    peers: dict[str, int] = field(default_factory=dict)  # kind.id -> arena generation
    known: OrderedDict[events.Name, str] = field(
        default_factory=OrderedDict
    )  # name -> the peer that holds it
    asks: dict[int, Ask] = field(default_factory=dict)  # by job
    wanted: OrderedDict[events.Name, None] = field(default_factory=OrderedDict)  # reads that loads wait for
    reading: set[events.Name] = field(default_factory=set)
    deadlines: events.Deadlines[int] = field(default_factory=events.Deadlines)
    resting: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # peer -> until when, after how many failures
    serial: int = 0

    # ---- state.Peers ------------------------------------------------------------------------------

    def look_up(self, lookup: LeaseId, names: Sequence[events.Name]) -> int:
        asked = [peer for peer in self.peers if self.resting.get(peer, (0, 0))[0] <= self.state.now_us]
        for peer in asked:
            self._ask(Ask(peer, list(names), self.state.now_us, lookup), lease_us=0)
        return len(asked)

    def has_value(self, name: events.Name) -> bool:
        return name in self.known

    def get(self, name: events.Name) -> None:
        if name not in self.reading:
            self.wanted[name] = None

    def drop(self, name: events.Name) -> None:
        self.wanted.pop(name, None)

    # ---- the core ---------------------------------------------------------------------------------

    def apply(self, event: events.Event) -> bool:
        """Apply an event; True if it is of peers alone."""
        match event:
            case events.PeersChanged(address, peers):
                self.address = address
                for peer in [peer for peer in self.peers if peers.get(peer) != self.peers[peer]]:
                    self._on_lost(peer)
                self.peers = dict(peers)
            case events.PeerSummed(lease, headers):
                self._on_summed(lease, headers)
            case events.PeerReadEnded():
                self._on_read_ended(event)
            case events.Arrived(source, epoch, message) if source.startswith("kv_offload."):
                match message:
                    case PeerLookup():
                        self._on_lookup(source, epoch, message)
                    case PeerFound():
                        self._on_found(source, message)
                    case KvRelease():
                        jobs.on_release(self.state, source, epoch, message)
            case events.Restarted(source) | events.PeerLost(source):
                self._on_lost(source)
                return False
            case _:
                return False
        return True

    def pump(self) -> None:
        """Ask for leases, and start a read."""
        reads = [(job, ask) for job, ask in self.asks.items() if ask.lookup is None]
        while self.wanted and len(reads) < AHEAD:
            first = next(iter(self.wanted))
            peer = self.known.get(first, "")
            most = max(1, min(BATCH, BATCH_BYTES // self.state.l2.sizes.get(first[0], BATCH_BYTES)))
            alike = [name for name in self.wanted if self.known.get(name, "") == peer and name[0] == first[0]]
            names = alike[:most]
            for name in names:
                del self.wanted[name]
            if not peer:  # lost since the lookup
                self._missing(names)
                continue
            self.reading.update(names)
            reads.append(self._ask(Ask(peer, names, self.state.now_us), LEASE_US))
        if any(ask.running for _, ask in reads):
            return
        for job, ask in reads:
            if ask.found is not None:
                ask.running = True
                limit_us = ask.began_us + LIMIT_US["read"] - self.state.now_us
                found, offsets = ask.found, tuple(ask.found.offsets)
                read = events.PeerRead(
                    job, found.address, tuple(ask.names), offsets, found.headers, found.value_bytes, limit_us
                )
                self.state.out.append(read)
                return

    def next_us(self) -> int | None:
        """The next deadline."""
        return self.deadlines.next_us()

    def expire(self) -> None:
        """Give up what is late."""
        while (job := self.deadlines.pop(self.state.now_us)) is not None:
            ask = self.asks[job]
            if ask.found is None or ask.running:  # else another peer's read was slow
                self._on_failed(ask.peer)
            self._end(job)

    # ---- as reader --------------------------------------------------------------------------------

    def _ask(self, ask: Ask, lease_us: int) -> tuple[int, Ask]:
        self.serial = job = self.serial % 0x7FFFFFFF + 1
        self.asks[job] = ask
        limit_us = LIMIT_US["lookup" if ask.lookup is not None else "read"]
        self.deadlines.set(job, self.state.now_us + limit_us)
        keys = b"".join(key for _, key in ask.names)
        message = PeerLookup(job=job, fingerprint=ask.names[0][0], keys=keys, lease_us=lease_us)
        self.state.out.append(events.Send(ask.peer, message))
        return job, ask

    def _on_found(self, peer: str, found: PeerFound) -> None:
        ask = self.asks.get(found.job)
        if ask is None or ask.peer != peer or ask.found is not None:
            return  # late
        here = [i for i, offset in enumerate(found.offsets) if offset >= 0]
        right = found.arena_generation == self.peers.get(peer) and len(found.offsets) == len(ask.names)
        fits = 0 < found.value_bytes <= self.state.l1.capacity_bytes
        if ask.lookup is not None:
            took_us = self.state.now_us - ask.began_us
            self.answer_us += (took_us - self.answer_us) // (4 if self.answer_us else 1)
            if right and fits and here:
                self.state.l2.sizes.setdefault(ask.names[0][0], found.value_bytes)
                for i in here:
                    self.known[ask.names[i]] = peer
                while len(self.known) > REMEMBERED:
                    self.known.popitem(last=False)
            self._end(found.job)
            return
        ask.found, ask_names = found, ask.names
        if not (right and fits and here and found.lease_us):
            self.state.counters.peer_absent += len(ask_names)
            self._end(found.job)
            return
        lost = [name for i, name in enumerate(ask_names) if found.offsets[i] < 0]
        self.state.counters.peer_absent += len(lost)
        ask.names = [ask_names[i] for i in here]
        ask.found = replace(found, offsets=longs(found.offsets[i] for i in here))
        self._missing(lost)

    def _on_read_ended(self, event: events.PeerReadEnded) -> None:
        ask = self.asks.get(event.call)
        if ask is None or ask.found is None:
            return  # given up
        counters, size = self.state.counters, ask.found.value_bytes
        if not event.valid_tokens:
            self._on_failed(ask.peer)
        else:
            self.resting.pop(ask.peer, None)
        for i, (name, valid) in enumerate(zip(list(ask.names), event.valid_tokens, strict=False)):
            if valid < 0:
                counters.peer_corrupt += 1
                continue
            counters.peer_gets += 1
            counters.peer_bytes += size
            ask.names.remove(name)
            self.reading.discard(name)
            entry = jobs.bring_up(self.state, name, events.Fill(event.call, b"", i), size, valid)
            jobs.on_value(self.state, name, entry)
        self._end(event.call)

    def _end(self, job: int) -> None:
        """Remove a lookup or a read; the names that a read still has are not there."""
        ask = self.asks.pop(job)
        self.deadlines.drop(job)
        if ask.lookup is not None:
            jobs.on_lookup_answered(self.state, ask.lookup)
            return
        self.state.out.append(events.Send(ask.peer, KvRelease(jobs=ints([job]))))
        self._missing(ask.names)

    def _missing(self, names: Sequence[events.Name]) -> None:
        """A peer does not give these values: try L2, or end the wait of the loads."""
        state = self.state
        for name in names:
            self.known.pop(name, None)
            self.reading.discard(name)
            if state.l2.has_value(name) and any(name in load.waiting for load in state.loads.values()):
                state.l2.get(name, urgent=True)
            else:
                jobs.on_value(state, name, state.l1.entries.get(name))

    def _on_failed(self, peer: str) -> None:
        """Leave a peer alone for some time, longer each time, and forget what it holds."""
        self.state.counters.peer_failures += 1
        failures = self.resting.get(peer, (0, 0))[1] + 1
        wait_us = min(PATIENCE_US << min(failures - 1, 16), MOST_PATIENCE_US)
        self.resting[peer] = self.state.now_us + wait_us, failures
        self._forget(peer)

    def _on_lost(self, peer: str) -> None:
        """A peer or its arena is gone, with its blocks."""
        if self.peers.pop(peer, None) is not None:
            self.resting.pop(peer, None)
            self._forget(peer)
            for job in [job for job, ask in self.asks.items() if ask.peer == peer]:
                self._end(job)

    def _forget(self, peer: str) -> None:
        self.known = OrderedDict((name, holder) for name, holder in self.known.items() if holder != peer)

    # ---- as owner ---------------------------------------------------------------------------------

    def _on_lookup(self, peer: str, epoch: int, message: PeerLookup) -> None:
        state, lease = self.state, (peer, epoch, message.job)
        names = names_of(message.fingerprint, message.keys)
        entries = [state.l1.entries[name] for name in names if name in state.l1.entries]
        if not message.lease_us or not self.address:
            state.l1.touch(entries)
            self._answer(lease, names, ReadLease(names, entries))
        elif lease not in state.leases:
            for entry in entries:
                state.l1.pin(entry)
                state.use(entry)
            state.counters.peer_leased += len(entries)
            jobs.open_lease(state, lease, ReadLease(names, entries), min(message.lease_us, LEASE_US))
            blocks = tuple((entry.name, entry.range.slot, entry.valid_tokens) for entry in entries)
            state.out.append(events.PeerSum(lease, blocks))

    def _on_summed(self, lease: LeaseId, headers: bytes) -> None:
        """Answer with the lease, if it has not ended: the hashed blocks have not changed then."""
        held = self.state.leases.get(lease)
        if isinstance(held, ReadLease):
            self._answer(lease, held.names, held, headers)

    def _answer(
        self, lease: LeaseId, names: Sequence[events.Name], held: ReadLease, headers: bytes = b""
    ) -> None:
        state, there = self.state, {entry.name: entry.range for entry in held.entries}
        found = PeerFound(
            job=lease[2],
            arena_generation=state.l1.arena.generation,
            offsets=longs(there[name].offset if name in there else NOT_HERE for name in names),
            value_bytes=held.entries[0].range.size_bytes if held.entries else 0,
            lease_us=LEASE_US if headers else 0,
            headers=headers,
            address=self.address if headers else b"",
        )
        state.send(lease, found)
