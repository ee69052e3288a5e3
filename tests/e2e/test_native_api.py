"""The native API as a stranger uses it: nats-py and json alone, nothing of this project."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats

from tests.e2e.conftest import Up

SUBJECT = "headrace.v1.generate.public.smollm2-135m-instruct"


@pytest.fixture
async def nc(up: Up) -> AsyncIterator[Nats]:
    connection = await nats.connect(up.nats_url)
    yield connection
    await connection.close()


async def frames_of(nc: Nats, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a streaming request; its frames up to the marked last one."""
    inbox = nc.new_inbox()
    replies = await nc.subscribe(inbox)
    await nc.publish(SUBJECT, json.dumps({**body, "stream": True}).encode(), reply=inbox)
    frames = []
    while True:
        message = await replies.next_msg(timeout=60)
        frames.append(json.loads(message.data))
        if message.headers and message.headers.get("Headrace-End") == "1":
            await replies.unsubscribe()
            return frames


def assert_whole(frames: list[dict[str, Any]], tokens: int) -> None:
    """Frames in order, token indices without a hole, one end."""
    assert [f["frame"] for f in frames] == list(range(len(frames)))
    assert [f["type"] for f in frames] == ["accepted", *["delta"] * (len(frames) - 2), "done"]
    position = 0
    for frame in frames[1:-1]:
        (choice,) = frame["choices"]
        assert choice["first"] == position
        position += choice["count"]
    assert position == tokens == frames[-1]["usage"]["completion_tokens"]


async def test_a_plain_request_gets_one_reply(nc: Nats) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    reply = await nc.request(SUBJECT, json.dumps(body).encode(), timeout=60)
    answer = json.loads(reply.data)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["timings"]["total_ms"] > 0


async def test_an_error_has_the_service_headers(nc: Nats) -> None:
    reply = await nc.request(SUBJECT, b'{"prompt": "x", "max_tokens": -1}', timeout=60)
    assert reply.headers is not None
    assert reply.headers["Nats-Service-Error-Code"] == "400"
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["param"], error["retryable"]) == (400, "max_tokens", False)
    assert reply.headers["Nats-Service-Error"] == error["message"]


async def test_a_cancel_ends_the_stream(nc: Nats) -> None:
    inbox = nc.new_inbox()
    replies = await nc.subscribe(inbox)
    body = {"prompt": "x", "max_tokens": 4000, "stream": True, "request_id": "stop-me"}
    await nc.publish(SUBJECT, json.dumps(body).encode(), reply=inbox)
    assert json.loads((await replies.next_msg(timeout=60)).data)["type"] == "accepted"
    await nc.publish("headrace.v1.cancel.public.stop-me", b"")
    while True:
        message = await replies.next_msg(timeout=60)
        if message.headers and message.headers.get("Headrace-End") == "1":
            break
    last = json.loads(message.data)
    assert (last["type"], last["error"]["code"]) == ("error", 499)


async def test_200_streams_at_once_are_whole_and_leave_nothing(nc: Nats) -> None:
    lengths = [1 + 7 * i % 50 for i in range(200)]
    asked = [
        frames_of(nc, {"prompt": f"number {i}", "max_tokens": n, "seed": i}) for i, n in enumerate(lengths)
    ]
    for frames, tokens in zip(await asyncio.gather(*asked), lengths, strict=True):
        assert_whole(frames, tokens)
    await assert_all_free(nc)


async def assert_all_free(nc: Nats) -> None:
    """Every request is forgotten, every block and slot is free."""
    inbox = nc.new_inbox()
    replies = await nc.subscribe(inbox)
    async with asyncio.timeout(30):
        while True:
            await nc.publish("headrace.v1.status", b"", reply=inbox)
            answers = [json.loads((await replies.next_msg(timeout=30)).data) for _ in range(5)]
            scheduler = next(a for a in answers if a["kind"] == "scheduler")
            if scheduler["requests"] == 0:
                break
    for executor in scheduler["executors"].values():
        assert executor["free_blocks"] == executor["blocks"]
        assert executor["free_slots"] == executor["slots"]
        assert (executor["running"], executor["in_flight"]) == (0, 0)
