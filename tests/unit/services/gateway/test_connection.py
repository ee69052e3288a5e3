"""What a peer owes is bounded: a head, a body, idle connections of one address. What we owe is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway import connection
from services.gateway.actor import HttpServer, listen
from services.gateway.connection import MAX_HEAD_BYTES, MAX_PIPELINED, Connection, _network

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
WITHIN_S = 90  # a guard against hanging, no measure


class App:
    """Answers at once, without reading the body; `/read` reads it before; `/held` waits for `go` in the
    middle, `/left` for the end of the connection; `/stream` has no length."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.left = asyncio.Event()
        self.read: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers.append(dict(scope["headers"]))
        if scope["path"] == "/read":
            self.read.append(await whole(receive))
        length = [(b"content-length", b"4")] if scope["path"] != "/stream" else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"he", "more_body": True})
        if scope["path"] == "/held":
            await self.go.wait()
        if scope["path"] == "/left":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        await send({"type": "http.response.body", "body": b"re"})


async def whole(receive: Any) -> bytes:
    """The body of a request."""
    body, more = b"", True
    while more:
        if (message := await receive())["type"] == "http.disconnect":
            raise ConnectionAbortedError
        body, more = body + message["body"], message["more_body"]
    return body


class Peer:
    """A client that sends any bytes."""

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

    @property
    def connections(self) -> list[Connection]:
        return [*self.server._server.server_state.connections]  # type: ignore[list-item]  # uvicorn has others

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
    """Whether it has never sent anything, or nothing but blank lines, or has had its answer."""
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.1)
    for data in (b"", b"\r\n" * 10):
        assert await (await door.peer(data)).read() == b""
    assert (await (await door.peer(GET + b"\r\n")).read()).endswith(b"here")


