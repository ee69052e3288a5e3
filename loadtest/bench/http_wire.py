"""HTTP/1.1 from the client's side with httptools: as little work as possible between socket and timestamp.

Bytes get their timestamp when they are read, before they are parsed. A connection carries one exchange at a
time and may be reused afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from loadtest.bench.pacer import Pacer

BodyHandler = Callable[[int, bytes, int], None]  # status, bytes, when they came


class Broken(Exception):
    """The connection ended before the answer did."""


class Connection(asyncio.Protocol):
    """One TCP or Unix connection."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body: BodyHandler = lambda status, data, now_us: None
        self._done: asyncio.Future[int] | None = None
        self._came_us = 0
        self.began = False  # something of the answer has come
        self.reusable = False

    async def ask(self, request: bytes, on_body: BodyHandler) -> int:
        """Send a request and return the status of the answer once it is whole. Raises Broken."""
        self._on_body, self.began, self.reusable = on_body, False, False
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is None or self._transport.is_closing():
            raise Broken("the server closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Give the connection up; what is asked on it ends."""
        if self._transport is not None:
            self._transport.close()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._came_us, self.began = self._pacer.now_us(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Broken(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end(Broken(f"the connection ended before the answer did: {exc or 'closed by the server'}"))

    # httptools' side

    def on_body(self, data: bytes) -> None:
        """A part of the answer."""
        self._on_body(self._parser.get_status_code(), data, self._came_us)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self.reusable = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Broken | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(self._parser.get_status_code())
        else:
            self._done.set_exception(error)
