# pip: anthropic
"""anthropic: messages, stream, tools, count_tokens, errors."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["ROOT_URL"], api_key="any", max_retries=0)
model = os.environ["MODEL"]
GREEDY = {"temperature": 0}  # no argument of this client any more
asked = [{"role": "user", "content": "What is the capital of France?"}]
whole = client.messages.create(model=model, messages=asked, max_tokens=20, extra_body=GREEDY)
assert "Paris" in whole.content[0].text
assert whole.usage.output_tokens > 0
with client.messages.stream(model=model, messages=asked, max_tokens=20, extra_body=GREEDY) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().stop_reason == whole.stop_reason
tool = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
called = client.messages.create(
    model=model,
    messages=asked,
    max_tokens=80,
    extra_body=GREEDY,
    tools=[tool],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
)
(use,) = [block for block in called.content if block.type == "tool_use"]
assert (use.name, set(use.input)) == ("weather", {"city"})
assert called.stop_reason == "tool_use"
assert client.messages.count_tokens(model=model, messages=asked).input_tokens == whole.usage.input_tokens
try:
    client.messages.create(model="none", messages=asked, max_tokens=5)
except anthropic.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was accepted")
