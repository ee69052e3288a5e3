"""Clients of a fleet under faults: over HTTP and NATS, each with the outcome of its request.

A request is sent once. After a refusal a client waits for the time in the answer and sends its next request.
If no connection can be made, nothing has been sent yet, and the client tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from loadtest.bench.sse import DONE, Events
from loadtest.fleet import Body, connected
from shared.client.client import Client, NoAnswer
from shared.errors import DeadlineExceeded, HeadraceError, Overloaded, Unavailable
from shared.nats import subjects
from shared.nats.bus import NatsBus
from shared.nats.interface import Delivery

PAUSE_S = 0.1  # of a client that was refused without a time to come again
CONNECT_AGAIN_S = 0.2
CHUNK_BYTES = 65_536
WORDS = ["river", "turbine", "water", "channel", "gate", "wheel", "power", "mill", "stone", "spring"]
_CODES = {each.type: each.code for each in (DeadlineExceeded, Overloaded, Unavailable)}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Reset(Exception):
    """The connection ended before the answer did."""


class Refused(Exception):
    """A typed error over HTTP, before or in the middle of an answer."""

    def __init__(self, code: int, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.code, self.wait_s = code, wait_s


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and how its client behaves after `frames` frames, 0: at once. read: to the end; cancel;
    leave: it stops reading; gone: its connection ends; half: it sends a part of a request over HTTP."""

    body: Body
    behaviour: str = "read"
    frames: int = 1


@dataclass(slots=True)
class Outcome:
    """The end of one request as its client sees it."""

    ask: Ask
    end: str = ""  # answer; error (typed, from the service); reset; silence (the client's own limit); left
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    tokens: int = 0
    code: int = 0
    message: str = ""
    accepted: bool = False
    attempts: int = 0
    seconds: float = 0.0

    @property
    def answer(self) -> tuple[dict[int, str], int]:
        """(texts by choice, tokens). An empty text has no frame in a stream."""
        return {i: text for i, text in self.texts.items() if text}, self.tokens

    def on_answer(self, reply: Body) -> None:
        """A whole answer."""
        self.texts = {c["index"]: c["message"]["content"] for c in reply["choices"]}
        self.tokens = reply["usage"]["completion_tokens"]

    def add(self, choices: list[Body]) -> None:
        """Parts of texts."""
        for choice in choices:
            text = self.texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
            self.texts[choice["index"]] = text


