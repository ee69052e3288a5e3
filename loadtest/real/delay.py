"""A longer way to the nats-server: a TCP proxy through which every byte takes `delay_us` more, in order.

Blocking threads, since an event loop's timers are no finer than a millisecond.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

CHUNK_BYTES = 65_536


class DelayedWay:
    """Listens on a free port of this host and forwards to the server."""

    def __init__(self, server_url: str, delay_us: int) -> None:
        parts = urlsplit(server_url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 4222)
        self._delay_ns = delay_us * 1_000
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def close(self) -> None:
        """Take no more connections. Those that are there end with either of their ends."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._server)
            for source, target in ((client, server), (server, client)):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._forward(source, target)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        on_way: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

        def read() -> None:
            data = b"x"
            while data:
                try:
                    data = source.recv(CHUNK_BYTES)
                except OSError:
                    data = b""
                on_way.put((time.monotonic_ns() + self._delay_ns, data))

        def write() -> None:
            while True:
                due_ns, data = on_way.get()
                left_ns = due_ns - time.monotonic_ns()
                if left_ns > 0:
                    time.sleep(left_ns / 1e9)
                try:
                    target.sendall(data)
                    if not data:
                        target.shutdown(socket.SHUT_WR)
                        return
                except OSError:
                    return

        _start(read)
        _start(write)


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="delayed-way", daemon=True).start()
