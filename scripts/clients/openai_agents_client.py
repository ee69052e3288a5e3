# pip: openai-agents
"""openai-agents: an agent over chat completions, with a typed answer."""

import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=AsyncOpenAI(max_retries=0))
settings = ModelSettings(temperature=0, max_tokens=60)
agent = Agent(name="guide", instructions="Answer in a sentence.", model=model, model_settings=settings)
assert "Paris" in Runner.run_sync(agent, "What is the capital of France?").final_output


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


typed = Agent(name="typed", model=model, model_settings=settings, output_type=City)
assert isinstance(Runner.run_sync(typed, "The capital of France").final_output, City)