@dataclass(slots=True)
class Ended:
    """A request, from its sending to its end, seconds of `time.monotonic`."""

    outcome: Outcome
    over: str  # http, nats
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Clients:
    """Sends requests in a row and keeps their ends."""

    nats_url: str
    http_url: str
    limit_s: float  # of a client's patience
    ended: list[Ended] = field(default_factory=list)
    on_end: Callable[[Ended], None] = lambda ended: None
    repeated: int = 0  # frames that came twice over NATS
    waiting: int = 0  # replies that the client over NATS still awaits at the end
    keep: bool = True  # the ends, and the frames that were seen
    keep_alive: bool = False  # connections over HTTP
    _sent: int = 0
    _paced_from: tuple[int, float] = (0, 0.0)  # number of a request, and when
    _every_s: float = 0.0

    @property
    def outcomes(self) -> list[Outcome]:
        """In order of ending."""
        return [each.outcome for each in self.ended]

    def pace(self, over_s: float, requests: int) -> None:
        """Spread what is left of `requests` over this time; until now each client sends as soon as it can."""
        self._paced_from = self._sent, time.monotonic()
        self._every_s = over_s / max(requests - self._sent, 1)

    async def run(self, asks: Iterable[Ask], http: int, nats: int) -> None:
        """Send all of `asks` by so many clients of each kind, and wait for their ends."""
        queue = iter(enumerate(asks))
        watched = _watched(self.nats_url) if self.keep else contextlib.nullcontext(_Spy())
        async with connected(self.nats_url) as client, watched as spy, asyncio.TaskGroup() as group:
            for over, count in (("http", http), ("nats", nats)):
                for _ in range(count):
                    group.create_task(self._one(client, over, queue))
        self.repeated += spy.repeated
        self.waiting = client.waiting

    async def _one(self, client: Client, over: str, queue: Iterator[tuple[int, Ask]]) -> None:
        connection: Connection | None = None
        for number, ask in queue:
            self._sent = number + 1
            first, since_s = self._paced_from
            due_s = since_s + (number - first) * self._every_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if over == "http" and connection is None:
                connection = await self._connected()
            outcome, began_s, wait_s = Outcome(ask), time.monotonic(), 0.0
            try:
                if connection is not None:
                    async with asyncio.timeout(self.limit_s):
                        await over_http(connection, ask, outcome, keep=self.keep_alive)
                elif ask.behaviour == "gone":
                    await self._gone(ask, outcome)
                else:
                    await send(client, ask, outcome, self.limit_s)
                outcome.end = outcome.end or "answer"
            except (NoAnswer, TimeoutError) as error:
                outcome.end, outcome.message = "silence", str(error)
            except (Reset, OSError) as error:
                outcome.end, outcome.message = "reset", str(error)
            except Refused as error:
                outcome.end, outcome.code, outcome.message = "error", error.code, str(error)
                wait_s = error.wait_s if error.code in _CODES.values() else 0.0
            except HeadraceError as error:
                outcome.end, outcome.code, outcome.message = "error", error.code, error.message
                wait_s = (error.retry_after_ms / 1000 or PAUSE_S) if error.retryable else 0.0
            ended = Ended(outcome, over, began_s, time.monotonic())
            outcome.seconds = ended.ended_s - began_s
            if self.keep:
                self.ended.append(ended)
            self.on_end(ended)
            if not self.keep_alive or outcome.end != "answer":
                connection = None
            await asyncio.sleep(wait_s)
        if connection is not None:
            connection[1].close()

    async def _connected(self) -> Connection:
        address = urlsplit(self.http_url)
        async with asyncio.timeout(self.limit_s):
            while True:
                try:
                    return await asyncio.open_connection(address.hostname, address.port)
                except OSError:
                    await asyncio.sleep(CONNECT_AGAIN_S)

    async def _gone(self, ask: Ask, outcome: Outcome) -> None:
        """A client over NATS with a connection of its own, which ends."""
        bus = await NatsBus.connect(self.nats_url, timeout_s=self.limit_s)
        came, inbox = asyncio.Semaphore(0), bus.new_inbox()
        await bus.subscribe(inbox, lambda _: came.release())
        subject = subjects.generate(subjects.DEFAULT_TENANT, str(ask.body["model"]))
        bus.publish(subject, json.dumps(ask.body).encode(), reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                for _ in range(min(ask.frames, 1 + bool(ask.body["stream"]))):
                    await came.acquire()
        await bus.drain()
        outcome.end = "left"


async def send(client: Client, ask: Ask, outcome: Outcome, timeout_s: float) -> None:
    """Send one request over NATS and fill in what came. Raises as the client does."""
    if not ask.body.get("stream"):
        outcome.on_answer(await client.complete(ask.body, timeout_s=timeout_s))
        return
    request_id, seen = ask.body.get("request_id") or secrets.token_hex(11), 0
    stream = client.stream({**ask.body, "request_id": request_id}, timeout_s=timeout_s)
    async with contextlib.aclosing(stream) as frames:
        if ask.behaviour == "cancel" and not ask.frames:
            asyncio.get_running_loop().call_soon(client.cancel, request_id)
        async for frame in frames:
            seen += 1
            if frame["type"] == "accepted":
                outcome.accepted = True
                outcome.attempts += 1
                outcome.texts.clear()
            elif frame["type"] == "delta":
                outcome.add(frame["choices"])
            elif frame["type"] == "done":
                outcome.tokens = frame["usage"]["completion_tokens"]
            if ask.behaviour == "cancel" and seen == ask.frames:
                client.cancel(request_id)
            if ask.behaviour == "leave" and seen >= ask.frames:
                outcome.end = "left"
                return


class _Exchange:
    """What httptools reads of one response."""

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


def request_bytes(body: Body, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    """A POST as it goes over the wire; `headers` are whole lines."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\n{headers}content-length: {len(data)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + data


async def over_http(connection: Connection, ask: Ask, outcome: Outcome, keep: bool = False) -> None:
    """Ask for a chat and fill in what came; with `keep` the connection stays after a whole answer. Raises
    Refused, Reset, OSError."""
    reader, writer = connection
    kept = False
    try:
        body = dict(ask.body)
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        request = request_bytes(body)
        if ask.behaviour == "half":
            request = request[: random.randrange(1, len(request))]
        writer.write(request)
        if ask.behaviour == "half" or (ask.behaviour == "leave" and not ask.frames):
            outcome.end = "left"
            return
        got, events, seen = _Exchange(), Events(), list[bytes]()
        parser = httptools.HttpResponseParser(got)
        while not got.whole:
            chunk = await reader.read(CHUNK_BYTES)
            if not chunk:
                raise Reset("the connection ended before the answer did")
            parser.feed_data(chunk)
            if parser.get_status_code() == 200 and body.get("stream"):
                outcome.accepted = True
                for event in events.feed(bytes(got.body)):
                    seen.append(event)
                    _on_event(event, outcome)
                got.body.clear()
            if ask.behaviour == "leave" and len(seen) >= ask.frames - 1:  # 1: the head alone
                outcome.end = "left"
                return
        if parser.get_status_code() != 200:
            raise refusal(json.loads(got.body), parser.get_status_code(), got.headers)
        if not body.get("stream"):
            outcome.on_answer(json.loads(got.body))
        elif seen.count(DONE) != 1:
            raise Reset("the stream ended without [DONE]")
        kept = keep
    finally:
        if not kept:
            writer.close()


def _on_event(event: bytes, outcome: Outcome) -> None:
    """One event of a stream. Raises Refused for an error."""
    if event == DONE:
        return
    chunk = json.loads(event)
    if "error" in chunk:
        raise refusal(chunk, 0, {})
    outcome.add(chunk["choices"])
    if usage := chunk.get("usage"):
        outcome.tokens = usage["completion_tokens"]


def refusal(body: Body, status: int, headers: dict[str, str]) -> Refused:
    """The error of a response, or of an event (status 0), whose word stands for its status."""
    error = body["error"]
    return Refused(
        status or _CODES.get(error.get("code"), 500),
        str(error["message"]),
        float(headers.get("retry-after", PAUSE_S)),
    )


class _Spy:
    """Receives every reply of the services, and counts the frames of streams that come twice: in the same
    attempt, without a new beginning."""

    def __init__(self) -> None:
        self.repeated = 0
        self._seen: dict[str, set[tuple[int, int]]] = {}

    def on_reply(self, delivery: Delivery) -> None:
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
    spy = _Spy()
    async with connected(url) as client:
        assert isinstance(client.bus, NatsBus)
        await client.bus.subscribe("_INBOX.>", spy.on_reply)
        await client.bus.flush()
        yield spy


def oracle_key(ask: Ask) -> str:
    """Names the answer of a request, however it is delivered."""
    return str(ask.body["seed"])


def mixed(rng: random.Random, count: int, model: str, **more: Any) -> list[Ask]:
    """`count` requests of mixed length and options, each with a seed: the same answer at any time."""
    asks = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.choice((3, 12, 40, 150)))
        body: Body = {
            "model": model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": rng.choice((4, 24, 64, 120)),
            "seed": rng.getrandbits(32),
            "n": rng.choice((1, 1, 1, 2)),
            "stream": rng.random() < 0.75,
            "ignore_eos": True,
            **more,
        }
        if rng.random() < 0.2:
            body["stop"] = ["e", " the"]
        asks.append(Ask(body))
    return asks
