"""Clients of short requests: most read to the end, the others cancel or vanish at a random moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from loadtest.bench.sse import DONE, Events
from loadtest.fleet import MODEL
from loadtest.storm import WORDS
from shared.client.client import Client, NoAnswer
from shared.errors import HeadraceError, from_code
from shared.nats import subjects
from shared.nats.bus import NatsBus

KINDS_OF_REQUEST = 200  # distinct; each one's answer is known from an undisturbed run
CHUNK_BYTES = 65_536
LIMIT_S = 60.0
# Shares of what clients do, in thousandths. "cancel" sends the cancel verb, "leave" stops reading, "gone"
# ends its connection; each after a random number of frames, 0: at once. "half" sends a part of a request.
NATS = {"whole": 150, "stream": 150, "cancel": 120, "leave": 60, "gone": 10, "wrong": 20}
HTTP = {"whole": 120, "stream": 180, "leave": 130, "half": 40, "wrong": 20}
WRONG = (
    {"messages": "not a list"},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0},
)

Body = dict[str, Any]
Answer = tuple[dict[int, str], int]  # texts by choice, tokens


class Reset(Exception):
    """The connection ended before the answer did."""


def known(number: int) -> Body:
    """A short request with a seed."""
    rng = random.Random(number)
    more: Body = {"stop": ["e", " the"]} if rng.random() < 0.2 else {}
    words = rng.choices(WORDS, k=rng.choice((1, 3, 12, 40)))
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": rng.choice((1, 2, 4, 8, 16)),
        "seed": number,
        "n": rng.choice((1, 1, 1, 2)),
        "ignore_eos": True,
        **more,
    }


@dataclass(slots=True)
class Clients:
    """Sends requests and counts their ends."""

    url: str
    http_url: str
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    right: dict[int, Answer] = field(default_factory=dict)
    done: int = 0
    per_second: float = 0  # requests begun in a second, at most; 0: as many as the fleet answers
    _next_s: float = 0
    _awaited: tuple[int, asyncio.Future[None]] | None = None

    async def until(self, done: int) -> None:
        """Return once so many requests have ended."""
        if self.done < done:
            self._awaited = done, asyncio.get_running_loop().create_future()
            await self._awaited[1]

    async def learn(self) -> None:
        """The answer to every known request, from a quiet fleet."""
        async with self._client() as client:
            for number in range(KINDS_OF_REQUEST):
                reply = await client.complete(known(number), timeout_s=LIMIT_S)
                texts = {
                    c["index"]: c["message"]["content"] for c in reply["choices"] if c["message"]["content"]
                }
                self.right[number] = texts, reply["usage"]["completion_tokens"]

    async def run(self, rng: random.Random, requests: int, clients: int) -> None:
        """Send so many requests, `clients` at a time."""
        ways = [("nats", what) for what in NATS] + [("http", what) for what in HTTP]
        shares = [*NATS.values(), *HTTP.values()]
        queue = iter(range(requests))
        async with self._client() as client, asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._one(client, queue, rng, ways, shares))

    async def _one(
        self,
        client: Client,
        queue: Iterator[int],
        rng: random.Random,
        ways: list[tuple[str, str]],
        shares: list[int],
    ) -> None:
        connection = _Http(self.http_url)
        for _ in queue:
            await self._turn()
            over, what = rng.choices(ways, shares)[0]
            number, frames = rng.randrange(KINDS_OF_REQUEST), rng.choice((0, 0, 1, 1, 2, 3, 5))
            body = {**known(number), "stream": what == "stream" or (what != "whole" and rng.random() < 0.9)}
            if what == "wrong":
                body = {**rng.choice(WRONG), "model": MODEL}
            try:
                async with asyncio.timeout(LIMIT_S):
                    if over == "http":
                        found = await connection.ask(body, what, frames, rng)
                    else:
                        found = await self._over_nats(client, body, what, frames)
                end = "answer" if found is not None else "left"
                if found is not None and found != self.right.get(number):
                    self.wrong.append(f"{over} {what}: {number}: {found}")
            except HeadraceError as error:
                end = "silence" if isinstance(error, NoAnswer) else f"error {error.code}"
            except TimeoutError:
                end = "silence"
            except (Reset, OSError) as error:
                end = f"reset {error}"
                connection.close()
            self.ends[f"{over} {what}: {end}"] += 1
            self.done += 1
            if self._awaited is not None and self.done >= self._awaited[0] and not self._awaited[1].done():
                self._awaited[1].set_result(None)
        connection.close()

    async def _turn(self) -> None:
        """Wait until another request may begin."""
        if self.per_second:
            now = asyncio.get_running_loop().time()
            self._next_s = max(self._next_s, now - 1) + 1 / self.per_second
            await asyncio.sleep(self._next_s - now)

    async def _over_nats(self, client: Client, body: Body, what: str, frames: int) -> Answer | None:
        """One request; None if the client has left. Raises as the client does."""
        if what == "gone":
            await self._gone(body, frames)
            return None
        if what in ("whole", "wrong"):
            reply = await client.complete(body, timeout_s=LIMIT_S)
            texts = {c["index"]: c["message"]["content"] for c in reply["choices"] if c["message"]["content"]}
            return texts, reply["usage"]["completion_tokens"]
        request_id, texts, tokens, seen = secrets.token_hex(11), dict[int, str](), 0, 0
        stream = client.stream({**body, "request_id": request_id}, timeout_s=LIMIT_S)
        async with contextlib.aclosing(stream) as replies:
            if what == "cancel" and not frames:
                asyncio.get_running_loop().call_soon(client.cancel, request_id)
            async for frame in replies:
                seen += 1
                if frame["type"] == "accepted":
                    texts.clear()
                elif frame["type"] == "delta":
                    for choice in frame["choices"]:
                        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"]["content"]
                elif frame["type"] == "done":
                    tokens = frame["usage"]["completion_tokens"]
                if what == "cancel" and seen == frames:
                    client.cancel(request_id)
                if what == "leave" and seen >= frames:
                    return None
        return {i: text for i, text in texts.items() if text}, tokens

    async def _gone(self, body: Body, frames: int) -> None:
        """A client on a connection of its own, which ends."""
        bus = await NatsBus.connect(self.url, timeout_s=LIMIT_S)
        came = asyncio.Semaphore(0)
        inbox = bus.new_inbox()
        await bus.subscribe(inbox, lambda _: came.release())
        subject = subjects.generate(subjects.DEFAULT_TENANT, MODEL)
        bus.publish(subject, json.dumps(body).encode(), reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                for _ in range(min(frames, 1 if not body["stream"] else 2)):
                    await came.acquire()
        await bus.drain()

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        bus = await NatsBus.connect(self.url, timeout_s=10)
        yield await Client.open(bus)
        await bus.drain()


class _Exchange:
    """What httptools reads of one response."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.whole = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.whole = True


