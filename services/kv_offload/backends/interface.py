"""The protocols of the storage below device memory: an arena in this host's shared memory (L1), and a remote
store (L2). They only store bytes: index, leases, eviction, headers and checksums are in the core and in l2/.
"""

from __future__ import annotations

from typing import Protocol

from shared.errors import HeadraceError


class RemoteError(HeadraceError):
    """The remote store failed, or did not answer in time. The state of the value is unknown."""

    code, type, retryable = 503, "remote_error", True


class RefusedWrite(RemoteError):
    """The remote store answers, but takes no value: it is full or read-only."""


class DamagedValue(RemoteError):
    """The remote store holds a value of another length than expected: delete it, and count a miss."""

    retryable = False


class Arena(Protocol):
    """L1: one shared-memory segment with a range for each key. Used from one thread.

    A segment's name is never used twice: its generation is new at each start. A process that maps an older
    segment keeps its bytes, also after the file is unlinked or its owner is killed."""

    name: str  # of the file under /dev/shm
    generation: int
    capacity_bytes: int

    def allocate(self, key: bytes, size_bytes: int) -> int | None:
        """Reserve `size_bytes` for `key`. Returns the offset in the segment, a multiple of 4096; None if
        there is no room. Raises ValueError if the key has a range already, or for a size below 1."""

    def seal(self, key: bytes) -> None:
        """Mark the reserved range of `key` as written. Raises KeyError if nothing is reserved."""

    def discard(self, key: bytes) -> None:
        """Free the range of `key`, reserved or sealed, even if it is being read. Raises KeyError."""

    def view(self, key: bytes) -> memoryview:
        """The bytes of `key`, reserved or sealed, writable. Release it before `close`. Raises KeyError."""

    def free_bytes(self) -> int:
        """Bytes in no range; a range takes whole pages of 4096 bytes."""

    def close(self) -> None:
        """Unmap and unlink; no effect the second time. Other processes keep their mapping."""


class Remote(Protocol):
    """L2: values by name (hex). Each call blocks, at most until the deadline given at opening, so call it on
    a worker thread. Calls of several threads are serialized. After an error the next call connects again."""

    def put(self, name: str, value: memoryview) -> None:
        """Store a value. The value of a name never changes (names are hashes), so an existing one may be
        kept: to replace a damaged value, delete it first. Raises RemoteError, and RefusedWrite if existing
        values can still be read."""

    def get(self, name: str, into: memoryview) -> int:
        """Read the value into `into`. Returns len(into), or 0 if there is none. After an error the content of
        `into` is undefined, but no longer written.

        Raises RemoteError, and DamagedValue if the value is shorter than `into`. A longer one is DamagedValue
        or cut, so values contain their length."""

    def delete(self, name: str) -> None:
        """Delete the value, if there is one. Raises RemoteError."""

    def has(self, names: list[str]) -> list[bool]:
        """Whether each name has a value. Raises RemoteError."""

    def close(self) -> None:
        """Close the connection, after the call in progress."""
