"""L2 in Redis or Valkey, over a connection of our own.

https://redis.io/docs/latest/develop/reference/protocol-spec. Values go straight between the socket and the
given memory, and the GIL is free meanwhile: as fast as LMCache's native client, while redis-py, which copies
values, reads at a third of that. LMCache's client also has no command for the length of a value, misreads
every answer after a value of another length or an error, waits for ever for an absent one, and has no IPv6.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from services.kv_offload.backends.interface import DamagedValue, RefusedWrite, RemoteError

PORT = 6379

Word = bytes | memoryview


class RedisRemote:
    """See `interface.Remote`. It has one connection: open several remotes for parallel transfers. It connects
    at the first call, and again after an error."""

    def __init__(self, address: tuple[str, int], login: tuple[str, str], deadline_s: float) -> None:
        """`login`: user and password, each may be empty."""
        self._address = address
        self._login = [word.encode() for word in login if word]
        self._deadline_s = deadline_s
        self._end_s = 0.0  # of the call in progress
        self._connection: tuple[socket.socket, BinaryIO] | None = None
        self._turn = threading.Lock()

    def put(self, name: str, value: memoryview) -> None:
        with self._call() as (to, answers):
            self._send(to, (b"SET", _key(name), value.cast("B")))
            if (answer := self._line(to, answers)) != b"+OK":
                raise RefusedWrite(f"the remote store takes no value: redis answers {_text(answer)}")

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")
        with self._call() as (to, answers):
            self._send(to, (b"GET", _key(name)))
            if (head := self._line(to, answers)) == b"$-1":
                return 0
            if head != b"$%d" % into.nbytes:
                if head.startswith((b"$", b"-WRONGTYPE")):
                    raise DamagedValue(f"the value of {name} is not {into.nbytes} bytes long: delete it")
                raise RemoteError(f"the remote store gives no value: redis answers {_text(head)}")
            rest = into.cast("B")
            while rest:
                to.settimeout(self._left_s())
                rest = rest[_some(answers.readinto1(rest)) :]  # type: ignore[attr-defined]  # a BufferedReader
            self._line(to, answers)
        return into.nbytes

    def delete(self, name: str) -> None:
        with self._call() as (to, answers):
            self._send(to, (b"DEL", _key(name)))
            if not (answer := self._line(to, answers)).startswith(b":"):
                raise RemoteError(f"the remote store did not delete {name}: redis answers {_text(answer)}")

    def has(self, names: list[str]) -> list[bool]:
        if not names:
            return []
        with self._call() as (to, answers):
            self._send(to, *((b"EXISTS", _key(name)) for name in names))  # in one round trip
            found = [self._line(to, answers) for _ in names]
        if wrong := [answer for answer in found if not answer.startswith(b":")]:
            raise RemoteError(f"the remote store does not report its values: redis answers {_text(wrong[0])}")
        return [answer == b":1" for answer in found]

    def close(self) -> None:
        with self._turn:
            self._drop()

    @contextmanager
    def _call(self) -> Iterator[tuple[socket.socket, BinaryIO]]:
        """The connection, for one call within the deadline; after an error there is none. Raises
        RemoteError."""
        with self._turn:
            self._end_s = time.monotonic() + self._deadline_s
            try:
                if self._connection is None:
                    self._connect()
                assert self._connection is not None
                yield self._connection
            except TimeoutError as error:
                self._drop()
                why = f"the remote store failed: no answer within {self._deadline_s} s"
                raise RemoteError(why) from error
            except OSError as error:
                self._drop()
                raise RemoteError(f"the remote store cannot be reached: {error}. Is it running?") from error
            except RemoteError:  # an answer may be in the connection still
                self._drop()
                raise

    def _connect(self) -> None:
        to = socket.create_connection(self._address, timeout=self._left_s())
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = to, answers = to, to.makefile("rb")
        self._send(to, (b"AUTH", *self._login) if self._login else (b"PING",))
        if (answer := self._line(to, answers)).startswith(b"-"):
            why = f"redis refuses the user or password of `l2` (redis://user:password@host): {_text(answer)}"
            raise RemoteError(why)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        for end in reversed(connection or ()):
            end.close()

    def _send(self, to: socket.socket, *commands: tuple[Word, ...]) -> None:
        head = bytearray()
        for words in commands:
            head += b"*%d\r\n" % len(words)
            for word in words:
                head += b"$%d\r\n" % len(word)
                if isinstance(word, memoryview):  # not copied
                    self._write(to, head)
                    self._write(to, word)
                    head = bytearray(b"\r\n")
                else:
                    head += word + b"\r\n"
        self._write(to, head)

    def _write(self, to: socket.socket, data: bytearray | memoryview) -> None:
        to.settimeout(self._left_s())
        to.sendall(data)

    def _line(self, to: socket.socket, answers: BinaryIO) -> bytes:
        """The next line, without its end."""
        to.settimeout(self._left_s())
        line = answers.readline()
        _some(len(line))
        return line.removesuffix(b"\r\n")

    def _left_s(self) -> float:
        """Seconds left, at least 1 ms: a timeout of 0 would mean no timeout."""
        return max(self._end_s - time.monotonic(), 0.001)


def _key(name: str) -> bytes:
    return f"headrace@00000000@0@{name}".encode()  # LMCache's form: stores have values under it


def _some(count: int) -> int:
    """The number of bytes that were read. Raises ConnectionError for none."""
    if not count:
        raise ConnectionError("redis has ended the connection")
    return count


def _text(answer: bytes) -> str:
    return answer[:200].decode(errors="replace")
