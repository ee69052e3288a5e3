"""The protocol of a remote store (L2), and the table of remote stores. They only store bytes: index, leases,
eviction, headers and checksums are in the core and in l2/.

A module of the table has FORM, the URLs that it takes, and `build(parts, deadline_s)`, which returns what
opens the store: a connection for each call, or the one store that all threads share. It returns None for a
URL of another form.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Protocol
from urllib.parse import urlsplit

from shared.errors import HeadraceError, SetupError

BACKENDS = {
    ("redis", "valkey"): "services.kv_offload.backends.lmcache:build",
    ("file",): "services.kv_offload.backends.folder:build",
}  # by the schemes of URLs


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


def connector(url: str, deadline_s: float = 1.0) -> Callable[[], Remote]:
    """Opens the remote store at `url`, whose calls end within about `deadline_s`, as often as it is called.
    It connects at the first call. Raises SetupError for a URL that no backend takes."""
    parts = urlsplit(url)
    for schemes, backend in BACKENDS.items():
        if parts.scheme in schemes and (connect := resolve_name(backend)(parts, deadline_s)) is not None:
            return connect  # type: ignore[no-any-return]  # a function of the table
    forms = ", ".join(resolve_name(backend.partition(":")[0]).FORM for backend in BACKENDS.values())
    raise SetupError(
        f"the remote store {parts.scheme}://{parts.hostname or ''}{parts.path} is unknown: use {forms}"
    )


def open_remote(url: str, deadline_s: float = 1.0) -> Remote:
    """The remote store at `url`, see `connector`."""
    return connector(url, deadline_s)()
