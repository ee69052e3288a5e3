"""A fleet without an executor, whose scheduler keeps requests until one joins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "seed": 7,
    "ignore_eos": True,
}


@asynccontextmanager
async def at_zero(cold_start_wait_s: float) -> AsyncIterator[tuple[Pipeline, httpx.AsyncClient]]:
    """A pipeline whose executor has gone, and HTTP to a healthy gateway in front of it."""
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    pipeline = await Pipeline.start(connect, "zero", cold_start_wait_s=cold_start_wait_s)
    await pipeline.runtimes.pop("executor-1").finish(5)
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        yield pipeline, http
    await remove_gateway(pipeline)
    await pipeline.stop()


def waits(pipeline: Pipeline, requests: int) -> bool:
    found: int = pipeline.status("scheduler")["awaiting_executor"]
    return found == requests


async def test_requests_wait_for_the_executor_that_their_number_starts() -> None:
    async with at_zero(300) as (pipeline, http):
        assert (await http.get("/health")).json() == {"status": "ok"}
        post = http.post("/v1/chat/completions", json=CHAT)
        answer = asyncio.create_task(post)
        leaves = asyncio.create_task(pipeline.client.complete(CHAT))
        await pipeline.until(lambda: waits(pipeline, 2))
        metrics = (await http.get("/metrics")).text
        assert "headrace_scheduler_queue_awaiting_executor" in metrics
        leaves.cancel()
        await pipeline.until(lambda: waits(pipeline, 1))
        await pipeline.add("executor", "executor-1")
        reply = (await answer).raise_for_status().json()
        assert reply["usage"]["completion_tokens"] == 12
        await pipeline.assert_idle()


async def test_a_wait_without_an_executor_ends_with_503_and_a_time() -> None:
    async with at_zero(0.1) as (pipeline, http):
        for more in ({}, {"stream": True}):
            reply = await http.post("/v1/chat/completions", json={**CHAT, **more})
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert "no executor" in reply.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200, "the next request would wait, too"
        assert waits(pipeline, 0)
        await pipeline.add("executor", "executor-1")
