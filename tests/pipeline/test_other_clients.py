"""The unmodified clients of other APIs against a gateway and a real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import ollama
import pytest
import pytest_asyncio
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

if TYPE_CHECKING:  # a second of imports, which only one worker needs
    from anthropic import AsyncAnthropic

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
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=url, api_key="any", max_retries=0, timeout=200) as client:
        yield client


async def test_anthropic_client_reads_plain_and_streamed_answers(claude: AsyncAnthropic) -> None:
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


async def test_anthropic_client_calls_tools(claude: AsyncAnthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
        "extra_body": GREEDY,
        "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
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
        **{
            **asked,
            "messages": [*asked["messages"], *turns],
            "tool_choice": {"type": "none"},
            "max_tokens": 9,
        }
    )
    assert [block.type for block in after.content] == ["text"]


async def test_anthropic_client_raises_its_errors(
    claude: AsyncAnthropic, pipeline: Pipeline, tmp_path: Path
) -> None:
    import anthropic

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
    async with anthropic.AsyncAnthropic(base_url=url, api_key="one", max_retries=0) as known:
        assert (await known.messages.create(**asked)).usage.output_tokens == 5
    async with anthropic.AsyncAnthropic(base_url=url, api_key="two", max_retries=0) as unknown:
        with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
            await unknown.messages.create(**asked)
    await remove_gateway(pipeline, "gateway-2")


# ---- ollama ---------------------------------------------------------------------------------------

OPTIONS: Any = {"temperature": 0, "num_predict": 30, "num_ctx": 4096, "repeat_penalty": 1.0}


@each_test
async def llama(url: str) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=url)


async def test_ollama_client_chats_and_generates(llama: ollama.AsyncClient) -> None:
    asked: Any = {"model": f"{MODEL}:latest", "options": OPTIONS}
    whole = await llama.chat(**asked, messages=QUESTION)
    assert "Paris" in (whole.message.content or "")
    assert (whole.model, whole.done, whole.done_reason) == (MODEL, True, "stop")
    assert whole.prompt_eval_count is not None
    assert whole.total_duration is not None
    assert whole.eval_duration is not None
    assert whole.total_duration >= whole.eval_duration > 1_000  # nanoseconds
    parts = [part async for part in await llama.chat(**asked, messages=QUESTION, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, "stop")
    made = await llama.generate(**asked, prompt=QUESTION[0]["content"])
    assert made.response == whole.message.content
    raw = await llama.generate(model=MODEL, options={"num_predict": 3}, prompt="The sea", raw=True)
    assert (raw.done_reason, raw.eval_count, raw.prompt_eval_count) == ("length", 3, 2)
    pieces = [p async for p in await llama.generate(model=MODEL, prompt="The sea", raw=True, stream=True)]
    assert all(piece.response for piece in pieces[:-1])


async def test_ollama_client_loads_and_gets_reasoning(llama: ollama.AsyncClient) -> None:
    empty = await llama.generate(model=MODEL)
    assert (empty.model, empty.response, empty.done, empty.done_reason) == (MODEL, "", True, "load")
    unloaded = [part async for part in await llama.generate(model=MODEL, stream=True, keep_alive=0)]
    assert [part.done_reason for part in unloaded] == ["unload"]
    listened = await llama.chat(model=MODEL, messages=[])
    assert (listened.message.role, listened.done_reason) == ("assistant", "load")
    with pytest.raises(ollama.ResponseError, match="llama9") as unknown:
        await llama.generate(model="llama9")
    assert unknown.value.status_code == 404
    levels: tuple[Any, ...] = (True, False, "low")
    answers = [await llama.chat(model=MODEL, messages=QUESTION, options=OPTIONS, think=t) for t in levels]
    assert all(
        "Paris" in (answer.message.content or "") for answer in answers
    )  # its template has no such variable


async def test_ollama_client_uses_formats_and_tools(llama: ollama.AsyncClient) -> None:
    options = {**OPTIONS, "num_predict": 60}
    weather: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
    formed = await llama.chat(model=MODEL, messages=weather, format=SCHEMA, options=options)
    assert json.loads(formed.message.content or "").keys() == {"city", "days"}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    call: Any = {"function": {"name": "weather", "arguments": {"city": "Oslo", "days": 1}}}
    turns: Any = [
        *weather,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    after = await llama.chat(model=MODEL, messages=turns, tools=[tool], options={**options, "num_predict": 9})
    assert after.done


async def test_ollama_client_lists_models_and_raises_errors(llama: ollama.AsyncClient) -> None:
    listed = await llama.list()
    assert [model.model for model in listed.models] == [MODEL]
    assert [model.name for model in (await llama.ps()).models] == [MODEL]
    shown = await llama.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["headrace.context_length"] == 512
    for asked in (
        {"model": "llama9", "messages": QUESTION},
        {"model": "llama9", "messages": QUESTION, "stream": True},
    ):
        with pytest.raises(ollama.ResponseError, match="llama9") as unknown:
            found = await llama.chat(**asked)  # type: ignore[call-overload]  # a table of them
            [part async for part in found]
        assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"`options\.temperature`: "):
        await llama.chat(model=MODEL, messages=QUESTION, options={"temperature": 3})


async def test_ignored_options_of_ollama_are_named_in_a_header(url: str) -> None:
    options = {"num_predict": 2, "mirostat": 2, "tfs_z": 0.5}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for stream in (False, True):
            asked = {"model": MODEL, "prompt": "Hello", "stream": stream, "options": options}
            answer = await http.post("/api/generate", json=asked)
            assert answer.status_code == 200
            assert answer.headers["headrace-ignored"] == "options.mirostat, options.tfs_z"
        plain = await http.post("/api/generate", json={"model": MODEL})
        assert "headrace-ignored" not in plain.headers


async def test_ollamas_own_examples_name_no_content_type(url: str) -> None:
    asked = json.dumps({"model": MODEL, "prompt": "Hello", "stream": False, "options": {"num_predict": 3}})
    form = {"content-type": "application/x-www-form-urlencoded"}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post("/api/generate", content=asked, headers=form)
        assert (answer.status_code, answer.json()["done"]) == (200, True)
        of_a_page = {**form, "origin": "http://elsewhere.example"}
        assert (await http.post("/api/generate", content=asked, headers=of_a_page)).status_code == 403
        assert (await http.post("/v1/completions", content=asked, headers=form)).status_code == 415
