"""What the frames and errors of the native API look like on the wire, read with nats-py alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats
from support.running_up import Up

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


async def test_an_error_has_the_service_headers(nc: Nats) -> None:
    reply = await nc.request(SUBJECT, b'{"prompt": "x", "max_tokens": -1}', timeout=60)
    assert reply.headers is not None
    assert reply.headers["Nats-Service-Error-Code"] == "400"
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["param"], error["retryable"]) == (400, "max_tokens", False)
    assert reply.headers["Nats-Service-Error"] == error["message"]


async def test_streams_at_once_have_no_hole_each(nc: Nats) -> None:
    lengths = [1 + 7 * i % 50 for i in range(40)]
    asked = [
        frames_of(nc, {"prompt": f"number {i}", "max_tokens": n, "seed": i}) for i, n in enumerate(lengths)
    ]
    for frames, tokens in zip(await asyncio.gather(*asked), lengths, strict=True):
        assert_whole(frames, tokens)
