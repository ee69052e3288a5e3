# pip: instructor
"""instructor: a pydantic model by tools and by a JSON schema."""

import os

import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
    city = client.chat.completions.create(
        model=os.environ["MODEL"],
        response_model=City,
        max_tokens=120,
        temperature=0,
        max_retries=0,
        messages=[{"role": "user", "content": "Paris is the capital of France."}],
    )
    assert isinstance(city, City), mode
