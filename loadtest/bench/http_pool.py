"""Connections to one HTTP server, kept open between requests as clients keep them."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadtest.bench.http_wire import BodyHandler, Broken, Connection
from loadtest.bench.pacer import Pacer
from shared.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `http://host:port/prefix`, https, or `unix:/path/of/socket`."""

    host: str
    port: int
    prefix: str
    tls: bool = False
    path: str = ""  # of a Unix socket

    @classmethod
    def of(cls, url: str) -> Address:
        """Read a URL, with or without `/v1` at its end. Raises BadRequest."""
        if url.startswith("unix:"):
            return cls("localhost", 0, "", path=url.removeprefix("unix:"))
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:  # a bracket alone, a port over 65535, or no number
            raise BadRequest(f"{url!r} is no URL of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"{url!r} is no URL of a server: give http://HOST:PORT, nats://… or unix:/PATH")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), prefix, tls)


class Pool:
    """Connections that wait for the next request; a new one where none does."""

    def __init__(self, address: Address, pacer: Pacer, key: str = "") -> None:
        self._address = address
        self._pacer = pacer
        self._key = key
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def ask(self, method: str, path: str, body: object, on_body: BodyHandler) -> int:
        """One exchange; the status of the answer. Raises Broken, OSError.

        A kept connection that the server has just closed is no failure of the server: where nothing of an
        answer came, a new one is tried.
        """
        request = self._request(method, path, body)
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connect()
            try:
                status = await connection.ask(request, on_body)
            except Broken:
                if not kept or connection.began:
                    raise
                continue
            finally:
                if not connection.reusable:
                    connection.close()
            self._idle.append(connection) if connection.reusable else None
            return status

    def close(self) -> None:
        """Close what is open."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        loop, address = asyncio.get_running_loop(), self._address
        if address.path:
            _, made = await loop.create_unix_connection(lambda: Connection(self._pacer), address.path)
            return made
        _, made = await loop.create_connection(
            lambda: Connection(self._pacer), address.host, address.port, ssl=self._tls
        )
        return made

    def _request(self, method: str, path: str, body: object) -> bytes:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        address = self._address
        lines = [
            f"{method} {address.prefix}{path} HTTP/1.1",
            f"host: {address.host}:{address.port}",
            "content-type: application/json",
            f"content-length: {len(data)}",
            *([f"authorization: Bearer {self._key}"] if self._key else ()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + data
