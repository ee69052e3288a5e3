# pip: langchain-openai
"""langchain-openai: invoke, stream, tools, structured output."""

import os
import sys

sys.path.pop(0)  # this script has the package's name
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

llm = ChatOpenAI(
    model=os.environ["MODEL"],
    base_url=os.environ["BASE_URL"],
    api_key="any",
    temperature=0,
    max_tokens=60,
    max_retries=0,
)
answer = llm.invoke("What is the capital of France?")
assert "Paris" in answer.content
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in llm.stream("What is the capital of France?")) == answer.content


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


called = llm.bind_tools([weather], tool_choice="weather").invoke("The weather of Paris?")
assert called.tool_calls[0]["name"] == "weather", called


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


found = llm.with_structured_output(City, method="json_schema").invoke("The capital of France")
assert isinstance(found, City)
