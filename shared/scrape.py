"""The page that Prometheus reads, served by the process's own event loop: an answer shows that it runs.

One request a connection, GET or HEAD of /metrics; a scrape every few seconds needs no web framework. The page
is made when it is asked for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from shared.exposition import CONTENT_TYPE, to_prometheus
from shared.listening import bind, http_url
from shared.otel_env import PROMETHEUS_PORT
from shared.readings import Readings

PATH = "/metrics"
PATIENCE_S = 10.0  # for one request and its answer
MAX_HEAD_BYTES = 16_384
MAX_CONNECTIONS = 16


class ScrapePoint:
    """Serves readings at `address` from `start` to `stop`."""

    def __init__(self, host: str, port: int, readings: Callable[[], Readings]) -> None:
        """Port 0 is any free one. Raises SetupError when it is taken."""
        self._readings = readings
        self._bound = reserve(host, port)
        self.address: tuple[str, int] = self._bound.getsockname()[:2]
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Of the page, for this machine."""
        return http_url(*self.address) + PATH

    async def start(self) -> None:
        """Return when connections are accepted."""
        self._server = await asyncio.start_server(self._accept, sock=self._bound, limit=MAX_HEAD_BYTES)

    async def stop(self) -> None:
        """End at once."""
        if self._server is None:
            self._bound.close()
            return
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(answer(head, self._readings))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # it asked for nothing that can be answered, or has gone
        finally:
            writer.transport.abort()


def reserve(host: str, port: int, *, listen: bool = True) -> socket.socket:
    """The bound socket of a page. Raises SetupError."""
    return bind(host, port, "metrics", f"set {PROMETHEUS_PORT} to another", listen=listen)


def answer(head: bytes, readings: Callable[[], Readings]) -> bytes:
    """The whole HTTP answer to the head of a request."""
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", b"GET it\n", extra="Allow: GET, HEAD\r\n")
    if path != PATH.encode():
        return _response("404 Not Found", f"{PATH} is here\n".encode(), bare=method == b"HEAD")
    page = to_prometheus(readings()).encode()
    return _response("200 OK", page, kind=CONTENT_TYPE, bare=method == b"HEAD")


def _response(
    status: str, body: bytes, *, kind: str = "text/plain; charset=utf-8", extra: str = "", bare: bool = False
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"{extra}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if bare else body)
