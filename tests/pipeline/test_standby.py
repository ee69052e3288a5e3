"""Two schedulers for a model: the one without executors stands by, and takes over when the first has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline

from shared.errors import HeadraceError

MODEL = "smollm2-135m-instruct"
REQUESTS = 24


@pytest.fixture
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> object:
        return broker.connect()

    pipeline = await Pipeline.start(connect, "standby")  # type: ignore[arg-type]
    yield pipeline
    await pipeline.stop()


async def ask(pipeline: Pipeline, tokens: int) -> str:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, "seed": 1}
    try:
        answer = await pipeline.client.complete(body, timeout_s=60)
    except HeadraceError as error:
        return f"{error.code} {error.message}"
    return str(answer["choices"][0]["text"])


async def answers(pipeline: Pipeline, tokens: int = 4) -> set[str]:
    return set(await asyncio.gather(*(ask(pipeline, tokens) for _ in range(REQUESTS))))


async def test_standby_scheduler_without_executors_gets_no_request(pipeline: Pipeline) -> None:
    right = await answers(pipeline)
    assert len(right) == 1
    await pipeline.add("scheduler", "scheduler-0")  # the first by its name
    await pipeline.runtimes.pop("tokenizer-1").finish(5)
    await pipeline.add("tokenizer", "tokenizer-1")  # which has seen no scheduler come
    assert await answers(pipeline) == right
    standby = pipeline.runtimes["scheduler-0"].actor.status()
    assert (standby["executors"], standby["measured"]["queue"]["rejected"]) == ({}, {})


async def test_standby_scheduler_takes_over_without_one_503(pipeline: Pipeline) -> None:
    right = await answers(pipeline, 400)
    await pipeline.add("scheduler", "scheduler-2")
    asked = asyncio.ensure_future(answers(pipeline, 400))
    await pipeline.until(lambda: pipeline.status("scheduler")["running"] == REQUESTS)
    first = pipeline.runtimes.pop("scheduler-1")
    assert first._heartbeats is not None
    first._heartbeats.cancel()  # it falls silent without a word
    await first.bus.drain()
    first.bus.publish = lambda *args, **more: None  # type: ignore[method-assign]
    assert await asked == right
    assert await answers(pipeline, 400) == right
    status = pipeline.runtimes["scheduler-2"].actor.status()
    assert [*status["executors"]] == ["executor-1"]
    pipeline.runtimes["scheduler-1"] = pipeline.runtimes.pop("scheduler-2")
    await pipeline.assert_idle()
