"""Requests over HTTP to any server with OpenAI's API, streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from loadtest.bench import openai_chunks
from loadtest.bench.http_pool import Address, Pool
from loadtest.bench.http_wire import Broken
from loadtest.bench.pacer import Pacer
from loadtest.bench.record import Record
from loadtest.bench.sse import DONE, Events
from shared.errors import SetupError

DEFAULT_TIMEOUT_S = 600.0


class HttpTransport:
    """Sends to one server. `model` may be empty until `find_model`."""

    def __init__(
        self, url: str, pacer: Pacer, *, model: str = "", key: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.url = url
        self.model = model
        self._pool = Pool(Address.of(url), pacer, key)
        self._timeout_s = timeout_s

    async def send(self, body: dict[str, object], record: Record) -> None:
        """A chat where the body has messages, else a completion."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        asked = {"model": self.model, **body, "stream": True, "stream_options": {"include_usage": True}}
        events, whole, refused = Events(), False, b""

        def on_body(status: int, data: bytes, now_us: int) -> None:
            nonlocal whole, refused
            if status != 200:
                refused += data
                return
            for event in events.feed(data):
                if event == DONE:
                    whole = True
                else:
                    openai_chunks.on_data(event, record, now_us)

        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._pool.ask("POST", path, asked, on_body)
        except TimeoutError:
            record.error = f"no whole answer within {self._timeout_s:g} s"
        except (Broken, OSError) as error:
            record.error = "" if whole and isinstance(error, Broken) else str(error)
        else:
            if status != 200:
                record.error = f"{status} {_reason(refused)}"
            elif not whole and not record.error:
                record.error = "the stream ended without [DONE]"

    async def find_model(self) -> None:
        """Take the first model that the server names, where none was given. Raises SetupError."""
        if self.model:
            return
        answer = await self.get("/v1/models")
        models = answer.get("data") if answer else None
        if not models:
            raise SetupError(
                f"{self.url} names no model at /v1/models: start a server there, or give --model"
            )
        self.model = str(models[0]["id"])

    async def get(self, path: str) -> dict[str, Any] | None:
        """A small JSON answer, None when there is none."""
        body = b""

        def on_body(status: int, data: bytes, now_us: int) -> None:
            nonlocal body
            body += data if status == 200 else b""

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.ask("GET", path, None, on_body)
            answer = json.loads(body)
        except (Broken, OSError, ValueError, TimeoutError):
            return None
        return answer if isinstance(answer, dict) else None

    async def close(self) -> None:
        """Close the connections."""
        self._pool.close()


def _reason(body: bytes) -> str:
    try:
        return openai_chunks.failure(json.loads(body).get("error", body.decode()))
    except (ValueError, AttributeError):
        return body[:200].decode(errors="replace")
