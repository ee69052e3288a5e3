"""A streamed answer without text for long: its head and its pings go out, and real clients ignore them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import ollama
import openai
import pytest
from openai import AsyncOpenAI
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

PINGS = 3
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
CHAT: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True}
ASKED: dict[str, tuple[dict[str, Any], str, bytes]] = {  # path: body, media type, ping
    "/v1/chat/completions": (CHAT, "text/event-stream", b": ping\n"),
    "/v1/completions": ({"model": MODEL, "prompt": "x", "stream": True}, "text/event-stream", b": ping\n"),
    "/v1/responses": ({"model": MODEL, "input": "x", "stream": True}, "text/event-stream", b": ping\n"),
    "/v1/messages": (CHAT, "text/event-stream", b'event: ping\ndata: {"type":"ping"}\n\n'),
    "/api/chat": (CHAT | {"max_tokens": None}, "application/x-ndjson", b" "),
    "/api/generate": ({"model": MODEL, "prompt": "x"}, "application/x-ndjson", b" "),
}


LIMITS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"max_output_tokens": 16},
    "/api/chat": {"options": {"num_predict": 4}},
    "/api/generate": {"options": {"num_predict": 4}},
}
TEXT = {  # what each piece of text has
    "/v1/chat/completions": b'"delta":{"content":',
    "/v1/completions": b'"text":',
    "/v1/responses": b"response.output_text.delta",
    "/v1/messages": b'"text_delta"',
    "/api/chat": b'"content":',
    "/api/generate": b'"response":',
}


@pytest.fixture
async def zero() -> AsyncIterator[tuple[Pipeline, str]]:
    """A pipeline without an executor, for which requests wait, and the URL of its gateway."""
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    pipeline = await Pipeline.start(connect, "silent", cold_start_wait_s=300)
    await pipeline.runtimes.pop("executor-1").finish(5)
    url = await add_gateway(pipeline, ping_s=0.1)
    await healthy(pipeline)
    yield pipeline, url
    await remove_gateway(pipeline)
    await pipeline.stop()


async def test_the_head_and_pings_come_before_the_first_token_on_each_api(zero: tuple[Pipeline, str]) -> None:
    pipeline, url = zero
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def waits(path: str) -> None:
            body, media, ping = ASKED[path]
            async with http.stream("POST", path, json=body) as answer:
                assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, media)
                came, pieces = b"", answer.aiter_raw()
                while len(came) < PINGS * len(ping):
                    came += await anext(pieces)
                assert came == ping * (len(came) // len(ping)), path

        await asyncio.gather(*map(waits, ASKED))
        refused = await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1_000_000})
        assert refused.status_code == 400, "the status of a refusal before the request is accepted"
    await pipeline.add("executor", "executor-1")


async def openai_chat(url: str) -> str:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(**CHAT)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def openai_response(url: str) -> str:
    """Its events have ids, which the client keeps for an event without one."""
    asked: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "stream": True}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.responses.create(**asked)
        return "".join([each.delta async for each in stream if each.type == "response.output_text.delta"])


async def claude(url: str) -> str:
    from anthropic import AsyncAnthropic

    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    client = AsyncAnthropic(base_url=url, api_key="any", max_retries=0)
    async with client, client.messages.stream(**asked) as stream:
        return "".join([text async for text in stream.text_stream])


async def llama(url: str) -> str:
    stream = await ollama.AsyncClient(url).chat(MODEL, MESSAGES, stream=True, options={"num_predict": 4})
    return "".join([part.message.content or "" async for part in stream])


CLIENTS: list[Callable[[str], Awaitable[str]]] = [openai_chat, openai_response, claude, llama]


async def test_clients_ignore_the_pings_before_and_between_chunks(zero: tuple[Pipeline, str]) -> None:
    pipeline, url = zero
    early = [asyncio.create_task(client(url)) for client in CLIENTS]  # type: ignore[arg-type]  # coroutines
    http = httpx.AsyncClient(base_url=url, timeout=60)
    async with http, http.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
        pieces, came = answer.aiter_raw(), b""
        while came.count(b"ping") < PINGS:
            came += await anext(pieces)
    await pipeline.add("executor", "executor-1")
    texts = await asyncio.gather(*early)
    assert all(texts), texts
    await pipeline.assert_idle()


async def test_pings_come_in_the_middle_of_a_text_on_each_api_and_change_no_text() -> None:
    """With steps that take longer than `http_ping_s`."""
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    pipeline = await Pipeline.start(connect, "slow", sim="step=400000,token=0")
    url = await add_gateway(pipeline, ping_s=0.1)
    await healthy(pipeline)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def read(path: str) -> None:
            body, _, ping = ASKED[path]
            raw = (await http.post(path, json={**body, **LIMITS.get(path, {"max_tokens": 4})})).content
            assert raw.count(ping) >= PINGS, path
            first = raw.index(TEXT[path])
            assert ping in raw[first : raw.rindex(TEXT[path])], f"{path}: none between two pieces of text"

        texts = await asyncio.gather(*(client(url) for client in CLIENTS), *map(read, ASKED))
    assert all(texts[: len(CLIENTS)]), texts
    await pipeline.assert_idle()
    await remove_gateway(pipeline)
    await pipeline.stop()


async def test_an_error_after_the_head_is_the_last_event_of_each_api(zero: tuple[Pipeline, str]) -> None:
    pipeline, url = zero
    late = {"timeout_s": 1.0}
    ends = {
        "/v1/chat/completions": lambda last: last.removeprefix("data: "),
        "/v1/responses": lambda last: last.partition("data: ")[2],
        "/v1/messages": lambda last: last.removeprefix("event: error\ndata: "),
        "/api/chat": lambda last: last,
    }
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def fails(path: str) -> Any:
            own = {} if path in ("/v1/messages", "/api/chat") else late
            async with http.stream("POST", path, json={**ASKED[path][0], **own}) as answer:
                assert answer.status_code == 200
                if not own:  # these two have no field for a time limit
                    pipeline.client.cancel(answer.headers["x-request-id"])
                text = (await answer.aread()).decode().strip()
            return json.loads(ends[path](text.split("\n\n")[-1].rpartition(": ping\n")[2]))

        chat, response, message, line = await asyncio.gather(*map(fails, ends))
    assert ("time" in chat["error"]["message"], response["type"]) == (True, "response.failed")
    assert (message["type"], "cancelled" in message["error"]["message"]) == ("error", True)
    assert "cancelled" in line["error"]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="time"):
            async for _ in await client.chat.completions.create(**CHAT, extra_body=late):
                pass
    await pipeline.add("executor", "executor-1")
