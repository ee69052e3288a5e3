"""What a worker thread does for one command: bytes between L1 and L2, with headers built and verified.

A get lands in memory of the worker's own, and only a whole, right value is ever copied on. A put first
copies the value out of the arena: what is sent cannot change while it is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from services.kv_offload import header
from services.kv_offload.events import L2Command, L2Delete, L2Ended, L2Get, L2Has, L2Probe, L2Put, Name
from services.kv_offload.header import HEADER_BYTES
from services.kv_offload.store import DamagedValue, RefusedWrite, Remote, RemoteError

SIZE_KEY = bytes(32)  # under it lies how long the values of a fingerprint are
CANARY = ("0" * 32, b"\xff" * 32)
CANARY_PAYLOAD = bytes(range(256))
_SIZE_BYTES = 8


class Errand:
    """One command and what came of it."""

    def __init__(self, command: L2Command, view: Callable[[bytes], memoryview]) -> None:
        self.command = command
        self.scratch = memoryview(b"")  # get: header and payload, as read
        self.ended: L2Ended | None = None
        self._value = view(command.slot) if isinstance(command, L2Put) else memoryview(b"")
        self._turn = threading.Lock()
        self._abandoned = False

    @property
    def payload(self) -> memoryview:
        """What a get has read."""
        return self.scratch[HEADER_BYTES:]

    def abandon(self) -> None:
        """Too late: the arena's range may be another's from now on, so a put that is still copying it must
        not be sent."""
        with self._turn:
            self._abandoned = True

    def run(self, connect: Callable[[], Remote], scratch: Callable[[int], memoryview]) -> None:
        """Do it, on a thread; `scratch` gives memory that stays the errand's until it is settled."""
        try:
            self.ended = self._run(connect(), scratch)
        except DamagedValue:
            self.ended = L2Ended(self.command.call, "corrupt")
        except RefusedWrite:
            self.ended = L2Ended(self.command.call, "refused")
        except RemoteError:
            self.ended = L2Ended(self.command.call, "failed")
        finally:
            self._value.release()

    def _run(self, remote: Remote, scratch: Callable[[int], memoryview]) -> L2Ended:
        call = self.command.call
        match self.command:
            case L2Has(fingerprint=fingerprint, keys=keys, want_size=want_size):
                present = remote.has([header.remote_name((fingerprint, key)) for key in keys])
                size = value_size(remote, fingerprint) if want_size and any(present) else 0
                return L2Ended(call, present=tuple(present), value_bytes=size)
            case L2Get(name=name, value_bytes=value_bytes):
                self.scratch = scratch(HEADER_BYTES + value_bytes)
                return self._get(remote, name, value_bytes)
            case L2Put() as put:
                return self._put(remote, put, scratch(HEADER_BYTES + put.value_bytes))
            case L2Delete(name=name):
                remote.delete(header.remote_name(name))
            case L2Probe():
                return L2Ended(call, "ok" if canary(remote) else "failed")
        return L2Ended(call)

    def _get(self, remote: Remote, name: Name, value_bytes: int) -> L2Ended:
        call = self.command.call
        if not remote.get(header.remote_name(name), self.scratch):
            return L2Ended(call, "absent")
        valid_tokens = header.verify(self.scratch, name)
        if valid_tokens is None:
            return L2Ended(call, "corrupt")
        return L2Ended(call, value_bytes=value_bytes, valid_tokens=valid_tokens)

    def _put(self, remote: Remote, put: L2Put, value: memoryview) -> L2Ended:
        value[HEADER_BYTES:] = self._value
        value[:HEADER_BYTES] = header.build(put.name, put.valid_tokens, value[HEADER_BYTES:])
        with self._turn:
            if self._abandoned:
                return L2Ended(put.call, "failed")
        if put.announce:
            size = put.value_bytes.to_bytes(_SIZE_BYTES, "little")
            name = (put.name[0], SIZE_KEY)
            remote.put(header.remote_name(name), memoryview(header.build(name, 0, size) + size))
        remote.put(header.remote_name(put.name), value)
        return L2Ended(put.call)


def value_size(remote: Remote, fingerprint: str) -> int:
    """How long the values of this fingerprint are, 0 where L2 does not know or is not to be believed."""
    name, value = (fingerprint, SIZE_KEY), bytearray(HEADER_BYTES + _SIZE_BYTES)
    try:
        found = remote.get(header.remote_name(name), memoryview(value))
    except DamagedValue:
        return 0
    if not found or header.verify(value, name) is None:
        return 0
    return int.from_bytes(value[HEADER_BYTES:], "little")


def canary(remote: Remote) -> bool:
    """Whether what is put can be had again; of a store that is full, whether it answers."""
    name = header.remote_name(CANARY)
    value = header.build(CANARY, 0, CANARY_PAYLOAD) + CANARY_PAYLOAD
    back = bytearray(len(value))
    try:
        remote.put(name, memoryview(value))
    except RefusedWrite:
        return True  # it has said what it holds
    return bool(remote.get(name, memoryview(back))) and bytes(back) == value
