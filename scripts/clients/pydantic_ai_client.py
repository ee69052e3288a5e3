# pip: pydantic-ai-slim[openai]
"""pydantic-ai: an agent with text, and one with a typed answer."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(
    os.environ["MODEL"], provider=OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="any")
)
settings = {"temperature": 0, "max_tokens": 100}
answer = Agent(model, model_settings=settings).run_sync("What is the capital of France?")
assert "Paris" in answer.output


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


for output in (City, NativeOutput(City)):
    found = Agent(model, output_type=output, model_settings=settings).run_sync(
        "The capital of France is Paris."
    )
    assert isinstance(found.output, City)
