"""`connect` opens a native client for programs with an event loop; `Client` has the same calls for others.

A `Client` runs the native one on an event loop in a thread of its own, so any thread may call it. Calls
reach that loop in order, and none after `close`: a call that nothing answers any more would wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from shared.client.client import DEFAULT_TIMEOUT_S, Body
from shared.client.client import Client as AsyncClient
from shared.config import DEFAULT_NATS_URL
from shared.errors import Cancelled, HeadraceError, SetupError
from shared.messages import Floats
from shared.nats import access
from shared.nats.bus import NatsBus
from shared.nats.subjects import DEFAULT_TENANT

CONNECT_TIMEOUT_S = 5.0  # a busy machine takes seconds for the first answer

_CLOSED = "this client is closed: open another one"
_FORKED = "this client belongs to the process that opened it: open one after the fork"

T = TypeVar("T")


@contextlib.asynccontextmanager
async def connect(
    url: str = DEFAULT_NATS_URL, *, tenant: str = "", timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncGenerator[AsyncClient]:
    """A client of the fleets at the nats-server `url`. `tenant`: by default that of the URL's credentials.
    Raises SetupError if no server answers within `timeout_s`. At the end, requests without an answer raise
    Cancelled."""
    bus = await NatsBus.connect(url, name="headrace-client", timeout_s=timeout_s)
    try:
        client = await AsyncClient.open(bus, tenant or access.tenant_of(url, DEFAULT_TENANT))
        try:
            yield client
        finally:
            client.fail(Cancelled("the client was closed before the answer"))
    finally:
        await bus.drain()


class Client:
    """A client for programs without an event loop. Close it, or use it as a context manager."""

    def __init__(
        self, url: str = DEFAULT_NATS_URL, *, tenant: str = "", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """See `connect`."""
        self._pid, self._closed = os.getpid(), False
        self._lock = threading.RLock()  # again from a generator that is collected while it is held
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
            # not awaited: a generator may be collected in any thread, even in that of the loop
            with contextlib.suppress(HeadraceError):
                self._submit(frames.aclose())

    def cancel(self, request_id: str) -> None:
        """End a request. One that is unknown or has ended is ignored."""
        self._run(_called(self._client, request_id))

    def close(self) -> None:
        """Close the connection; requests without an answer raise Cancelled. Nothing happens the second time,
        or in a fork of the process."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            ended = self._submit(self._end())
            self._closed = True
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        """Drain the connection, then end the calls that still wait."""
        await self._open.aclose()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call on the loop. An interrupt of this thread cancels the call."""
        future = self._submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a call on the loop. Raises SetupError after `close` and in a fork of the process."""
        if os.getpid() != self._pid:  # before the lock, which another thread may have held at the fork
            call.close()
            raise SetupError(_FORKED)
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(call, self._loop)
        call.close()
        raise SetupError(_CLOSED)


async def _next(frames: AsyncGenerator[Body]) -> Body | None:
    return await anext(frames, None)


async def _called(client: AsyncClient, request_id: str) -> None:
    client.cancel(request_id)
