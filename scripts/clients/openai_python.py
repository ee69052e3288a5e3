# pip: openai
"""openai: chat, stream, tools, schema, embeddings of errors."""

import json
import os

import openai

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
