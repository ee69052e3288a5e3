"""Requests over NATS, by `shared.client.client`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from loadtest.bench import openai_chunks
from loadtest.bench.pacer import Pacer
from loadtest.bench.record import Record
from shared.client.client import Client
from shared.errors import HeadraceError


class NatsTransport:
    """Sends over one connection."""

    def __init__(self, client: Client, model: str, pacer: Pacer, timeout_s: float) -> None:
        self._client = client
        self._pacer = pacer
        self._timeout_s = timeout_s
        self.model = model

    async def send(self, body: dict[str, object], record: Record) -> None:
        """One stream, read to its end."""
        asked = {**body, "model": self.model}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                contextlib.aclosing(self._client.stream(asked, timeout_s=self._timeout_s)) as frames,
            ):
                async for frame in frames:
                    on_frame(frame, record, self._pacer.now_us())
        except HeadraceError as error:
            record.error = f"{error.code} {error.message}"[:200]
        except TimeoutError:
            record.error = f"no whole answer within {self._timeout_s:g} s"


def on_frame(frame: dict[str, Any], record: Record, now_us: int) -> None:
    """One frame, which came at `now_us`. A stream that starts over after a fault repeats what came: only
    what is new counts, so a fault is a stall, as the reader sees it."""
    if frame["type"] == "delta":
        choice = frame["choices"][0]
        new = choice["first"] + choice["count"] - record.chunk_tokens
        if new > 0 and (text := openai_chunks.text_of(choice)):
            record.took(text, now_us, new)
    elif frame["type"] == "done" and "usage" in frame:
        openai_chunks.count(frame["usage"], record)
