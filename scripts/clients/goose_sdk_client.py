# pip: goose-sdk==0.1.0a13
"""goose-sdk: the client library of goose, with the provider of docs/guides/agents.md: models, text, a call."""

import asyncio
import json
import os
import re
from pathlib import Path

from goose import (
    MessageContent,
    MessageRole,
    ProviderMessage,
    ProviderModelConfig,
    ProviderTool,
    declarative_provider_from_json,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "agents.md"
PRINTED = "http://127.0.0.1:8000/v1"  # on that page

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}


def config(**more: object) -> ProviderModelConfig:
    params = json.dumps(more) if more else None
    return ProviderModelConfig(
        model_name=os.environ["MODEL"], temperature=0.0, max_tokens=60, request_params_json=params
    )


async def main() -> None:
    """One conversation."""
    printed = re.search(r"custom_providers/headrace.json`:\n\n```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert printed is not None
    goose = declarative_provider_from_json(printed[1].replace(PRINTED, os.environ["BASE_URL"]))
    assert os.environ["MODEL"] in [model.name for model in await goose.list_models()]
    asked = ProviderMessage(
        role=MessageRole.USER, content=[MessageContent.TEXT("What is the capital of France?")]
    )
    answer = await goose.complete(config(), "", [asked], [])
    assert "Paris" in answer.content[0].text
    stream, text = await goose.stream(config(), "", [asked], []), ""
    while (chunk := await stream.next_chunk()) is not None:
        text += chunk.text if chunk.is_TEXT_CHUNK() else ""
    assert text == answer.content[0].text
    tool = ProviderTool(name="weather", description="The weather", input_schema_json=json.dumps(SCHEMA))
    asked = ProviderMessage(role=MessageRole.USER, content=[MessageContent.TEXT("The weather of Oslo?")])
    required = config(tool_choice="required", parallel_tool_calls=False)
    called = await goose.complete(required, "Use tools.", [asked], [tool])
    (call,) = (part for part in called.content if part.is_TOOL_REQUEST())
    assert call.name == "weather"
    assert set(json.loads(call.arguments_json)) == {"city"}
    result = MessageContent.TOOL_RESULT(call.id, True, json.dumps([{"type": "text", "text": "rain"}]))
    said = ProviderMessage(role=MessageRole.ASSISTANT, content=called.content)
    told = ProviderMessage(role=MessageRole.USER, content=[result])
    after = await goose.complete(config(tool_choice="none"), "Use tools.", [asked, said, told], [tool])
    assert after.content[0].text


asyncio.run(main())
