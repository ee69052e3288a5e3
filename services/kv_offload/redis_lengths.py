"""How long a value in Redis is, asked over a connection of our own: LMCache's client has no such question,
misreads a value of another length than it expects, and waits for ever for one of less than a few bytes."""

from __future__ import annotations

import socket
import time
from typing import BinaryIO

WRONG_TYPE = -1


class RedisLengths:
    """Connects at the first question, and anew after an error. Used from one thread."""

    def __init__(self, address: tuple[str, int], login: tuple[str, str]) -> None:
        self._address = address
        self._login = [word for word in login if word]
        self._socket: socket.socket | None = None
        self._answers: BinaryIO | None = None

    def length(self, key: str, end: float) -> int:
        """Bytes of the value of `key`, by `end` (monotonic, seconds): 0 where it is empty or there is none,
        WRONG_TYPE where it is no string. Raises OSError."""
        try:
            if self._socket is None:
                self._connect(end)
            answer = self._ask(end, "STRLEN", key)
        except OSError:
            self.close()
            raise
        if answer.startswith(b"-WRONGTYPE"):
            return WRONG_TYPE
        if not answer.startswith(b":"):
            self.close()
            raise ConnectionError(f"redis answered {answer[:100]!r}")
        return int(answer[1:])

    def close(self) -> None:
        """End the connection, if there is one."""
        for end in (self._answers, self._socket):
            if end is not None:
                end.close()
        self._socket = self._answers = None

    def _connect(self, end: float) -> None:
        self._socket = socket.create_connection(self._address, timeout=_left_s(end))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        if self._login and not (answer := self._ask(end, "AUTH", *self._login)).startswith(b"+OK"):
            raise ConnectionError(f"redis refused the password: {answer[:100]!r}")

    def _ask(self, end: float, *words: str) -> bytes:
        """One command and the line that it is answered with."""
        assert self._socket is not None
        assert self._answers is not None
        self._socket.settimeout(_left_s(end))
        coded = [word.encode() for word in words]
        parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in coded]
        self._socket.sendall(b"*%d\r\n" % len(parts) + b"".join(parts))
        answer = self._answers.readline()
        if not answer.endswith(b"\r\n"):
            raise ConnectionError("redis ended the connection")
        return answer


def _left_s(end: float) -> float:
    """To `end`; a timeout of 0 would mean none at all."""
    return max(end - time.monotonic(), 0.001)
