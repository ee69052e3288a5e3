"""Where KV bytes lie below device memory, and nothing more: an arena in this host's shared memory (L1) and
a remote store (L2). The core above keeps the index, leases, order of eviction, headers and checksums."""

from __future__ import annotations

from typing import Protocol

from shared.errors import HeadraceError


class RemoteError(HeadraceError):
    """The remote store refused, or did not answer in time. Nothing is known about the value."""

    code, type, retryable = 503, "remote_error", True


class RefusedWrite(RemoteError):
    """The remote store answers, but takes no value: it is full, or may only be read."""


class DamagedValue(RemoteError):
    """The remote store holds a value of another length than asked for: delete it, it is a miss."""

    retryable = False


class Arena(Protocol):
    """L1: one shared-memory segment, cut into ranges by key. Used from one thread.

    A name is never used twice: the generation in it is new at each start. Whoever maps an older segment
    keeps its bytes, also when the file is unlinked or its owner was killed."""

    name: str  # of the file under /dev/shm
    generation: int
    capacity_bytes: int

    def allocate(self, key: bytes, size_bytes: int) -> int | None:
        """Reserve `size_bytes` for `key`: their offset in the segment, a multiple of 4096; None = no room.

        Raises ValueError where the key has a range already, or for a size below 1."""

    def seal(self, key: bytes) -> None:
        """The reserved range of `key` is written. Raises KeyError where nothing is reserved."""

    def discard(self, key: bytes) -> None:
        """Free the range of `key`, reserved or sealed, whoever still reads it. Raises KeyError."""

    def view(self, key: bytes) -> memoryview:
        """The bytes of `key`, reserved or sealed, writable. Release it before `close`. Raises KeyError."""

    def free_bytes(self) -> int:
        """Bytes in no range; a range takes whole pages of 4096 bytes."""

    def close(self) -> None:
        """Unmap and unlink; again does nothing. Those who mapped the segment keep their mapping."""


class Remote(Protocol):
    """L2: values by name (hex). Each call blocks, up to the deadline given when it was opened, so it belongs
    in a worker thread; calls from several threads take turns. After an error the next call connects anew."""

    def put(self, name: str, value: memoryview) -> None:
        """Store. A name's value never changes (names are hashes), so one that is there may be kept: to
        replace a damaged value, delete it first. Raises RemoteError, and RefusedWrite where what is there can
        still be had."""

    def get(self, name: str, into: memoryview) -> int:
        """Fill `into` with the value: len(into), or 0 where there is none. After an error `into` holds
        anything, but nothing writes to it any more.

        Raises RemoteError, and DamagedValue where the value is shorter than `into`; a longer one is either
        DamagedValue or cut, so values carry their length."""

    def delete(self, name: str) -> None:
        """Forget the value, if there is one. Raises RemoteError."""

    def has(self, names: list[str]) -> list[bool]:
        """Whether each name has a value. Raises RemoteError."""

    def close(self) -> None:
        """End the connection, after the call under way."""
