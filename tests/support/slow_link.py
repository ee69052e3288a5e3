"""The way to a server, which a test can make slow, or cut, while it is in use: a TCP proxy on a thread.

with SlowLink(server_port) as link:      # clients connect to link.port
    link.slow(256 << 10, 0.05)           # bytes a second of each direction, seconds on the way
    link.fast()
    link.refuse(); link.accept()         # new connections, as a server that is dead, and back
    link.cut()                           # refuse, and end those that are open
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Coroutine
from typing import TypeVar

CHUNK_BYTES = 16_384
T = TypeVar("T")
FAST = (math.inf, 0.0)


class SlowLink:
    """All connections of a direction share its bytes a second; every byte takes the delay more, in order."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._limits = FAST
        self._free_s = {"there": 0.0, "back": 0.0}  # when the last byte will have left
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow-link", daemon=True)
        self._thread.start()
        self.port = 0
        self.accept()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def slow(self, bytes_per_s: float, delay_s: float) -> None:
        """From now on, also on connections that are open."""
        self._limits = (bytes_per_s, delay_s)

    def fast(self) -> None:
        """As fast as it can."""
        self._limits = FAST

    def accept(self) -> None:
        """Take connections, on the same port as before."""
        self._run(self._listen())

    def refuse(self) -> None:
        """Take none. Those that are open end with the server's side."""
        self._run(self._close())

    def cut(self) -> None:
        """End all connections, and take none."""
        self._run(self._cut())

    # ---- on the thread --------------------------------------------------------------------------

    def _run(self, what: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(20)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()

    async def _cut(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _end(self) -> None:
        await self._cut()
        await self._loop.shutdown_asyncgens()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            self._connections.discard(task)
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._forward(reader, there_writer, "there"))
                both.create_task(self._forward(there_reader, writer, "back"))
        finally:
            writer.transport.abort()
            there_writer.transport.abort()
            self._connections.discard(task)

    async def _forward(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, direction: str
    ) -> None:
        on_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(on_way, target))
        try:
            data = b"x"
            while data:
                with contextlib.suppress(OSError):  # cut: what came until now is sent on
                    data = b""
                    data = await source.read(CHUNK_BYTES)
                bytes_per_s, delay_s = self._limits
                now_s = self._loop.time()
                left_s = max(now_s, self._free_s[direction]) + len(data) / bytes_per_s
                self._free_s[direction] = left_s
                on_way.put_nowait((left_s + delay_s, data))
                if left_s > now_s:
                    await asyncio.sleep(left_s - now_s)
            await sending
        finally:
            sending.cancel()

    async def _send(self, on_way: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter) -> None:
        while True:
            due_s, data = await on_way.get()
            if due_s > self._loop.time():
                await asyncio.sleep(due_s - self._loop.time())
            if not data:
                target.close()
                return
            with contextlib.suppress(OSError):  # the peer is gone: the other direction ends, too
                target.write(data)
                await target.drain()
