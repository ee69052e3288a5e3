"""`connect` opens a native client for programs with an event loop; `Client` has the same calls for others.

A `Client` runs the native one on an event loop in a thread of its own, so any thread may call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from shared.client.client import DEFAULT_TIMEOUT_S, Body
from shared.client.client import Client as AsyncClient
from shared.config import DEFAULT_NATS_URL
from shared.messages import Floats
from shared.nats import access
from shared.nats.bus import NatsBus
from shared.nats.subjects import DEFAULT_TENANT

CONNECT_TIMEOUT_S = 5.0  # a busy machine takes seconds for the first answer

T = TypeVar("T")


@contextlib.asynccontextmanager
async def connect(
    url: str = DEFAULT_NATS_URL, *, tenant: str = "", timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncGenerator[AsyncClient]:
    """A client of the fleets at the nats-server `url`. `tenant`: by default that of the URL's credentials.
    Raises SetupError if no server answers within `timeout_s`."""
    bus = await NatsBus.connect(url, name="headrace-client", timeout_s=timeout_s)
    try:
        yield await AsyncClient.open(bus, tenant or access.tenant_of(url, DEFAULT_TENANT))
    finally:
        await bus.drain()


class Client:
    """A client for programs without an event loop. Close it, or use it as a context manager."""

    def __init__(
        self, url: str = DEFAULT_NATS_URL, *, tenant: str = "", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """See `connect`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-client", daemon=True)
        self._thread.start()
        self._open = contextlib.AsyncExitStack()
        try:
            self._client = self._run(
                self._open.enter_async_context(connect(url, tenant=tenant, timeout_s=timeout_s))
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def complete(self, body: Mapping[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Body:
        """The whole answer, OpenAI-shaped. Raises the service's error, Unavailable if no service has the
        model, DeadlineExceeded after `timeout_s`."""
        return self._run(self._client.complete(body, timeout_s=timeout_s))

    def embed(self, body: Mapping[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Floats:
        """The vector of the `input` in `body`. Raises like `complete`."""
        return self._run(self._client.embed(body, timeout_s=timeout_s))

    def stream(self, body: Mapping[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[Body]:
        """The frames of an answer: accepted, delta…, done. `timeout_s` limits the wait for each. Raises like
        `complete`. The end of the iteration before the last frame cancels the request."""
        frames = self._client.stream(body, timeout_s=timeout_s)
        try:
            while (frame := self._run(_next(frames))) is not None:
                yield frame
        finally:
            if not self._loop.is_closed():
                self._run(frames.aclose())

    def cancel(self, request_id: str) -> None:
        """End a request. One that is unknown or has ended is ignored."""
        self._loop.call_soon_threadsafe(self._client.cancel, request_id)

    def close(self) -> None:
        """Close the connection; requests without an answer end. Nothing happens the second time."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._open.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call on the loop. An interrupt of this thread cancels the call."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _next(frames: AsyncGenerator[Body]) -> Body | None:
    return await anext(frames, None)
