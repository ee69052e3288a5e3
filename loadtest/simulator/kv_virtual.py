"""`VirtualKv` runs the real core of kv_offload without bytes, processes or threads: on an arena that only
counts, an L2 of a given speed and the caller's clock. For simulations and tests.

    kv = VirtualKv(Arena(1 << 30), VirtualL2(capacity_bytes=8 << 30))
    sends = kv.arrive("scheduler.s", epoch, message, now_us)      # answers that are due at once
    while (due_us := kv.due_us()) is not None: sends = kv.tick(due_us)   # the later ones
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from services.kv_offload.backends.arena import Arena
from services.kv_offload.core import KvCore
from services.kv_offload.events import (
    Arrived,
    Command,
    Event,
    L2Command,
    L2Delete,
    L2Ended,
    L2Get,
    L2Has,
    L2Put,
    Name,
    Send,
    Ticked,
)
from shared.messages import Message


@dataclass(slots=True)
class VirtualL2:
    """Values by name and size, the oldest written lost first. All calls share one link of `bytes_per_s`, one
    after the other, and each takes `call_us` besides."""

    capacity_bytes: int = 1 << 40
    bytes_per_s: int = 1_000_000_000
    call_us: int = 500
    values: OrderedDict[Name, tuple[int, int]] = field(default_factory=OrderedDict)  # bytes, valid tokens
    used_bytes: int = 0
    _free_us: int = 0

    def run(self, command: L2Command, now_us: int) -> tuple[int, L2Ended]:
        """Do it; when it will have ended, and how."""
        moved, ended = self._do(command)
        begins_us = max(now_us, self._free_us) if moved else now_us
        ends_us = begins_us + moved * 1_000_000 // self.bytes_per_s
        if moved:
            self._free_us = ends_us
        return ends_us + self.call_us, ended

    def _do(self, command: L2Command) -> tuple[int, L2Ended]:
        call = command.call
        match command:
            case L2Has(fingerprint=fingerprint, keys=keys):
                found = tuple((fingerprint, key) in self.values for key in keys)
                sizes = (size for (of, _), (size, _) in self.values.items() if of == fingerprint)
                size_bytes = next(sizes, 0) if command.want_size else 0
                return 0, L2Ended(call, present=found, value_bytes=size_bytes)
            case L2Get(name=name):
                if name not in self.values:
                    return 0, L2Ended(call, "absent")
                size_bytes, valid_tokens = self.values[name]
                return size_bytes, L2Ended(call, value_bytes=size_bytes, valid_tokens=valid_tokens)
            case L2Put(name=name):
                self._drop(name)
                self.values[name] = command.value_bytes, command.valid_tokens
                self.used_bytes += command.value_bytes
                while self.used_bytes > self.capacity_bytes:
                    self._drop(next(iter(self.values)))
                return command.value_bytes, L2Ended(call)
            case L2Delete(name=name):
                self._drop(name)
        return 0, L2Ended(call)

    def _drop(self, name: Name) -> None:
        self.used_bytes -= self.values.pop(name, (0, 0))[0]


class VirtualKv:
    """The core over such an arena and such an L2 (None: no L2). Time is the caller's and never goes back."""

    def __init__(self, arena: Arena, l2: VirtualL2 | None = None) -> None:
        self.core = KvCore(arena, l2=l2 is not None)
        self._l2 = l2
        self._running: list[tuple[int, int, L2Ended]] = []  # a heap by end

    def arrive(self, source: str, epoch: int, message: Message, now_us: int) -> list[Send]:
        """A message of the actor `source` (kind.id)."""
        return self.handle(Arrived(source, epoch, message), now_us)

    def handle(self, event: Event, now_us: int) -> list[Send]:
        """Apply what ended before `now_us`, then the event; what is to be sent, in order."""
        sends = self._until(now_us)
        return sends + self._sends(self.core.handle(event, now_us), now_us)

    def tick(self, now_us: int) -> list[Send]:
        """Time has passed."""
        return self.handle(Ticked(), now_us)

    def due_us(self) -> int | None:
        """When the next thing happens by itself."""
        dues = (self.core.due_us(), self._running[0][0] if self._running else None)
        return min((due for due in dues if due is not None), default=None)

    def _until(self, now_us: int) -> list[Send]:
        sends: list[Send] = []
        while self._running and self._running[0][0] <= now_us:
            at_us, _, ended = heapq.heappop(self._running)
            sends += self._sends(self.core.handle(ended, at_us), at_us)
        return sends

    def _sends(self, commands: list[Command], now_us: int) -> list[Send]:
        for command in commands:
            if self._l2 is not None and isinstance(command, L2Command):
                ends_us, ended = self._l2.run(command, now_us)
                heapq.heappush(self._running, (ends_us, command.call, ended))
        return [command for command in commands if isinstance(command, Send)]
