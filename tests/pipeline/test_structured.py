"""Structured output and functions on the real model, by the official client, without stopping run-ahead."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Name a city and its weather."}]}
ONE: Any = {"temperature": 0, "max_tokens": 80, "parallel_tool_calls": False}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=8)
    sky: Literal["clear", "cloudy"]


async def test_structured_output_and_functions_follow_their_schemas(fleet: str) -> None:
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    settings = {
        "backend": "torch",
        "dtype": "f32",
        "overlap": "run_ahead",
        "max_context": 512,
        "kv_blocks": 200,
    }
    pipeline = await Pipeline.start(connect, fleet, **settings)
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=200) as client:
        create = client.chat.completions.create
        free, parsed, matched, called, streamed = await asyncio.gather(
            create(**ASK, max_tokens=12, temperature=0),
            client.chat.completions.parse(**ASK, response_format=City, temperature=0, max_tokens=60),
            create(**ASK, extra_body={"structured_outputs": {"regex": "(sun|rain), [0-9]{2}"}}, seed=1, n=2),
            create(**ASK, tools=[WEATHER], tool_choice="required", **ONE),
            create(**ASK, tools=[WEATHER], tool_choice="required", **ONE, stream=True),
        )
        assert free.choices[0].finish_reason == "length"
        city = parsed.choices[0].message.parsed
        assert city is not None
        assert city.sky in ("clear", "cloudy")
        assert all(re.fullmatch("(sun|rain), [0-9]{2}", c.message.content or "") for c in matched.choices)
        (choice,) = called.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        function: Any = choice.message.tool_calls[0]
        arguments = json.loads(function.function.arguments)
        assert arguments.keys() == {"city", "days"}
        deltas = [c.choices[0].delta async for c in streamed]
        assert "".join(delta.content or "" for delta in deltas) == ""
        calls = [call for delta in deltas for call in delta.tool_calls or () if call.function]
        first, *rest = calls
        assert (first.function.name, first.function.arguments) == (function.function.name, "")
        assert first.id
        assert len(rest) > 3
        assert all(call.id is None and call.function.name is None for call in rest)
        assert "".join(call.function.arguments or "" for call in rest) == function.function.arguments
        with pytest.raises(openai.BadRequestError, match="Rule 'nothing'"):
            await create(**ASK, extra_body={"grammar": "root ::= nothing"})
    steps = pipeline.status("scheduler")["measured"]["steps"]
    assert steps["run_ahead"] > 0
    assert steps.get("two_batch", 0) == 0
    await pipeline.assert_idle()
    await remove_gateway(pipeline)
    await pipeline.stop()
