"""An answer as server-sent events: the response that a streaming request gets.

The status waits for the first chunk: what fails before it is refused like any other request, what fails
later ends the stream with an event `{"error": …}` and without `[DONE]`. A client that goes away cancels the
request. One that reads too slowly holds up nobody: frames wait for it in the native client, which ends the
request when they are too many (shared/unread.py); the kernel ends a connection that takes nothing at all.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.chunks import ChunkMaker
from services.gateway.meter import Meter
from services.gateway.presence import unless_gone
from services.gateway.refusals import body_of
from services.gateway.respond import refusal
from services.gateway.talk import Tagged
from services.gateway.visit import Visit
from shared.clock import Clock
from shared.errors import HeadraceError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would wait for a page full of them
]
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The chunks of one call, as they come."""

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[Tagged], chunks: ChunkMaker, visit: Visit, meter: Meter, clock: Clock
    ) -> None:
        super().__init__()
        self._frames = frames
        self._chunks = chunks
        self._visit = visit
        self._meter = meter
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as the client stays for."""
        try:
            await unless_gone(receive, self._serve(scope, receive, send))
        except HeadraceError as error:
            self._visit.error = error  # the client has gone: there is nobody to tell
            self._visit.status = self._visit.status or error.code

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._frames) as frames:
                async for prompt, frame in frames:
                    chunks = self._chunks.take(prompt, frame)
                    if chunks and not started:
                        started = True
                        self._visit.first_us = self._clock.wall_us()
                        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
                    if chunks:
                        await self._send(send, events(chunks))
                        self._meter.chunks += len(chunks)
            self._visit.answered_us = self._clock.wall_us()
            await self._send(send, DONE, last=True)
        except HeadraceError as error:
            self._visit.error = error
            self._visit.answered_us = self._clock.wall_us()
            if started:
                await self._send(send, events([body_of(error, self._visit.request_id)]), last=True)
            else:
                await refusal(error, self._visit.request_id)(scope, receive, send)

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": not last})


def events(chunks: Iterable[dict[str, Any]]) -> bytes:
    """Chunks as events."""
    texts = (json.dumps(chunk, ensure_ascii=False, separators=(",", ":")) for chunk in chunks)
    return "".join(f"data: {text}\n\n" for text in texts).encode("utf-8", "replace")
