"""Redis as an L2, over the native client of LMCache (==0.5.6).

L1 is our own: of LMCache's StorageManager it would use the segment alone. A call of its allocator takes 30 to
350 µs a range on the event loop, its eviction is a loop of 1 s, and its import and start take 2 to 5 s.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar
from urllib.parse import SplitResult, unquote

from services.kv_offload.backends.interface import DamagedValue, RefusedWrite, Remote, RemoteError
from shared.errors import SetupError

P = TypeVar("P")
T = TypeVar("T")
Words = tuple[str | bytes, ...]  # of a command

FORM = "redis://host:port (database 0)"
REDIS_PORT = 6379
IDLE_S = 10.0  # a connection without use for longer is replaced: a balancer may have dropped it in silence

WRONG_TYPE = -1


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


def build(parts: SplitResult, deadline_s: float) -> Callable[[], Remote] | None:
    """Opens the server at a URL, with a connection of its own for each call; None for a URL of another form.
    Opening raises SetupError if LMCache is not installed."""
    if not parts.hostname or parts.path not in ("", "/", "/0"):
        return None
    login = (unquote(parts.username or ""), unquote(parts.password or ""))
    address = (parts.hostname, parts.port or REDIS_PORT)

    def connect() -> Remote:
        load_lmcache()
        if _has_only_ipv6(*address):
            return Ipv6Redis(address, login, deadline_s)
        own = RedisQuestions(address, login)
        return LmcacheRemote(lambda: _redis_client(address, login, deadline_s), deadline_s, own)

    return connect


def _redis_client(address: tuple[str, int], login: tuple[str, str], deadline_s: float) -> Any:
    from lmcache.lmcache_redis import LMCacheRedisClient

    # The client does not report a failed connection or login; our own connection does.
    RedisQuestions(address, login).check(time.monotonic() + deadline_s)
    return LMCacheRedisClient(*address, 1, *login)


class LmcacheRemote:
    """See `interface.Remote`. L2 over the native client of LMCache's RESP adapter. It has one connection:
    open several remotes for parallel transfers.

    The client runs without the GIL and accesses our memory without a copy, but it is fragile. A
    GET of an absent name or of an empty value waits for ever. After a value of another length, an error reply
    (out of memory, not permitted) or a lost connection, later answers are misread or missing. So this class
    reads the length before a GET, has its own deadline, and connects again after each
    failure. `close` joins the client's threads within a millisecond, even with a frozen server, so our memory
    is not written after an error. LMCache's adapter and StorageManager lose the reason of a failure, and take
    30 s to leave a frozen server.

    A server or balancer ends connections that are idle, those of all workers: a call that fails at once on
    connections that were there before runs once more, at once, on new ones. Only their failure is one of the
    server.
    """

    def __init__(self, connect: Callable[[], Any], deadline_s: float, redis: RedisQuestions) -> None:
        self._connect = connect
        self._deadline_s = deadline_s
        self._redis = redis
        self._client: Any = None
        self._used_s = 0.0  # when the client was used last
        self._turn = threading.Lock()

    def put(self, name: str, value: memoryview) -> None:
        def put(end: float) -> None:
            try:
                self._call(end, "submit_batch_set", [_key(name)], [value.cast("B")])
            except RemoteError as error:  # LMCache's client loses the reason
                if time.monotonic() >= end:
                    raise
                if why := self._asked(self._redis.put, (_key(name), bytes(value)), end):
                    raise RefusedWrite(f"the remote store takes no value: {why}") from error

        self._run(put)

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")

        def get(end: float) -> int:
            length = self._asked(self._redis.length, _key(name), end)
            if length == into.nbytes:
                if self._call(end, "submit_batch_get", [_key(name)], [into.cast("B")])[0]:
                    return length
                raise RemoteError(f"the remote store did not send the value of {name}")
            if not length and not self._asked(self._redis.exist, [_key(name)], end)[0]:
                return 0
            raise DamagedValue(f"the value of {name} is not {into.nbytes} bytes long: delete it")

        return self._run(get)

    def delete(self, name: str) -> None:
        def delete(end: float) -> None:
            if not self._call(end, "submit_batch_delete", [_key(name)])[0]:
                self._drop()  # the rest of an error is still in the connection
                if self._asked(self._redis.exist, [_key(name)], end)[0]:
                    raise RemoteError(f"the remote store did not delete {name}: it may be read-only")

        self._run(delete)

    def has(self, names: list[str]) -> list[bool]:
        if not names:
            return []
        keys = [_key(name) for name in names]  # LMCache's client makes a round trip for each
        return self._run(lambda end: self._asked(self._redis.exist, keys, end))

    def close(self) -> None:
        with self._turn:
            self._drop()

    def _run(self, call: Callable[[float], T]) -> T:
        """The result of `call`, which takes its end (monotonic, seconds). Raises what it raises."""
        with self._turn:
            end = time.monotonic() + self._deadline_s
            known = self._client is not None or self._redis.is_open
            try:
                return call(end)
            except (RefusedWrite, DamagedValue):
                raise
            except RemoteError:
                self._drop()  # the rest of an answer may still be in a connection
                if not known or time.monotonic() >= end:
                    raise
            return call(end)

    def _asked(self, what: Callable[[P, float], T], key: P, end: float) -> T:
        """A question to our own connection. After a failure the client connects again, too: a server that has
        been restarted does not know its connection. Raises RemoteError."""
        try:
            return what(key, end)
        except TimeoutError as error:
            self._drop()
            raise RemoteError(f"the remote store failed: no answer within {self._deadline_s} s") from error
        except OSError as error:
            self._drop()
            raise RemoteError(f"the remote store cannot be reached: {error}. Is it running?") from error

    def _call(self, end: float, operation: str, *arguments: list[Any]) -> list[bool]:
        """The client's result for each key; True for each key of a put. Raises RemoteError."""
        try:
            if _is_old(self._used_s):
                self._end_client()
            if self._client is None:
                self._client = self._connect()
            ticket = getattr(self._client, operation)(*arguments)
        except TimeoutError as error:
            raise RemoteError(f"the remote store failed: no answer within {self._deadline_s} s") from error
        except (OSError, RuntimeError) as error:
            raise RemoteError(f"the remote store cannot be reached: {error}. Is it running?") from error
        answer = self._wait(ticket, end)
        self._used_s = time.monotonic()
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
        self._redis.close()
        self._end_client()

    def _end_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RuntimeError):  # the server has closed the connection
                client.close()


