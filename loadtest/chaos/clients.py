"""The clients of a chaos cell: half of them over HTTP, half over NATS. They honour Retry-After.

A request is sent once. After a refusal a client waits for the time in the answer and sends its next request.
If no connection can be made, nothing has been sent yet, and the client tries again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from loadtest.bench.sse import DONE, Events
from loadtest.storm import PAUSE_S, Ask, Outcome, send
from shared.client.client import Client, NoAnswer
from shared.errors import DeadlineExceeded, HeadraceError, Overloaded, Unavailable
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

CONNECT_AGAIN_S = 0.2
CHUNK_BYTES = 65_536
_CODES = {each.type: each.code for each in (DeadlineExceeded, Overloaded, Unavailable)}


class Reset(Exception):
    """The connection ended before the answer did."""


class Refused(Exception):
    """A typed error, before or in the middle of an answer."""

    def __init__(self, code: int, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.code, self.wait_s = code, wait_s


@dataclass(slots=True)
class Ended:
    """A request, from its sending to its end, seconds of `time.monotonic`."""

    outcome: Outcome
    over: str  # http, nats
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Clients:
    """Sends requests in a row and keeps what became of them."""

    nats_url: str
    http_url: str
    limit_s: float  # of a client's patience
    ended: list[Ended] = field(default_factory=list)
    on_end: Callable[[], None] = lambda: None
    repeated: int = 0  # frames that came twice over NATS
    _sent: int = 0
    _paced_from: tuple[int, float] = (0, 0.0)  # number of a request, and when
    _every_s: float = 0.0

    def pace(self, over_s: float, requests: int) -> None:
        """Spread what is left of `requests` over this time; until now each client sends as soon as it can."""
        self._paced_from = self._sent, time.monotonic()
        self._every_s = over_s / max(requests - self._sent, 1)

    async def run(self, asks: Iterable[Ask], http: int, nats: int) -> None:
        """Send all of `asks` by so many clients of each kind, and wait for their ends."""
        queue = iter(enumerate(asks))
        bus = await NatsBus.connect(self.nats_url, timeout_s=10)
        client = await Client.open(bus)
        async with _watched(self.nats_url) as spy, asyncio.TaskGroup() as group:
            for over, count in (("http", http), ("nats", nats)):
                for _ in range(count):
                    group.create_task(self._one(client, over, queue))
        self.repeated = spy.repeated
        await bus.drain()

    async def _one(self, client: Client, over: str, queue: Iterator[tuple[int, Ask]]) -> None:
        for number, ask in queue:
            self._sent = number + 1
            first, since_s = self._paced_from
            due_s = since_s + (number - first) * self._every_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            connection = await self._connected() if over == "http" else None
            outcome, began_s, wait_s = Outcome(ask), time.monotonic(), 0.0
            try:
                if connection is not None:
                    async with asyncio.timeout(self.limit_s):
                        await over_http(connection, ask, outcome)
                else:
                    await send(client, ask, outcome, self.limit_s)
                outcome.end = "answer"
            except (NoAnswer, TimeoutError) as error:
                outcome.end, outcome.message = "silence", str(error)
            except (Reset, OSError) as error:
                outcome.end, outcome.message = "reset", str(error)
            except Refused as error:
                outcome.end, outcome.code, outcome.message = "error", error.code, str(error)
                wait_s = error.wait_s
            except HeadraceError as error:
                outcome.end, outcome.code, outcome.message = "error", error.code, error.message
                wait_s = (error.retry_after_ms / 1000 or PAUSE_S) if error.retryable else 0.0
            ended_s = time.monotonic()
            outcome.seconds = ended_s - began_s
            self.ended.append(Ended(outcome, over, began_s, ended_s))
            self.on_end()
            await asyncio.sleep(wait_s)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = urlsplit(self.http_url)
        async with asyncio.timeout(self.limit_s):
            while True:
                try:
                    return await asyncio.open_connection(address.hostname, address.port)
                except OSError:
                    await asyncio.sleep(CONNECT_AGAIN_S)


class _Exchange:
    """What httptools tells of one response."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.whole = True


async def over_http(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], ask: Ask, outcome: Outcome
) -> None:
    """Ask for a chat over a connection of its own and fill in what came. Raises Refused, Reset, OSError."""
    reader, writer = connection
    try:
        body = dict(ask.body)
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(data)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + data)
        got, events, ends = _Exchange(), Events(), list[bytes]()
        parser = httptools.HttpResponseParser(got)
        while not got.whole:
            chunk = await reader.read(CHUNK_BYTES)
            if not chunk:
                raise Reset("the connection ended before the answer did")
            parser.feed_data(chunk)
            if parser.get_status_code() == 200 and body["stream"]:
                outcome.accepted = True
                for event in events.feed(bytes(got.body)):
                    _take(event, outcome, ends)
                got.body.clear()
    finally:
        writer.close()
    if parser.get_status_code() != 200:
        raise refusal(json.loads(got.body), parser.get_status_code(), got.headers)
    if not body["stream"]:
        answer = json.loads(got.body)
        outcome.texts = {c["index"]: c["message"]["content"] for c in answer["choices"]}
        outcome.tokens = answer["usage"]["completion_tokens"]
    elif ends.count(DONE) != 1:
        raise Reset("the stream ended without [DONE]")


def _take(event: bytes, outcome: Outcome, ends: list[bytes]) -> None:
    """One event of a stream. Raises Refused for an error."""
    if event == DONE:
        ends.append(event)
        return
    chunk = json.loads(event)
    if "error" in chunk:
        raise refusal(chunk, 0, {})
    for choice in chunk["choices"]:
        text = choice["delta"].get("content") or ""
        outcome.texts[choice["index"]] = outcome.texts.get(choice["index"], "") + text
    if usage := chunk.get("usage"):
        outcome.tokens = usage["completion_tokens"]


def refusal(body: dict[str, Any], status: int, headers: dict[str, str]) -> Refused:
    """The error of a response, or of an event (status 0), whose word stands for its status."""
    error = body["error"]
    return Refused(
        status or _CODES.get(error.get("code"), 500),
        str(error["message"]),
        float(headers.get("retry-after", PAUSE_S)),
    )


class _Spy:
    """Hears every reply of the services, and counts the frames of streams that come twice: in the same
    attempt, without a new beginning."""

    def __init__(self) -> None:
        self.repeated = 0
        self._seen: dict[str, set[tuple[int, int]]] = {}

    def take(self, delivery: Delivery) -> None:
        """A reply."""
        try:
            message = json.loads(delivery.data)
        except ValueError:
            return
        if not isinstance(message, dict) or message.get("type") not in ("accepted", "delta", "done"):
            return
        name = message["attempt"], message["frame"]
        seen = self._seen.setdefault(delivery.subject, set())
        if message["type"] == "accepted":
            seen.clear()
        self.repeated += name in seen
        seen.add(name)


@asynccontextmanager
async def _watched(url: str) -> AsyncIterator[_Spy]:
    bus, spy = await NatsBus.connect(url, timeout_s=10), _Spy()
    await bus.subscribe("_INBOX.>", spy.take)
    await bus.flush()
    try:
        yield spy
    finally:
        await bus.drain()
