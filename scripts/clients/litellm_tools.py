# pip: litellm
"""litellm: chat, stream, tools, and its own exception for a prompt over the context."""

import json
import os

import litellm

litellm.telemetry = False
where = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": os.environ["BASE_URL"],
    "api_key": "any",
    "num_retries": 0,
}
asked = [{"role": "user", "content": "What is the capital of France?"}]
whole = litellm.completion(**where, messages=asked, max_tokens=20, temperature=0)
assert "Paris" in whole.choices[0].message.content
stream = litellm.completion(**where, messages=asked, max_tokens=20, temperature=0, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}
called = litellm.completion(
    **where, messages=asked, tools=[tool], tool_choice="required", max_tokens=80, temperature=0
)
call = called.choices[0].message.tool_calls[0]
assert (call.function.name, set(json.loads(call.function.arguments))) == ("weather", {"city"})
stream = litellm.completion(
    **where, messages=asked, tools=[tool], tool_choice="required", max_tokens=80, temperature=0, stream=True
)
built = litellm.stream_chunk_builder(list(stream), messages=asked)
assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
try:
    litellm.completion(**where, messages=[{"role": "user", "content": "word " * 20_000}])
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt over the context was accepted")