def _has_only_ipv6(host: str, port: int) -> bool:
    found = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            found[family] = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    return list(found) == [socket.AF_INET6]


class Ipv6Redis:
    """See `interface.Remote`. Over redis-py, which LMCache installs, since LMCache's client supports only
    IPv4. Slower: values are copied under the GIL."""

    def __init__(self, address: tuple[str, int], login: tuple[str, str], deadline_s: float) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._errors, self._used_s = redis.exceptions, 0.0
        self._redis = redis.Redis(
            *address,
            username=login[0] or None,
            password=login[1] or None,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=Retry(NoBackoff(), 1, (redis.exceptions.ConnectionError,)),  # an idle one that was ended
        )

    def put(self, name: str, value: memoryview) -> None:
        try:
            self._call(lambda redis: redis.set(_key(name), bytes(value)))
        except DamagedValue as error:
            raise RefusedWrite(f"the remote store takes no value: {error.message}") from error

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")
        length = self._call(lambda redis: redis.strlen(_key(name)))
        if not length and not self.has([name])[0]:
            return 0
        value = self._call(lambda redis: redis.get(_key(name))) if length == into.nbytes else b""
        if len(value or b"") != into.nbytes:
            raise DamagedValue(f"the value of {name} is not {into.nbytes} bytes long: delete it")
        into.cast("B")[:] = value
        return into.nbytes

    def delete(self, name: str) -> None:
        try:
            self._call(lambda redis: redis.delete(_key(name)))
        except DamagedValue as error:
            raise RemoteError(f"the remote store did not delete {name}: {error.message}") from error

    def has(self, names: list[str]) -> list[bool]:
        def exist(redis: Any) -> list[int]:
            with redis.pipeline(transaction=False) as message:
                for name in names:
                    message.exists(_key(name))
                return list(message.execute())

        return [bool(there) for there in self._call(exist)] if names else []

    def close(self) -> None:
        self._redis.close()

    def _call(self, what: Callable[[Any], Any]) -> Any:
        """Run a command. Raises RemoteError, and DamagedValue for an error reply."""
        if _is_old(self._used_s):
            self._redis.close()
        try:
            answer = what(self._redis)
        except (self._errors.AuthenticationError, self._errors.NoPermissionError) as error:
            raise _refused_login(str(error)) from error
        except self._errors.ResponseError as error:
            raise DamagedValue(f"redis answers {error}") from error
        except self._errors.RedisError as error:
            raise RemoteError(f"the remote store cannot be reached: {error}. Is it running?") from error
        self._used_s = time.monotonic()
        return answer


