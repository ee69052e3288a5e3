# pip: openai-agents
"""openai-agents: an agent over chat completions and over responses, typed answers, a tool, a stream."""

import asyncio
import os

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.agent import StopAtTools
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
settings = ModelSettings(temperature=0, max_tokens=60)
called = []


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "rain"


async def use(kind: type[Model]) -> None:
    """One kind of model, in one event loop."""
    model = kind(model=os.environ["MODEL"], openai_client=AsyncOpenAI(max_retries=0))
    agent = Agent(name="guide", instructions="Answer in a sentence.", model=model, model_settings=settings)
    first = await Runner.run(agent, "What is the capital of France?")
    assert "Paris" in first.final_output
    turn = [*first.to_input_list(), {"role": "user", "content": "Say it again."}]
    assert (await Runner.run(agent, turn)).final_output
    typed = Agent(name="typed", model=model, model_settings=settings, output_type=City)
    assert isinstance((await Runner.run(typed, "The capital of France")).final_output, City)
    one_call = ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False)
    stop = StopAtTools(stop_at_tool_names=["weather"])
    user = Agent(name="user", model=model, model_settings=one_call, tools=[weather], tool_use_behavior=stop)
    assert (await Runner.run(user, "How is the weather in Oslo?")).final_output == "rain"
    run = Runner.run_streamed(agent, "What is the capital of France?")
    async for _ in run.stream_events():
        pass
    assert run.final_output == first.final_output


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    asyncio.run(use(kind))
assert len(called) == 2
