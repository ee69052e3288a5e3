"""Requests with logits processors through all five services, on the simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.pipeline.five_actors import Connect, Pipeline

from shared.errors import BadRequest, EngineError

CHAT: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "seed": 7,
    "ignore_eos": True,
}
PLUGINS = "wait=services.executor.sampling.logits_processors:Wait,breaks=support.executor.host_plugins:Breaks"


@pytest.fixture
async def pipeline(connect: Connect, fleet: str) -> AsyncIterator[Pipeline]:
    running = await Pipeline.start(connect, fleet, logits_processors=PLUGINS)
    yield running
    await running.stop()


def asking(*processors: object, **more: object) -> dict[str, Any]:
    return {**CHAT, "logits_processors": list(processors), **more}


async def text_of(pipeline: Pipeline, body: dict[str, Any]) -> str:
    reply = await pipeline.client.complete(body)
    text: str = reply["choices"][0]["message"]["content"]
    return text


async def test_processors_change_when_not_what(pipeline: Pipeline) -> None:
    bodies = [{**CHAT, "seed": seed} for seed in range(6)]
    alone = [await text_of(pipeline, body) for body in bodies]
    waiting = [body | {"logits_processors": ["wait"]} if i % 2 else body for i, body in enumerate(bodies)]
    assert await asyncio.gather(*(text_of(pipeline, body) for body in waiting)) == alone
    await pipeline.assert_idle()


async def test_a_name_that_is_not_listed_is_the_clients_error(pipeline: Pipeline) -> None:
    with pytest.raises(
        BadRequest, match="'weight' is not one of this fleet; there is breaks, wait"
    ) as caught:
        await pipeline.client.complete(asking("weight"))
    assert caught.value.param == "logits_processors"


async def test_a_processor_that_fails_ends_its_request_and_no_other(pipeline: Pipeline) -> None:
    wanted = await text_of(pipeline, CHAT)
    broken = asking({"name": "breaks", "args": {"at": 3}})
    unbuilt = asking("breaks")
    first, second, *others = await asyncio.gather(
        *(text_of(pipeline, body) for body in (broken, unbuilt, CHAT, asking("wait"), CHAT)),
        return_exceptions=True,
    )
    assert isinstance(first, EngineError)
    assert "logits processor breaks: RuntimeError: no more words" in first.message
    assert isinstance(second, EngineError)
    assert "logits processor breaks: KeyError: 'at'" in second.message
    assert others == [wanted] * 3
    assert pipeline.status("executor")["failed_steps"] == 0
    await pipeline.assert_idle()
