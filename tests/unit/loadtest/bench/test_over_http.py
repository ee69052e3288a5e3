"""The load client's HTTP side against servers that misbehave: what the report has of them, and what not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loadtest.bench import openai_chunks
from loadtest.bench.http_pool import Address
from loadtest.bench.over_http import HttpTransport
from loadtest.bench.over_nats import on_frame as take_frame
from loadtest.bench.pacer import Pacer
from loadtest.bench.record import Record
from loadtest.bench.sse import Events
from shared.errors import BadRequest, SetupError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    body = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    return OK + b"transfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


TEXT = event(choices=[{"index": 0, "text": "a"}])
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"
OVERLOADED = b'{"error": {"message": "1024 wait", "code": "overloaded"}}'


async def request_of(reader: asyncio.StreamReader) -> tuple[str, dict[str, object]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return head, json.loads(await reader.readexactly(length) or b"{}")


@asynccontextmanager
async def served(folder: Path, handler: Handler) -> AsyncIterator[HttpTransport]:
    path = str(folder / "s.sock")
    server = await asyncio.start_unix_server(handler, path)
    transport = HttpTransport(f"unix:{path}", Pacer(), model="m", key="secret", timeout_s=5)
    yield transport
    await transport.close()
    server.close()


async def answered(folder: Path, *answers: bytes) -> tuple[list[Record], int]:
    """Requests one after the other, each answered by the next bytes; b"" hangs up. The connections used."""
    left, connections = iter(answers), 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while True:
                await request_of(reader)
                if not (answer := next(left)):
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with served(folder, handler) as transport:
        records = []
        for _ in range(sum(bool(answer) for answer in answers)):
            record = Record("", 0)
            await transport.send({"prompt": [1], "max_tokens": 4}, record)
            record.end(1)
            records.append(record)
            await asyncio.sleep(0)
        return records, connections


async def test_a_whole_answer_and_the_server_s_count(tmp_path: Path) -> None:
    (record,), _ = await answered(tmp_path, chunked(TEXT, TEXT, USAGE, DONE))
    assert (record.error, record.text, len(record.chunks_us)) == ("", "aa", 2)
    assert (record.usage, record.output_tokens, record.cached_tokens) == ((9, 4), 4, None)


async def test_a_connection_is_used_again(tmp_path: Path) -> None:
    whole = chunked(TEXT, DONE)
    records, connections = await answered(tmp_path, whole, whole, whole)
    assert [record.error for record in records] == ["", "", ""]
    assert connections == 1


async def test_a_kept_connection_that_has_gone_is_no_failure(tmp_path: Path) -> None:
    whole = chunked(TEXT, DONE)
    records, connections = await answered(tmp_path, whole, b"", whole)
    assert [record.error for record in records] == ["", ""]
    assert connections == 2


async def test_an_answer_to_the_end_of_the_connection(tmp_path: Path) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK + b"connection: close\r\n\r\n" + TEXT + DONE)
        writer.close()

    async with served(tmp_path, handler) as transport:
        record = Record("", 0)
        await transport.send({"prompt": [1], "max_tokens": 4}, record)
    assert (record.error, record.text) == ("", "a")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (chunked(TEXT, event(error={"code": 500, "message": "lost"})), "500 lost"),
        (chunked(TEXT), "the stream ended without [DONE]"),
        (chunked(b"data: {nonsense\n\n", DONE), "an event is not JSON: b'{nonsense'"),
        (chunked(b"data: 5\n\n", DONE), "an event is no object: b'5'"),
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 57\r\n\r\n" + OVERLOADED, "429 overloaded 1024 wait"),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\noops", "502 oops"),
        (b"gibberish\r\n\r\n", "the answer is not HTTP"),
    ],
)  # fmt: skip
async def test_failure_is_reported(tmp_path: Path, answer: bytes, error: str) -> None:
    (record,), _ = await answered(tmp_path, answer)
    assert record.error.startswith(error)
    assert not record.good


async def test_a_server_that_breaks_off(tmp_path: Path) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(chunked(TEXT)[:-5])
        writer.close()

    async with served(tmp_path, handler) as transport:
        record = Record("", 0)
        await transport.send({"prompt": [1], "max_tokens": 4}, record)
    assert record.error.startswith("the connection ended before the answer did")


async def test_absent_server_is_an_error(tmp_path: Path) -> None:
    transport = HttpTransport(f"unix:{tmp_path}/none", Pacer(), model="m")
    record = Record("", 0)
    await transport.send({"prompt": [1]}, record)
    assert "No such file" in record.error
    with pytest.raises(SetupError, match="names no model at /v1/models"):
        await HttpTransport(f"unix:{tmp_path}/none", Pacer()).find_model()


async def test_request_has_the_expected_body(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await request_of(reader))
        writer.write(chunked(TEXT, DONE))
        writer.close()

    async with served(tmp_path, handler) as transport:
        await transport.send({"messages": [], "max_tokens": 4}, Record("", 0))
        await transport.send({"prompt": "p"}, Record("", 0))
    (head, chat), (other, completion) = asked
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "\r\nauthorization: Bearer secret\r\n" in head
    assert other.startswith("POST /v1/completions HTTP/1.1\r\n")
    more = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    assert (chat, completion) == ({"messages": [], "max_tokens": 4, **more}, {"prompt": "p", **more})


@pytest.mark.parametrize("size", [1, 2, 7, 1_000])
def test_events_however_the_bytes_are_cut(size: int) -> None:
    stream = b': ping\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    events, found = Events(), list[bytes]()
    for start in range(0, len(stream), size):
        found += events.feed(stream[start : start + size])
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize(
    ("choice", "counts"),
    [
        ({"text": "x"}, True),
        ({"delta": {"content": "x"}}, True),
        ({"delta": {"reasoning_content": "x"}}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"text": "", "finish_reason": "stop"}, False),
    ],
)
def test_only_text_is_a_token(choice: dict[str, object], counts: bool) -> None:
    record = Record("", 0)
    openai_chunks.on_data(json.dumps({"choices": [choice]}).encode(), record, 5)
    assert record.chunks_us == ([5] if counts else [])


def test_a_native_stream_that_starts_over_counts_what_is_new() -> None:
    def delta(first: int, count: int, text: str) -> dict[str, object]:
        return {"type": "delta", "choices": [{"first": first, "count": count, "text": text}]}

    record = Record("", 0)
    frames = [
        delta(0, 1, "a"),
        delta(1, 2, "bc"),
        {"type": "accepted"},
        delta(0, 2, "ab"),
        delta(2, 3, "cde"),
    ]
    for now_us, frame in enumerate(frames):
        take_frame(frame, record, now_us)
    assert (record.chunks_us, record.chunk_tokens) == ([0, 1, 4], 5)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000/v1", Address("h", 8000, "")),
        ("http://h", Address("h", 80, "")),
        ("https://h/api/v1/", Address("h", 443, "/api", tls=True)),
        ("unix:/tmp/x", Address("localhost", 0, "", path="/tmp/x")),
    ],
)
def test_addresses_are_parsed(url: str, address: Address) -> None:
    assert Address.of(url) == address


def test_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(BadRequest, match="'h:80' is no URL of a server"):
        Address.of("h:80")
