"""L2 over the native clients of LMCache's RESP and file-system adapters (==0.5.6).

They run without the GIL and read and write our memory without a copy, but the RESP client must be led by
the hand. A GET of an absent name waits for ever, and so does one of an empty value; after a value of another
length, any error reply (out of memory, not permitted) or a lost connection every later answer is misread or
missing. So: the length (of a file: EXISTS) before GET, our own deadline, and a new connection after anything
but a clean success. `close` joins the client's
threads within a millisecond, also from a frozen server, so nothing writes to our memory after an error.
LMCache's own adapter and StorageManager around these clients lose the reason of a failure and need
30 s to let go of a frozen server."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from services.kv_offload.lmcache_arena import load_lmcache
from services.kv_offload.plain_store import MemoryRemote
from services.kv_offload.redis_lengths import RedisLengths
from services.kv_offload.store import DamagedValue, RefusedWrite, Remote, RemoteError
from shared.errors import SetupError

REDIS_PORT = 6379


def open_remote(url: str, deadline_s: float = 1.0) -> Remote:
    """The remote store at `url`: redis://[user[:password]@]host[:port], file:///folder or memory:. Imports
    LMCache here (2–5 s) and connects at the first call; each call ends within about `deadline_s`.

    Raises SetupError for any other URL, and where LMCache is not installed."""
    parts = urlsplit(url)
    if parts.scheme in ("redis", "valkey") and parts.hostname and parts.path in ("", "/", "/0"):
        login = (unquote(parts.username or ""), unquote(parts.password or ""))
        address = (parts.hostname, parts.port or REDIS_PORT)
        load_lmcache()
        lengths = RedisLengths(address, login)
        return LmcacheRemote(lambda: _redis_client(address, login, deadline_s), deadline_s, lengths)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        load_lmcache()
        return LmcacheRemote(lambda: _file_client(unquote(parts.path)), deadline_s)
    if url == "memory:":
        return MemoryRemote()
    raise SetupError(
        f"the remote store {parts.scheme}://{parts.hostname or ''}{parts.path} is unknown: "
        "use redis://host:port (database 0), file:///folder or memory:"
    )


def _redis_client(address: tuple[str, int], login: tuple[str, str], deadline_s: float) -> Any:
    from lmcache.lmcache_redis import LMCacheRedisClient

    # The client never reports that it could not connect; a socket of our own does, at once.
    socket.create_connection(address, timeout=deadline_s).close()
    return LMCacheRedisClient(*address, 1, *login)


def _file_client(folder: str) -> Any:
    from lmcache.lmcache_fs import LMCacheFSClient

    return LMCacheFSClient(folder, 1, "", False, 0)  # one thread, no folder for drafts, page cache as usual


class LmcacheRemote:
    """See `store.Remote`. One connection: open several for more transfers at a time."""

    def __init__(
        self, connect: Callable[[], Any], deadline_s: float, lengths: RedisLengths | None = None
    ) -> None:
        self._connect = connect
        self._deadline_s = deadline_s
        self._lengths = lengths
        self._client: Any = None
        self._turn = threading.Lock()

    def put(self, name: str, value: memoryview) -> None:
        with self._turn:
            end = self._end()
            try:
                self._ask(end, "submit_batch_set", [_key(name)], [value.cast("B")])
            except RemoteError as error:
                if time.monotonic() >= end:
                    raise
                self._exists(end, [name])  # raises where nobody answers
                raise RefusedWrite(f"the remote store takes no value: {error.message}") from error

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")
        with self._turn:
            end = self._end()
            right = self._length(end, name, into.nbytes) == into.nbytes
            if right and self._ask(end, "submit_batch_get", [_key(name)], [into.cast("B")])[0]:
                return into.nbytes
            if right:
                self._drop()  # the rest of the answer is still in the connection
            if not self._exists(end, [name])[0]:
                return 0
        raise DamagedValue(f"the value of {name} is not {into.nbytes} bytes long: delete it")

    def delete(self, name: str) -> None:
        with self._turn:
            end = self._end()
            if not self._ask(end, "submit_batch_delete", [_key(name)])[0] and self._exists(end, [name])[0]:
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

    def _length(self, end: float, name: str, hoped: int) -> int:
        """Bytes of the value, 0 where there is none; of a store that does not tell, what is hoped for."""
        if self._lengths is None:
            return hoped if self._exists(end, [name])[0] else 0
        try:
            return self._lengths.length(_key(name), end)
        except TimeoutError as error:
            raise RemoteError(f"the remote store failed: no answer within {self._deadline_s} s") from error
        except OSError as error:
            raise RemoteError(f"the remote store does not say how long {name} is: {error}") from error

    def _exists(self, end: float, names: list[str]) -> list[bool]:
        return self._ask(end, "submit_batch_exists", [_key(name) for name in names])

    def _ask(self, end: float, operation: str, *arguments: list[Any]) -> list[bool]:
        """What the client found, by key; True for each key of a put."""
        try:
            if self._client is None:
                self._client = self._connect()
            ticket = getattr(self._client, operation)(*arguments)
        except (OSError, RuntimeError) as error:
            raise RemoteError(f"the remote store cannot be reached: {error}. Is it running?") from error
        answer = self._wait(ticket, end)
        if answer is None or not answer[1]:
            self._drop()
            why = answer[2].strip() if answer else f"no answer within {self._deadline_s} s"
            raise RemoteError(f"the remote store failed: {why}. Look at its log and its free memory")
        return [True] * len(arguments[0]) if answer[3] is None else list(answer[3])

    def _wait(self, ticket: int, end: float) -> tuple[int, bool, str, list[bool] | None] | None:
        """The client's (ticket, ok, error, found per key), None at the deadline."""
        poller = select.poll()
        poller.register(self._client.event_fd(), select.POLLIN)
        while (left_s := end - time.monotonic()) > 0:
            poller.poll(left_s * 1000)
            for answer in self._client.drain_completions():
                if answer[0] == ticket:
                    return answer  # type: ignore[no-any-return]  # a native client has no types
        return None

    def _drop(self) -> None:
        if self._lengths is not None:
            self._lengths.close()
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RuntimeError):  # closed by the other side already
                client.close()


def _key(name: str) -> str:
    """LMCache's name of a value; its file system client takes no other form."""
    return f"headrace@00000000@0@{name}"
