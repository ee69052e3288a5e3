"""What a peer owes is bounded: a head, a body, idle connections of one address. What we owe is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway import connection
from services.gateway.actor import HttpServer, listen
from services.gateway.connection import MAX_HEAD_BYTES, _network

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
WITHIN_S = 30  # a guard against hanging, no measure


class App:
    """Answers at once, without reading the body; `/held` waits for `go` in the middle."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"he", "more_body": True})
        if scope["path"] == "/held":
            await self.go.wait()
        await send({"type": "http.response.body", "body": b"re"})


class Peer:
    """A client that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, what: bytes = b"") -> bytes:
        """Up to `what`, or to the end of the connection."""
        async with asyncio.timeout(WITHIN_S):
            return await (self.reader.readuntil(what) if what else self.reader.read())


class Door:
    """A server, and peers of it."""

    def __init__(self, server: HttpServer, app: App) -> None:
        self.server = server
        self.app = app

    async def peer(self, data: bytes = b"", source: str = "127.0.0.1") -> Peer:
        peer = Peer(*await asyncio.open_connection(*self.server.address, local_addr=(source, 0)))
        peer.send(data)
        return peer


@pytest.fixture
async def door(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    for name in ("HEAD_TIMEOUT_S", "KEEP_ALIVE_S", "BODY_TIMEOUT_S", "LINGER_S"):
        monkeypatch.setattr(connection, name, 600.0)
    monkeypatch.setattr("services.gateway.actor.SWEEP_S", 0.02)
    monkeypatch.setattr(connection, "SWEEP_S", 0.02)
    app = App()
    server = HttpServer(app, listen("127.0.0.1", 0))
    await server.start()
    yield Door(server, app)
    app.go.set()
    await server.stop()


def refusal(answer: bytes) -> tuple[int, str]:
    """The status of a JSON error, and its code."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), str(json.loads(body)["error"]["code"])


async def test_half_a_head_ends(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    for data in (b"G", GET, GET + b"x: "):
        assert refusal(await (await door.peer(data)).read()) == (408, "request_timeout")
    second = await door.peer(GET + b"\r\n" + GET)
    answered, _, late = (await second.read()).partition(b"here")
    assert answered.startswith(b"HTTP/1.1 200")
    assert refusal(late) == (408, "request_timeout")


async def test_a_silent_connection_ends(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has never said anything, or nothing but blank lines, or has had its answer."""
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.1)
    for data in (b"", b"\r\n" * 10):
        assert await (await door.peer(data)).read() == b""
    assert (await (await door.peer(GET + b"\r\n")).read()).endswith(b"here")


async def test_the_rest_of_a_body_that_nobody_reads_is_not_awaited(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    assert (await (await door.peer(POST + b"x")).read()).endswith(b"here")


async def test_the_rest_of_a_body_may_follow_the_answer(door: Door) -> None:
    peer = await door.peer(POST + b"x" * 500)
    await peer.read(b"here")
    peer.send(b"x" * 500 + GET + b"\r\n")
    assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("pieces", [1, 9])
@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * MAX_HEAD_BYTES,
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x",
        b"GET / HTTP/1.1\r\n" + b"\r\n".join([b"a: b"] * (MAX_HEAD_BYTES // 6 + 1)),
    ],
    ids=["header", "path", "headers"],
)
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["open", "whole"])
async def test_a_head_that_is_too_large_is_refused(door: Door, head: bytes, end: bytes, pieces: int) -> None:
    peer, data = await door.peer(), head + end
    size = -(-len(data) // pieces)
    for at in range(0, len(data), size):
        peer.send(data[at : at + size])
        await asyncio.sleep(0)
    assert refusal(await peer.read()) == (431, "head_too_large")


async def test_a_head_of_that_size_is_served(door: Door) -> None:
    peer = await door.peer(GET + b"long: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
    assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_refused_and_not_logged(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    assert refusal(await (await door.peer(b"\x16\x03\x01\x02\x00")).read()) == (400, "None")
    assert caplog.records == []


async def test_connections_that_wait_are_bounded_by_address(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_IDLE", 3)
    elsewhere = await door.peer(GET, source="127.0.0.2")
    held = await door.peer(GET.replace(b"/", b"/held", 1) + b"\r\n")  # the oldest of its address
    await held.read(b"he")
    here = [await door.peer(data) for data in (b"", GET, POST + b"x", b"", b"")]
    ended = [await peer.read() for peer in here[:2]]
    assert ended[0] == b""
    assert refusal(ended[1]) == (408, "request_timeout")
    for peer in (*here[3:], elsewhere):
        peer.send(b"\r\n" if peer is elsewhere else GET + b"\r\n")
        assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
    door.app.go.set()
    assert await held.read(b"re") == b"re"


async def test_an_answer_has_all_the_time_it_takes(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await door.peer(GET.replace(b"/", b"/held", 1) + b"\r\n")
    await held.read(b"he")
    for name in ("HEAD_TIMEOUT_S", "KEEP_ALIVE_S", "BODY_TIMEOUT_S", "LINGER_S"):
        monkeypatch.setattr(connection, name, 0.05)
    held.send(GET)  # and half of the next request already
    await (await door.peer()).read()  # a later one has been ended
    door.app.go.set()
    assert (await held.read()).startswith(b"re")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True), ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2::5", "2001:db8:1:2:9::", True), ("2001:db8:1:2::5", "2001:db8:1:3::5", False),
        ("fe80::1%eth0", "fe80::2", True), ("", "", True),
    ],
)  # fmt: skip
def test_whose_connections_count_together(one: str, other: str, same: bool) -> None:
    assert (_network(one) == _network(other)) == same
