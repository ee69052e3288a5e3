"""A client over HTTP against a server that sends what a test sets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loadtest.clients import Ask, Outcome, Refused, Reset, _Spy, over_http
from shared.nats.interface import Delivery

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(body: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


def text(index: int, content: str) -> bytes:
    return event({"choices": [{"index": index, "delta": {"content": content}}]})


async def asked(response: bytes, *, stream: bool, outcome: Outcome | None = None) -> Outcome:
    """What a client makes of these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        assert body.get("stream_options") == ({"include_usage": True} if stream else None)
        for at in range(0, len(response), 50):
            writer.write(response[at : at + 50])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    outcome = outcome or Outcome(Ask({"seed": 1, "stream": stream}))
    try:
        await over_http(await asyncio.open_connection("127.0.0.1", port), outcome.ask, outcome)
    finally:
        server.close()
    return outcome


async def test_a_stream_is_read_to_its_end() -> None:
    usage = event({"choices": [], "usage": {"completion_tokens": 3}})
    whole = STREAM_HEAD + text(0, "ab") + text(1, "x") + text(0, "c") + usage
    outcome = await asked(whole + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", stream=True)
    assert (outcome.answer, outcome.accepted) == (({0: "abc", 1: "x"}, 3), True)


async def test_a_plain_answer_is_read() -> None:
    body = {"choices": [{"index": 0, "message": {"content": "ab"}}], "usage": {"completion_tokens": 2}}
    data = json.dumps(body).encode()
    outcome = await asked(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data, stream=False)
    assert (outcome.answer, outcome.accepted) == (({0: "ab"}, 2), False)


def refused() -> bytes:
    data = json.dumps({"error": {"message": "later", "code": "unavailable"}}).encode()
    return b"HTTP/1.1 503 X\r\nretry-after: 2\r\ncontent-length: %d\r\n\r\n" % len(data) + data


async def test_refusal_has_the_time_to_retry() -> None:
    with pytest.raises(Refused, match="later") as error:
        await asked(refused(), stream=True)
    assert (error.value.code, error.value.wait_s) == (503, 2.0)


@pytest.mark.parametrize(("word", "code"), [("unavailable", 503), ("overloaded", 429), ("engine_error", 500)])
async def test_an_error_in_the_middle_is_one_of_an_accepted_request(word: str, code: int) -> None:
    outcome = Outcome(Ask({"seed": 1, "stream": True}))
    response = text(0, "ab") + event({"error": {"message": "gone", "code": word}})
    with pytest.raises(Refused, match="gone") as error:
        await asked(STREAM_HEAD + response, stream=True, outcome=outcome)
    assert (outcome.accepted, outcome.texts, error.value.code) == (True, {0: "ab"}, code)


@pytest.mark.parametrize(
    "cut", [b"", STREAM_HEAD, STREAM_HEAD + text(0, "ab"), STREAM_HEAD + text(0, "ab") + b"0\r\n\r\n"]
)
async def test_a_connection_that_ends_early_is_a_reset(cut: bytes) -> None:
    with pytest.raises(Reset):
        await asked(cut, stream=True)


def test_a_frame_that_comes_twice_is_counted_and_a_new_beginning_is_none() -> None:
    spy = _Spy()

    def frame(kind: str, number: int, attempt: int = 1, to: str = "a") -> None:
        data = json.dumps({"type": kind, "frame": number, "attempt": attempt}).encode()
        spy.on_reply(Delivery(to, data, "", {}))

    for kind, number in (("accepted", 0), ("delta", 1), ("delta", 2), ("accepted", 0), ("delta", 1)):
        frame(kind, number)
    for attempt, to in ((2, "a"), (1, "b")):
        frame("delta", 1, attempt, to)
    spy.on_reply(Delivery("a", b"not json", "", {}))
    spy.on_reply(Delivery("a", b"[1]", "", {}))
    assert spy.repeated == 0
    frame("delta", 1)
    frame("done", 3)
    frame("done", 3)
    assert spy.repeated == 2