class _Http:
    """One connection after the other, each for as many requests as are read to their end."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        """End the connection."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    async def ask(self, body: Body, what: str, frames: int, rng: random.Random) -> Answer | None:
        """One request; None if the client has left. Raises HeadraceError, Reset, OSError."""
        if self._open is None:
            self._open = await asyncio.open_connection(self._address.hostname, self._address.port)
        reader, writer = self._open
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n"
        request = f"{head}content-type: application/json\r\n\r\n".encode() + data
        if what == "half":  # of the head or of the body
            writer.write(request[: rng.randrange(1, len(request))])
            self.close()
            return None
        writer.write(request)
        if what == "leave" and not frames:
            self.close()
            return None
        got, events, seen = _Exchange(), Events(), list[bytes]()
        parser = httptools.HttpResponseParser(got)
        while not got.whole:
            chunk = await reader.read(CHUNK_BYTES)
            if not chunk:
                raise Reset("the connection ended before the answer did")
            parser.feed_data(chunk)
            if parser.get_status_code() == 200 and body.get("stream"):
                seen += events.feed(bytes(got.body))
                got.body.clear()
            if what == "leave" and len(seen) >= frames - 1:  # 1: the head alone
                self.close()
                return None
        if (status := parser.get_status_code()) != 200:
            raise from_code(status, got.body.decode())
        return _answer(seen) if body.get("stream") else _of_body(json.loads(got.body))


def _answer(events: list[bytes]) -> Answer:
    texts, tokens = dict[int, str](), 0
    if events[-1] != DONE:
        raise Reset("the stream ended without [DONE]")
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            raise from_code(500, str(chunk["error"]))
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        if usage := chunk.get("usage"):
            tokens = usage["completion_tokens"]
    return {i: text for i, text in texts.items() if text}, tokens


def _of_body(body: Body) -> Answer:
    texts = {c["index"]: c["message"]["content"] for c in body["choices"] if c["message"]["content"]}
    return texts, body["usage"]["completion_tokens"]
