"""The known server's HTTP side: a completion or a chat as server-sent events, chunked, kept alive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

Body = dict[str, Any]
Answer = Callable[[Body], AsyncGenerator[int]]
BACKLOG = 2_048  # connections that come at once
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def serve_http(answer: Answer, path: str, model: str) -> asyncio.Server:
    """Listen on a Unix socket."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                method, target, body = await _request(reader)
                if method == "GET":
                    _send_models(writer, target, model)
                else:
                    await _stream(writer, answer, body)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, asyncio.CancelledError):
            writer.close()  # it has gone, or asks for what is no number, or we go

    return await asyncio.start_unix_server(connected, path, backlog=BACKLOG)


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, Body]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    data = await reader.readexactly(int(headers.get("content-length", "0")))
    return method, target, json.loads(data) if data else {}


def _send_models(writer: asyncio.StreamWriter, target: str, model: str) -> None:
    found = target == "/v1/models"
    data = json.dumps({"data": [{"id": model}]}).encode() if found else b"{}"
    status = "200 OK" if found else "404 Not Found"
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


async def _stream(writer: asyncio.StreamWriter, answer: Answer, body: Body) -> None:
    writer.write(HEAD)
    chat, tokens = "messages" in body, 0
    if chat:
        _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    async for number in answer(body):
        text = f"w{number} "
        _event(
            writer, {"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}]}
        )
        tokens += 1
    last: Body = {"delta": {}} if chat else {"text": ""}
    _event(writer, {"choices": [{"index": 0, **last, "finish_reason": "length"}]})
    if body.get("stream_options", {}).get("include_usage"):
        _event(writer, {"choices": [], "usage": usage(body, tokens)})
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def usage(body: Body, tokens: int) -> Body:
    """What the server counted: half of every prompt was cached."""
    prompt = prompt_tokens(body)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }


def prompt_tokens(body: Body) -> int:
    """Ids, or words: this server's tokens are words."""
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    return len(body["prompt"])


def _event(writer: asyncio.StreamWriter, body: Body) -> None:
    _chunk(writer, b"data: " + json.dumps(body).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
