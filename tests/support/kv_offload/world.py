"""A kv_offload core among schedulers, executors and an L2, all of them played by a test: memory that
remembers whose bytes lie at each offset, and calls to L2 that end when and how the test decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.kv_offload.backends import arena
from services.kv_offload.core import KvCore
from services.kv_offload.events import (
    Abandon,
    Arrived,
    Event,
    Fill,
    L2Command,
    L2Delete,
    L2Ended,
    L2Get,
    L2Has,
    L2Put,
    Name,
    PeerRead,
    PeerSum,
    Send,
    Ticked,
)
from services.kv_offload.state import WriteLease
from shared.messages import (
    KvCommit,
    KvLookup,
    KvPrefetch,
    KvReady,
    KvReserve,
    KvReserved,
    KvStored,
    Message,
    ints,
)

PAGE = 4096
SCHEDULER, EXECUTOR, PRINT = "scheduler.s", "executor.e", "f1"
EPOCH = 7
SECOND = 1_000_000


def key(number: int) -> bytes:
    """The key of block `number`."""
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


class Arena(arena.Arena):
    """Knows the offset of each slot."""

    def offset_of(self, slot: bytes) -> int:
        return self.placed[slot][0]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return sorted(self.placed.values())


@dataclass
class World:
    """The core, its clock, and what it has sent."""

    blocks: int = 10
    l2: bool = False
    peers: bool = False
    now_us: int = SECOND
    epoch: int = EPOCH
    memory: dict[int, object] = field(default_factory=dict)  # offset -> the name whose bytes lie there
    remote: dict[Name, tuple[object, int]] = field(default_factory=dict)  # name -> bytes, valid tokens
    calls: dict[int, L2Command] = field(default_factory=dict)
    sending: dict[int, object] = field(default_factory=dict)  # put -> the bytes it read
    fetched: dict[int, object] = field(default_factory=dict)  # get -> the bytes it brought
    sent: list[Send] = field(default_factory=list)
    peer_calls: list[PeerSum | PeerRead] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = Arena(self.blocks * PAGE, generation=3)
        self.core = KvCore(self.arena, l2=self.l2, peers=self.peers)

    @property
    def state(self):  # noqa: ANN201 - the core's, as it is
        return self.core.state

    def handle(self, event: Event) -> list[Message]:
        """The core's messages to it, L2 aside."""
        before = len(self.sent)
        for command in self.core.handle(event, self.now_us):
            match command:
                case Send():
                    self.sent.append(command)
                case Abandon(call):
                    del self.calls[call]
                case Fill(call, slot, index):
                    value = self.fetched[call]
                    value = value[index] if isinstance(value, list) else self.fetched.pop(call)
                    self.memory[self.arena.offset_of(slot)] = value
                case PeerSum() | PeerRead():
                    self.peer_calls.append(command)
                case _:
                    self.calls[command.call] = command
                    if isinstance(command, L2Put):
                        self.sending[command.call] = self.memory[self.arena.offset_of(command.slot)]
        return [send.message for send in self.sent[before:]]

    def deliver(self, message: Message, source: str = SCHEDULER) -> list[Message]:
        return self.handle(Arrived(source, self.epoch, message))

    def wait(self, us: int) -> list[Message]:
        """Let time pass, stopping wherever the core wants to look."""
        end_us, before = self.now_us + us, len(self.sent)
        while (due_us := self.core.due_us()) is not None and due_us <= end_us:
            self.now_us = max(due_us, self.now_us)
            calls = len(self.calls)
            self.handle(Ticked())
            assert self.core.due_us() != due_us or len(self.calls) != calls, "it wants to look for ever"
        self.now_us = end_us
        self.handle(Ticked())
        return [send.message for send in self.sent[before:]]

    # ---- a scheduler ----------------------------------------------------------------------------

    def reserve(self, job: int, *numbers: int, **fields: object) -> list[int]:
        asked = {"owner": EXECUTOR, "value_bytes": PAGE, "lease_us": SECOND, "fingerprint": PRINT, **fields}
        answers = self.deliver(KvReserve(job=job, keys=keys(*numbers), **asked))  # type: ignore[arg-type]  # fields
        reserved = next(m for m in answers if isinstance(m, KvReserved))
        return list(reserved.offsets)

    def commit(self, job: int, *written: int) -> list[int]:
        """The executor has copied those."""
        lease = self.state.leases.get((SCHEDULER, self.epoch, job))
        if isinstance(lease, WriteLease):
            for name, place, done in zip(lease.names, lease.ranges, written, strict=False):
                if place is not None and done:
                    self.memory[place.offset] = name
        answers = self.deliver(KvCommit(job=job, written=ints(written)))
        return list(next(m for m in answers if isinstance(m, KvStored)).tiers)

    def store(self, job: int, *numbers: int, **fields: object) -> list[int]:
        offsets = self.reserve(job, *numbers, **fields)
        return self.commit(job, *(offset >= 0 for offset in offsets))

    def look_up(self, *numbers: int, job: int = 900, **fields: object) -> list[Message]:
        return self.deliver(KvLookup(job=job, keys=keys(*numbers), fingerprint=PRINT, **fields))  # type: ignore[arg-type]  # fields

    def prefetch(self, job: int, *numbers: int, **fields: object) -> list[Message]:
        asked = {"owner": EXECUTOR, "deadline_us": 50_000, "lease_us": SECOND, "fingerprint": PRINT, **fields}
        return self.deliver(KvPrefetch(job=job, keys=keys(*numbers), **asked))  # type: ignore[arg-type]  # fields

    def read(self, ready: KvReady, *numbers: int) -> None:
        """What an executor would load now is what was asked for."""
        for offset, number in zip(ready.offsets, numbers, strict=True):
            assert offset < 0 or self.memory[offset] == (PRINT, key(number))

    # ---- L2 -------------------------------------------------------------------------------------

    def in_flight(self, kind: type) -> list[int]:
        return [call for call, command in self.calls.items() if isinstance(command, kind)]

    def end(self, call: int, status: str = "ok") -> list[Message]:
        """The call ends with the truth about `remote`, or with `status`."""
        command = self.calls.pop(call)
        return self.handle(self._ended(command, status))

    def end_all(self, status: str = "ok", kinds: Iterable[type] = (object,)) -> list[Message]:
        """Every call, also those that come up meanwhile."""
        before = len(self.sent)
        while calls := [c for kind in kinds for c in self.in_flight(kind)]:
            self.end(calls[0], status)
        return [send.message for send in self.sent[before:]]

    def _ended(self, command: L2Command, status: str) -> L2Ended:
        call = command.call
        if status == "failed" or (status == "refused" and isinstance(command, L2Put)):
            return L2Ended(call, status)
        match command:
            case L2Has(fingerprint=fingerprint, keys=asked):
                return L2Ended(
                    call, present=tuple((fingerprint, k) in self.remote for k in asked), value_bytes=PAGE
                )
            case L2Get(name=name):
                if name not in self.remote:
                    return L2Ended(call, "absent")
                if status == "corrupt":
                    return L2Ended(call, "corrupt")
                self.fetched[call], valid = self.remote[name]
                return L2Ended(call, value_bytes=PAGE, valid_tokens=valid)
            case L2Put(name=name, valid_tokens=valid):
                self.remote[name] = self.sending.pop(call), valid
                assert self.memory[self.arena.offset_of(command.slot)] == name, "it has changed meanwhile"
            case L2Delete(name=name):
                self.remote.pop(name, None)
        return L2Ended(call)
