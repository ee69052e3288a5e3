"""The unmodified clients of other APIs against a gateway and a real model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
GREEDY = {"temperature": 0}  # the client itself has no such argument any more
WEATHER: Any = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}

pytestmark = pytest.mark.asyncio(loop_scope="module")
whole_file = pytest_asyncio.fixture(scope="module", loop_scope="module")
each_test = pytest_asyncio.fixture(loop_scope="module")


@whole_file
async def pipeline() -> AsyncIterator[Pipeline]:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    settings = {"backend": "torch", "dtype": "f32", "max_context": 512, "kv_blocks": 200}
    running = await Pipeline.start(connect, "clients", **settings)
    yield running
    await running.assert_idle()
    await running.stop()


@whole_file
async def url(pipeline: Pipeline) -> AsyncIterator[str]:
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    yield url
    await remove_gateway(pipeline)


# ---- anthropic ------------------------------------------------------------------------------------


@each_test
async def claude(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="any", max_retries=0, timeout=200) as client:
        yield client


async def test_anthropic_plain_and_streamed(claude: AsyncAnthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 30, "messages": QUESTION, "extra_body": GREEDY}
    whole = await claude.messages.create(**asked)
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
    (block,) = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    async with claude.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert (text, final.content[0].type, final.stop_reason) == (block.text, "text", "end_turn")
    assert final.usage.output_tokens == whole.usage.output_tokens
    cached = whole.usage.cache_read_input_tokens or 0
    counted = await claude.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == whole.usage.input_tokens + cached
    longer = await claude.messages.count_tokens(
        model=MODEL, messages=QUESTION, system="Answer in one word, as a pirate would."
    )
    assert longer.input_tokens != counted.input_tokens
    stopped = await claude.messages.create(**asked, stop_sequences=["is", "Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "is")


async def test_anthropic_tools(claude: AsyncAnthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
        "extra_body": GREEDY,
        "tools": [WEATHER],
        "tool_choice": {"type": "any"},
    }
    whole = await claude.messages.create(**asked)
    (used,) = whole.content
    assert used.type == "tool_use"
    assert (whole.stop_reason, used.name, used.input.keys()) == ("tool_use", "weather", {"city", "days"})
    async with claude.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    (streamed,) = final.content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input, final.stop_reason) == ("weather", used.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "rain, 5 degrees"}
    turns = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = await claude.messages.create(
        **{**asked, "messages": [*asked["messages"], *turns], "tool_choice": {"type": "none"}}
    )
    assert [block.type for block in after.content] == ["text"]


async def test_anthropic_errors(claude: AsyncAnthropic, pipeline: Pipeline, tmp_path: Path) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 5, "messages": QUESTION}
    with pytest.raises(anthropic.BadRequestError, match="blocks of type `image` are not supported") as bad:
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        await claude.messages.create(**{**asked, "messages": [{"role": "user", "content": [image]}]})
    assert bad.value.body["type"] == "error"  # type: ignore[index]  # typed as object
    with pytest.raises(anthropic.BadRequestError, match="`temperature`"):
        await claude.messages.create(**asked, extra_body={"temperature": 5})
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**{**asked, "model": "claude"})
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**{**asked, "model": "claude"}, stream=True)
    keys = tmp_path / "keys"
    keys.write_text("acme one\n")
    url = await add_gateway(pipeline, "gateway-2", keys)
    async with AsyncAnthropic(base_url=url, api_key="one", max_retries=0) as known:
        assert (await known.messages.create(**asked)).usage.output_tokens == 5
    async with AsyncAnthropic(base_url=url, api_key="two", max_retries=0) as unknown:
        with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
            await unknown.messages.create(**asked)
    await remove_gateway(pipeline, "gateway-2")
