"""The unmodified openai client's Responses API against a gateway and a real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

ASKED: Any = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0}
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")
each_test = pytest_asyncio.fixture(loop_scope="module")


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    settings = {"backend": "torch", "dtype": "f32", "max_context": 512, "kv_blocks": 200}
    running = await Pipeline.start(connect, "responses", **settings)
    yield running
    await running.assert_idle()
    await running.stop()


@each_test
async def client(pipeline: Pipeline) -> AsyncIterator[AsyncOpenAI]:
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=200) as client:
        yield client
    await remove_gateway(pipeline)


async def test_response_is_the_same_plain_and_streamed(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**ASKED, max_output_tokens=30, metadata={"a": "b"})
    assert (whole.status, whole.metadata, whole.error) == ("completed", {"a": "b"}, None)
    assert "Paris" in whole.output_text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    async with client.responses.stream(**ASKED, max_output_tokens=30) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted({*numbers})
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": ASKED["input"]}], temperature=0, max_tokens=30
    )
    assert chat.choices[0].message.content == whole.output_text
    cut = await client.responses.create(**ASKED, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


async def test_structured_output_and_log_probabilities(client: AsyncOpenAI) -> None:
    class City(BaseModel):
        name: str = Field(max_length=10)

    parsed = await client.responses.parse(**ASKED, text_format=City, max_output_tokens=40)
    assert isinstance(parsed.output_parsed, City)
    shown = await client.responses.create(
        **ASKED, max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2
    )
    (item,) = shown.output
    assert item.type == "message"
    (text,) = item.content
    assert text.type == "output_text"
    assert text.logprobs is not None
    assert "".join(entry.token for entry in text.logprobs) == text.text
    assert [len(entry.top_logprobs) for entry in text.logprobs] == [2] * 4
    events = [
        event
        async for event in await client.responses.create(
            **ASKED, max_output_tokens=4, top_logprobs=2, stream=True
        )
    ]
    streamed = [e for event in events if event.type == "response.output_text.delta" for e in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in text.logprobs]


async def test_response_calls_a_tool_and_reads_its_result(client: AsyncOpenAI) -> None:
    asked: Any = {**ASKED, "input": [{"role": "user", "content": "How is the weather in Oslo?"}]}
    asked |= {"tools": [WEATHER], "max_output_tokens": 60}
    whole = await client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments).keys()) == ("weather", {"city"})
    async with client.responses.stream(
        **asked, tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False
    ) as stream:
        final = await stream.get_final_response()
    (streamed,) = final.output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain, 5 degrees"}
    after = await client.responses.create(
        **{**asked, "input": [*asked["input"], *whole.output, result]}, tool_choice="none"
    )
    assert [item.type for item in after.output] == ["message"]


async def test_errors_are_the_clients_own(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools of type `web_search` do not run here") as bad:
        await client.responses.create(**ASKED, tools=[{"type": "web_search"}])
    assert bad.value.param == "tools"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(**{**ASKED, "model": "gpt-9"}, stream=True)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(**{**ASKED, "input": "word " * 900})
    assert long.value.code == "context_length_exceeded"
