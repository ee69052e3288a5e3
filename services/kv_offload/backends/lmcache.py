"""`open_remote` chooses L2. In a folder it is LMCache's native client (==0.5.6).

L1 and Redis are our own. L1 would use the segment of LMCache's StorageManager alone: a call of its allocator
takes 30 to 350 µs a range on the event loop, its eviction is a loop of 1 s, and its import and start take 2
to 5 s. redis.py has what is wrong with LMCache's client for Redis.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from services.kv_offload.backends.interface import DamagedValue, RefusedWrite, Remote, RemoteError
from services.kv_offload.backends.redis import PORT, RedisRemote
from shared.errors import SetupError


def load_lmcache() -> None:
    """Import lmcache (2–5 s) without telemetry, with a log of errors only (it logs each discard). Raises
    SetupError if it is not installed."""
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        import lmcache  # noqa: F401
    except ImportError as error:
        raise SetupError(f"no LMCache here ({error}): pip install 'headrace[kv]'") from error


def open_remote(url: str, deadline_s: float = 1.0) -> Remote:
    """The remote store at `url`: redis://[user[:password]@]host[:port], or file:///folder, for which it
    imports LMCache (2–5 s). It connects at the first call; each call ends within about `deadline_s`.

    Raises SetupError for any other URL, and if LMCache is not installed."""
    parts = urlsplit(url)
    if parts.scheme in ("redis", "valkey") and parts.hostname and parts.path in ("", "/", "/0"):
        login = (unquote(parts.username or ""), unquote(parts.password or ""))
        return RedisRemote((parts.hostname, parts.port or PORT), login, deadline_s)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        load_lmcache()
        return LmcacheRemote(lambda: _file_client(unquote(parts.path)), deadline_s)
    raise SetupError(
        f"the remote store {parts.scheme}://{parts.hostname or ''}{parts.path} is unknown: "
        "use redis://host:port (database 0) or file:///folder"
    )


def _file_client(folder: str) -> Any:
    from lmcache.lmcache_fs import LMCacheFSClient

    return LMCacheFSClient(folder, 1, "", False, 0)  # one thread, no temporary folder, with page cache


class LmcacheRemote:
    """See `interface.Remote`. L2 over the native client of LMCache's file-system adapter, which runs without
    the GIL and accesses our memory without a copy. It reports no lengths, so EXISTS precedes a GET, and it
    has no deadline, so this class has its own and connects again after each failure. `close` joins the
    client's threads within a millisecond, so our memory is not written after an error.
    """

    def __init__(self, connect: Callable[[], Any], deadline_s: float) -> None:
        self._connect = connect
        self._deadline_s = deadline_s
        self._client: Any = None
        self._turn = threading.Lock()

    def put(self, name: str, value: memoryview) -> None:
        with self._turn:
            end = self._end()
            try:
                self._call(end, "submit_batch_set", [_key(name)], [value.cast("B")])
            except RemoteError as error:
                if time.monotonic() >= end:
                    raise
                self._exists(end, [name])  # raises if the store does not answer
                raise RefusedWrite(f"the remote store takes no value: {error.message}") from error

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")
        with self._turn:
            end = self._end()
            if not self._exists(end, [name])[0]:
                return 0
            if self._call(end, "submit_batch_get", [_key(name)], [into.cast("B")])[0]:
                return into.nbytes
            self._drop()
            if not self._exists(end, [name])[0]:  # deleted meanwhile
                return 0
        raise DamagedValue(f"the value of {name} is not {into.nbytes} bytes long: delete it")

    def delete(self, name: str) -> None:
        with self._turn:
            end = self._end()
            if not self._call(end, "submit_batch_delete", [_key(name)])[0] and self._exists(end, [name])[0]:
                self._drop()
                raise RemoteError(f"the remote store did not delete {name}: it may be read-only")

    def has(self, names: list[str]) -> list[bool]:
        with self._turn:
            return self._exists(self._end(), names) if names else []

    def close(self) -> None:
        with self._turn:
            self._drop()

    def _end(self) -> float:
        return time.monotonic() + self._deadline_s

    def _exists(self, end: float, names: list[str]) -> list[bool]:
        return self._call(end, "submit_batch_exists", [_key(name) for name in names])

    def _call(self, end: float, operation: str, *arguments: list[Any]) -> list[bool]:
        """The client's result for each key; True for each key of a put. Raises RemoteError."""
        try:
            if self._client is None:
                self._client = self._connect()
            ticket = getattr(self._client, operation)(*arguments)
        except TimeoutError as error:
            raise RemoteError(f"the remote store failed: no answer within {self._deadline_s} s") from error
        except (OSError, RuntimeError) as error:
            raise RemoteError(f"the remote store cannot be reached: {error}. Is it running?") from error
        answer = self._wait(ticket, end)
        if answer is None or not answer[1]:
            self._drop()
            why = answer[2].strip() if answer else f"no answer within {self._deadline_s} s"
            raise RemoteError(f"the remote store failed: {why}. Look at its log and its free memory")
        return [True] * len(arguments[0]) if answer[3] is None else list(answer[3])

    def _wait(self, ticket: int, end: float) -> tuple[int, bool, str, list[bool] | None] | None:
        """The client's (ticket, ok, error, result for each key); None at the deadline."""
        poller = select.poll()
        poller.register(self._client.event_fd(), select.POLLIN)
        while (left_s := end - time.monotonic()) > 0:
            poller.poll(left_s * 1000)
            for answer in self._client.drain_completions():
                if answer[0] == ticket:
                    return answer  # type: ignore[no-any-return]  # a native client has no types
        return None

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RuntimeError):  # the server has closed the connection
                client.close()


def _key(name: str) -> str:
    """LMCache's name of a value; its file-system client accepts no other form."""
    return f"headrace@00000000@0@{name}"