async def test_rest_of_an_unread_body_is_not_awaited(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_bytes_that_are_not_http_are_refused_and_not_logged(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    for data in (b"\x16\x03\x01\x02\x00", b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n"):
        assert refusal(await (await door.peer(data)).read()) == (400, "None")
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


# ---- several requests at once -----------------------------------------------------------------------


async def test_requests_that_wait_after_one_are_bounded(door: Door) -> None:
    """What came before is answered, and then why the rest is not."""
    peer = await door.peer(GET.replace(b"/", b"/held", 1) + b"\r\n" + (GET + b"\r\n") * (MAX_PIPELINED + 10))
    await peer.read(b"he")
    assert len(door.connections[0].pipeline) == MAX_PIPELINED
    door.app.go.set()
    for _ in range(MAX_PIPELINED + 1):
        await peer.read(b"re")
    assert refusal(await peer.read()) == (429, "overloaded")


async def test_connection_is_not_read_while_requests_wait(door: Door) -> None:
    held = GET.replace(b"/", b"/held", 1) + b"\r\n"
    peer = await door.peer(POST.replace(b"/", b"/read", 1) + b"x" * 1000 + held + GET + b"\r\n")
    await peer.read(b"here")
    await peer.read(b"he")
    assert door.connections[0].flow.read_paused, "the third waits, though the first has been answered"
    for _ in range(10):
        peer.send(GET + b"\r\n")
    door.app.go.set()
    await peer.read(b"re")
    for _ in range(11):
        assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
    assert not door.connections[0].flow.read_paused


async def test_head_may_start_after_other_requests(door: Door) -> None:
    """Its own bytes count, not those of the others."""
    long = GET + b"cookie: " + b"x" * 2000 + b"\r\n\r\n"
    post = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 40000\r\n\r\n" + b"x" * 40_000
    for before, count in ((long * 20, 20), (post, 1)):
        peer = await door.peer(before + GET)
        for _ in range(count):
            assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
        peer.send(b"\r\n")
        assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")


async def test_a_body_that_waits_for_another_answer_is_not_late(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await door.peer(GET.replace(b"/", b"/held", 1) + b"\r\n")
    await peer.read(b"he")
    peer.send(POST.replace(b"/", b"/read", 1) + b"x" * 500)
    with monkeypatch.context() as short:
        short.setattr(connection, "BODY_TIMEOUT_S", 0.0)
        short.setattr(connection, "LINGER_S", 0.05)
        await (await door.peer(POST + b"x")).read()  # a later one has been ended
    door.app.go.set()
    await peer.read(b"re")
    peer.send(b"x" * 500)
    assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
    assert door.app.read == [b"x" * 1000]


async def test_each_piece_of_a_long_body_has_its_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_PIECE_BYTES", 1_000)
    peer = await door.peer(b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n")
    async with asyncio.timeout(WITHIN_S):
        while not door.connections or door.connections[0].owes != connection.BODY:
            await asyncio.sleep(0)
        upload = door.connections[0]
        upload.since_s = began_s = upload.since_s - 500
        peer.send(b"x" * 999)
        while upload._body_bytes < 999:
            await asyncio.sleep(0)
        assert upload.since_s == began_s
        peer.send(b"x" * 1_001)
        assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
    assert upload.since_s > began_s + 400


async def test_bytes_that_are_not_http_are_refused_after_the_answer_before_them(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await door.peer(GET.replace(b"/", b"/held", 1) + b"\r\n\x16\x03\x01\x02\x00")
    await peer.read(b"he")
    door.app.go.set()
    assert await peer.read(b"re") == b"re"
    assert refusal(await peer.read()) == (400, "None")
    assert caplog.records == []


async def test_lost_connection_is_reported_to_the_running_request(door: Door) -> None:
    """Not only to the newest, which waits after it."""
    peer = await door.peer(GET.replace(b"/", b"/left", 1) + b"\r\n" + GET + b"\r\n")
    await peer.read(b"he")
    door.connections[0].transport.abort()
    async with asyncio.timeout(WITHIN_S):
        await door.app.left.wait()


# ---- bodies -----------------------------------------------------------------------------------------

CHUNKED = b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_trailers_are_not_kept(door: Door) -> None:
    peer = await door.peer(CHUNKED + b"3\r\nabc\r\n0\r\na: b\r\n\r\n" + GET + b"\r\n")
    for _ in range(2):
        assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
    assert door.app.read == [b"abc"]
    assert [set(headers) for headers in door.app.headers] == [{b"host", b"transfer-encoding"}, {b"host"}]


@pytest.mark.parametrize(
    "begun", [b"1\r\nx\r\n0\r\n", b"1\r\nx\r\n0\r\na: ", b"1;a="], ids=["many", "one", "chunk"]
)
@pytest.mark.parametrize("path", [b"/", b"/read"], ids=["answered", "read"])
async def test_overhead_of_a_chunked_body_is_bounded(
    door: Door, monkeypatch: pytest.MonkeyPatch, begun: bytes, path: bytes
) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 100)
    peer = await door.peer(CHUNKED.replace(b"/read", path, 1) + begun)
    if path == b"/":
        await peer.read(b"here")
    else:
        await (await door.peer(GET + b"\r\n")).read(b"here")  # what was sent before has been read
    peer.send(b"x:y\r\n" * 30 if begun.endswith(b"\n") else b"x" * 150)
    answer = await peer.read()
    if path == b"/":
        assert answer == b"", "no second answer"
    else:
        assert refusal(answer) == (431, "head_too_large")


async def test_a_body_that_is_not_in_chunks_is_refused(door: Door) -> None:
    peer = await door.peer(CHUNKED + b"3\r\nabc\r\nxyz\r\n")
    assert refusal(await peer.read()) == (400, "None")
    second = await door.peer(GET.replace(b"/", b"/held", 1) + b"\r\n" + CHUNKED + b"xyz\r\n")
    await second.read(b"he")
    door.app.go.set()
    assert await second.read(b"re") == b"re"
    assert refusal(await second.read()) == (400, "None")
    assert door.app.read == []
    third = await door.peer(CHUNKED.replace(b"/read", b"/", 1))
    await third.read(b"here")
    third.send(b"xyz\r\n")
    assert await third.read() == b"", "no second answer"


@pytest.mark.parametrize(
    ("coding", "status"),
    [(b"gzip, chunked", 501), (b"gzip\r\ntransfer-encoding: Chunked", 501), (b"gzip", 400)],
)
async def test_a_body_in_another_transfer_coding_is_refused(door: Door, coding: bytes, status: int) -> None:
    peer = await door.peer(CHUNKED.replace(b"chunked", coding) + b"3\r\nabc\r\n0\r\n\r\n")
    assert refusal(await peer.read())[0] == status
    assert door.app.read == []


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("split", [False, True], ids=["one piece", "two"])
async def test_a_request_that_offers_another_protocol_is_answered_in_http_1(
    door: Door, offer: bytes, split: bool
) -> None:
    asked = (
        b"POST /read HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer
        + b"\r\nHTTP2-Settings: AAMAAABk\r\ncontent-length: 1000\r\n\r\n"
    )  # fmt: skip
    body = b"y" * 1000
    peer = await door.peer(asked if split else asked + body)
    if split:
        await (await door.peer(GET + b"\r\n")).read(b"here")  # what was sent before has been read
        peer.send(body)
    assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
    peer.send(POST.replace(b"/", b"/read", 1) + b"x" * 1000)
    assert (await peer.read(b"here")).startswith(b"HTTP/1.1 200")
    assert door.app.read == [body, b"x" * 1000]


# ---- the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_early_answer_is_read_by_a_client_that_still_sends_on_a_closing_connection(
    door: Door, version: bytes
) -> None:
    head = b"POST / HTTP/" + version + b"\r\nconnection: close\r\ncontent-length: 8000000\r\n\r\n"
    peer = await door.peer(head + b"x" * 8_000_000)
    assert (await peer.read()).endswith(b"here")


async def test_refusal_is_read_by_a_client_that_still_sends_its_head(door: Door) -> None:
    peer = await door.peer(GET + b"long: " + b"x" * 8_000_000)
    assert refusal(await peer.read()) == (431, "head_too_large")


async def test_bytes_after_the_last_answer_are_not_read_for_ever(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    for data in (b"\x16\x03\x01", POST.replace(b"host", b"connection: close\r\nhost")):
        peer = await door.peer(data)
        await peer.read()
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(ConnectionError):
                while True:
                    peer.send(b"x")
                    await peer.writer.drain()
                    await asyncio.sleep(0)


async def test_a_connection_that_is_to_be_closed_ends_with_its_answer(door: Door) -> None:
    close = b"connection: close\r\nhost"
    for data in (GET + b"\r\n", POST + b"x" * 1000):
        answer = await (await door.peer(data.replace(b"host", close))).read()
        assert answer.endswith(b"here")
        assert b"connection: close" in answer


@pytest.mark.parametrize("path", [b"/", b"/stream"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_answer_to_http_1_0_is_not_chunked_and_ends_with_its_connection(
    path: bytes, version: bytes, door: Door
) -> None:
    peer = await door.peer(b"GET " + path + b" HTTP/" + version + b"\r\nconnection: close\r\n\r\n")
    head, _, body = (await peer.read()).partition(b"\r\n\r\n")
    chunked = path == b"/stream" and version == b"1.1"
    assert (b"transfer-encoding: chunked" in head, b"connection: close" in head) == (chunked, True)
    assert body == (b"2\r\nhe\r\n2\r\nre\r\n0\r\n\r\n" if chunked else b"here")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True), ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2::5", "2001:db8:1:2:9::", True), ("2001:db8:1:2::5", "2001:db8:1:3::5", False),
        ("fe80::1%eth0", "fe80::2", True), ("", "", True),
    ],
)  # fmt: skip
def test_connections_of_one_network_count_together(one: str, other: str, same: bool) -> None:
    assert (_network(one) == _network(other)) == same
