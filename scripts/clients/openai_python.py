# pip: openai
"""openai: chat, stream, tools, schema, errors; responses: plain, stream, background, cancel, go on."""

import json
import os
import time

import openai
from pydantic import BaseModel, Field

client = openai.OpenAI(max_retries=0)
model = os.environ["MODEL"]
asked = [{"role": "user", "content": "What is the capital of France?"}]
whole = client.chat.completions.create(model=model, messages=asked, max_tokens=20, temperature=0)
assert "Paris" in whole.choices[0].message.content
chunks = client.chat.completions.create(
    model=model,
    messages=asked,
    max_tokens=20,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
text, usage = "", None
for chunk in chunks:
    usage = chunk.usage or usage
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
assert text == whole.choices[0].message.content
assert usage.prompt_tokens == whole.usage.prompt_tokens
tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}
called = client.chat.completions.create(
    model=model, messages=asked, tools=[tool], tool_choice="required", max_tokens=80, temperature=0
)
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "weather"
assert set(json.loads(call.function.arguments)) == {"city"}
schema = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=asked,
    max_tokens=40,
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
)
assert isinstance(json.loads(answer.choices[0].message.content)["n"], int)
try:
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 20_000}])
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded", error
else:
    raise AssertionError("a prompt over the context was accepted")
try:
    client.chat.completions.create(model="none", messages=asked)
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
else:
    raise AssertionError("an unknown model was accepted")

plain = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
assert "Paris" in plain.output_text
asked = {"model": model, "input": "What is the capital of France?", "temperature": 0}
with client.responses.stream(**asked) as stream:
    assert sum(event.type == "response.completed" for event in stream) == 1
    assert stream.get_final_response().output_text == plain.output_text


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)


assert client.responses.parse(**asked, text_format=City, max_output_tokens=60).output_parsed.name
weather = {"type": "function", "name": "weather", "parameters": tool["function"]["parameters"]}
used = client.responses.create(**asked, tools=[weather], tool_choice="required", parallel_tool_calls=False)
result = {"type": "function_call_output", "call_id": used.output[0].call_id, "output": "rain"}
told = client.responses.create(
    model=model, input=[{"role": "user", "content": "Weather?"}, *used.output, result], max_output_tokens=20
)
assert told.output_text
more = client.responses.create(
    model=model, input="And of Italy?", previous_response_id=plain.id, max_output_tokens=20, temperature=0
)
assert more.usage.input_tokens > plain.usage.input_tokens
later = client.responses.create(**asked, background=True)
assert later.status == "queued"
while later.status in ("queued", "in_progress"):
    time.sleep(0.1)
    later = client.responses.retrieve(later.id)
assert later.output_text == plain.output_text
had = []
with client.responses.create(**asked, background=True, stream=True) as stream:
    for event in stream:
        had.append(event)
        if len(had) == 8:
            break
had += client.responses.retrieve(had[0].response.id, stream=True, starting_after=had[-1].sequence_number)
assert "".join(e.delta for e in had if e.type == "response.output_text.delta") == plain.output_text
long = client.responses.create(
    model=model, input="Count.", background=True, extra_body={"ignore_eos": True, "min_tokens": 1000}
)
assert client.responses.cancel(long.id).status == "cancelled"