def _refused_login(answer: str) -> RemoteError:
    return RemoteError(f"redis refuses the user or password of `l2` (redis://user:password@host): {answer}")


def _key(name: str) -> str:
    """LMCache's name of a value; its file-system client accepts no other form."""
    return f"headrace@00000000@0@{name}"


class RedisQuestions:
    """Reads the length of a value in Redis, and which values there are, over its own connection. LMCache's
    client has no command for the length, misreads a value of unexpected length, and waits for ever for one of
    less than a few bytes. It also loses the reason of a failed put.

    Connects at the first call, and again after an error. Used from one thread.
    """

    def __init__(self, address: tuple[str, int], login: tuple[str, str]) -> None:
        self._address = address
        self._login = [word for word in login if word]
        self._used_s = 0.0
        self._socket: socket.socket | None = None
        self._answers: BinaryIO | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, which the server may have ended."""
        return self._socket is not None

    def check(self, end: float) -> None:
        """Check that the server answers and accepts the login. Raises OSError, RemoteError."""
        try:
            self._connect(end)
        finally:
            self.close()

    def length(self, key: str, end: float) -> int:
        """The bytes of the value of `key`, until `end` (monotonic, seconds). 0 if it is empty or absent,
        WRONG_TYPE if it is not a string. Raises OSError, RemoteError."""
        return self._numbers(end, [("STRLEN", key)])[0]

    def exist(self, keys: list[str], end: float) -> list[bool]:
        """Which of `keys` have a value, in one round trip. Raises OSError, RemoteError."""
        return [count == 1 for count in self._numbers(end, [("EXISTS", key) for key in keys])]

    def put(self, item: tuple[str, bytes], end: float) -> str:
        """Store a value by its key. Returns why not, in Redis's words; empty if it is stored. Raises OSError,
        RemoteError."""
        (answer,) = self._answers_to(end, [("SET", *item)])
        return "" if answer.startswith(b"+") else f"redis answers {_text(answer)}"

    def _numbers(self, end: float, commands: list[Words]) -> list[int]:
        numbers = []
        for answer in self._answers_to(end, commands):
            if not answer.startswith((b":", b"-WRONGTYPE")):
                self.close()
                raise ConnectionError(f"redis answers {_text(answer)}")
            numbers.append(int(answer[1:]) if answer.startswith(b":") else WRONG_TYPE)
        return numbers

    def _answers_to(self, end: float, commands: list[Words]) -> list[bytes]:
        try:
            if _is_old(self._used_s):
                self.close()
            if self._socket is None:
                self._connect(end)
            return self._call(end, commands)
        except (OSError, RemoteError):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, if there is one."""
        for end in (self._answers, self._socket):
            if end is not None:
                end.close()
        self._socket = self._answers = None

    def _connect(self, end: float) -> None:
        self._socket = socket.create_connection(self._address, timeout=_left_s(end))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        words: Words = ("AUTH", *self._login) if self._login else ("PING",)
        (answer,) = self._call(end, [words])
        if answer.startswith(b"-"):
            if any(word in answer for word in (b"AUTH", b"PASS", b"password")):
                raise _refused_login(_text(answer))
            raise ConnectionError(f"redis answers {_text(answer)}")

    def _call(self, end: float, commands: list[Words]) -> list[bytes]:
        """Send all commands at once and return the line of each answer."""
        assert self._socket is not None
        assert self._answers is not None
        self._socket.settimeout(_left_s(end))
        sent, answers = bytearray(), []
        for words in commands:
            sent += b"*%d\r\n" % len(words)
            raw = [word.encode() if isinstance(word, str) else word for word in words]
            sent += b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw)
        self._socket.sendall(sent)
        for _ in commands:
            self._socket.settimeout(_left_s(end))
            answers.append(self._answers.readline())
            if not answers[-1].endswith(b"\r\n"):
                raise ConnectionError("redis ended the connection")
        self._used_s = time.monotonic()
        return answers


def _text(answer: bytes) -> str:
    return answer[:200].decode(errors="replace").strip("-\r\n")


def _is_old(used_s: float) -> bool:
    return time.monotonic() - used_s > IDLE_S


def _left_s(end: float) -> float:
    """Seconds until `end`, at least 1 ms: a timeout of 0 would mean no timeout."""
    return max(end - time.monotonic(), 0.001)
