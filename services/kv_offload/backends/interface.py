"""The protocol of a remote store (L2). It only stores bytes: index, leases, eviction, headers and checksums
are in the core and in l2/.
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


class Remote(Protocol):
    """L2: values by name (`remote_name` in l2/worker.py). Each call blocks, at most until the deadline given
    at opening, so call it on a worker thread. Calls of several threads are serialized. After an error the
    next call connects again."""

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
