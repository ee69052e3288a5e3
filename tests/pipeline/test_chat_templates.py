"""A second turn of an agent over HTTP, by templates of each shape: all of it is in the prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway
from support.template_shapes import SHAPES

from shared.nats import subjects

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")

TENANT = subjects.DEFAULT_TENANT
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "zqabout", "parameters": PARAMETERS},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "zqulm"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": "zqrules"},
    {"role": "user", "content": [{"type": "text", "text": "zqone"}, {"type": "text", "text": "zqtwo"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "zqrain"},
    {"role": "user", "content": "zqthen"},
]
WORDS = ("zqabout", "zqrules", "zqone", "zqtwo", "zqulm", "zqrain", "zqthen")


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    settings = {"backend": "torch", "dtype": "f32", "max_context": 1024, "kv_blocks": 200}
    running = await Pipeline.start(connect, "templates", trust_request_chat_template=True, **settings)
    yield running
    await running.assert_idle()
    await running.stop()


@whole_file
async def url(pipeline: Pipeline) -> AsyncIterator[str]:
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    yield url
    await remove_gateway(pipeline)


@pytest.mark.parametrize("shape", SHAPES)
async def test_tools_calls_and_results_reach_the_model(shape: str, pipeline: Pipeline, url: str) -> None:
    asked = {"messages": TURNS, "tools": [WEATHER], "chat_template": SHAPES[shape]}
    async with httpx.AsyncClient() as client:
        body = {"model": MODEL, "max_tokens": 1, **asked}
        answer = await client.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    ask = pipeline.client.request
    found = await ask(subjects.tokenize(TENANT, MODEL), asked)
    assert answer.json()["usage"]["prompt_tokens"] == found["count"]
    text = (await ask(subjects.detokenize(TENANT, MODEL), {"tokens": found["tokens"]}))["text"]
    assert [word for word in WORDS if word not in text] == []


async def test_status_names_how_calls_are_read(pipeline: Pipeline) -> None:
    status = pipeline.status("tokenizer")
    assert (status["answer_format"], status["calls"]) == ("hermes", "written by headrace")
