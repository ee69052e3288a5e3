"""The fields of the Responses API become those of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import BadRequest
from shared.openai.call import read_call
from shared.openai.responses.request import PATH, left_out, read

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "now", "parameters": SCHEMA, "strict": True}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
FUNCTION = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
SPACE: Any = {"type": "namespace", "name": "agents", "description": "d", "tools": [{**TOOL, "strict": False}]}
USER = {"role": "user", "content": "Hi"}


def test_a_text_is_a_chat() -> None:
    body = read({"model": "m", "input": "Hi"})
    keep = body.pop("keep")
    assert body == {"model": "m", "messages": [USER]}
    assert keep["path"] == PATH
    assert keep["response"] == {
        "background": False, "instructions": None, "max_output_tokens": None, "metadata": {},
        "parallel_tool_calls": True, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None}, "service_tier": "default", "store": True,
        "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": None, "truncation": "disabled", "user": None,
    }  # fmt: skip


def test_texts_of_one_item_are_joined_by_a_line_break() -> None:
    parts = [{"type": "input_text", "text": text} for text in ("File a.py:", "print(1)")]
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    turns = read({"model": "m", "input": [{"role": "user", "content": parts}, output]})["messages"]
    assert [turn["content"] for turn in turns] == ["File a.py:\nprint(1)"] * 2


def test_every_field_has_its_place() -> None:
    body = read(
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0, "top_p": 0.5,
            "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low", "summary": "auto"}, "include": ["message.output_text.logprobs"],
            "top_logprobs": 2, "metadata": {"a": "b"}, "user": "u", "store": False, "stream": True,
            "service_tier": "auto", "prompt_cache_key": "k", "truncation": "auto", "seed": 4, "stop": "x",
            "durable": "tokens", "session_id": "a", "session_final": True, "prompt_cache_retention": "24h",
            "nvext": {"agent_hints": {"osl": 9}},
        }
    )  # fmt: skip
    keep = body.pop("keep")["response"]
    assert body == {
        "messages": [{"role": "system", "content": "Be brief."}, USER],
        "max_completion_tokens": 9, "temperature": 0, "top_p": 0.5,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather", "description": "now", "parameters": SCHEMA, "strict": True
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
        "logprobs": True, "top_logprobs": 2, "user": "u", "seed": 4, "stop": "x", "durable": "tokens",
        "prompt_cache_key": "k", "stream": True, "stream_options": {"include_usage": True},
        "session_id": "a", "session_final": True, "prompt_cache_retention": "24h",
        "nvext": {"agent_hints": {"osl": 9}},
    }  # fmt: skip
    assert (keep["metadata"], keep["store"], keep["tools"]) == ({"a": "b"}, False, [TOOL])


def test_allowed_tools_are_a_chats() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    body = read({"input": "Hi", "tools": [TOOL], "tool_choice": choice})
    named = {"type": "function", "function": {"name": "weather"}}
    expected = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert (body["tool_choice"], body["keep"]["response"]["tool_choice"]) == (expected, choice)


def test_functions_of_a_namespace_are_functions_and_other_tools_are_left_out() -> None:
    tools = [SPACE, {"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "patch"}]
    turns = [{"role": "user", "content": "Hi"}, {**CALLED, "namespace": "agents"}]
    asked = {"input": turns, "tools": tools, "client_metadata": {"a": "b"}}
    body = read(asked)
    (tool,) = body["tools"]
    assert tool["function"] == {"name": "agents__weather", "description": "now", "parameters": SCHEMA}
    (call,) = body["messages"][1]["tool_calls"]
    assert call["function"]["name"] == "agents__weather"
    (repeated,) = body["keep"]["response"]["tools"]
    assert (repeated["name"], repeated["namespace"]) == ("weather", "agents")
    assert left_out(asked) == ["tools.web_search", "tools.patch"]


@pytest.mark.parametrize(
    ("named", "called"),
    [
        ({"name": "weather"}, "agents__weather"),
        ({"name": "weather", "namespace": "agents"}, "agents__weather"),
        ({"name": "agents__weather"}, "agents__weather"),
        ({"name": "clock"}, "clock"),
        ({"name": "clock", "namespace": "agents"}, "agents__clock"),
    ],
)
def test_a_choice_finds_a_function_in_a_namespace(named: dict[str, str], called: str) -> None:
    clock = {"type": "function", "name": "clock"}
    space = {**SPACE, "tools": [*SPACE["tools"], clock]}
    choice: dict[str, Any] = {"type": "function", **named}
    body = read({"input": "Hi", "tools": [space, clock], "tool_choice": choice})
    expected = {"type": "function", "function": {"name": called}}
    assert body["tool_choice"] == expected
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    body = read({"input": "Hi", "tools": [space, clock], "tool_choice": allowed})
    assert body["tool_choice"]["allowed_tools"]["tools"] == [expected]


def test_a_conversation_with_calls_and_reasoning() -> None:
    part: Any = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": None}
    thought = {"type": "reasoning_text", "text": "hm"}
    items: list[Any] = [
        USER,
        {"type": "reasoning", "id": "rs", "summary": [], "content": [thought]},
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [part]},
        {**CALLED, "id": "fc", "status": None},
        {**CALLED, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "reasoning", "summary": []},
        CALLED,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "developer", "content": "Be nice."},
    ]  # fmt: skip
    assert read({"input": items})["messages"] == [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [FUNCTION, {**FUNCTION, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "", "tool_calls": [FUNCTION]},
        {"role": "assistant", "content": "No."},
        {"role": "developer", "content": "Be nice."},
    ]


def test_null_fields_of_items_mean_none() -> None:
    called = {"type": "function_call", "call_id": "c1", "name": "weather", "id": None, "status": None}
    items: list[Any] = [
        {**USER, "type": None, "id": None, "status": None},
        {"type": "reasoning", "id": None, "summary": None, "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": None},
        *({**called, **more} for more in ({"arguments": ""}, {"arguments": None}, {})),
        {"type": "function_call_output", "call_id": "c1", "output": None},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert read({"input": items, "tools": [{**TOOL, "strict": None}]})["messages"] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call] * 3},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]
    given = {**TOOL, "parameters": {"properties": {"a": {"enum": [None, 1]}}, "default": None}}
    asked = read({"input": "Hi", "tools": [given]})
    assert asked["tools"][0]["function"]["parameters"] == given["parameters"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"input": []}, "`input`"),
        ({"input": [{"role": "user", "content": None}]}, "`content` is missing: a text is expected"),
        ({"input": [{"type": "reasoning"}]}, "`input` has no message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type `item_reference` are not"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "parts of type `input_image`"),
        ({"tools": [{"type": "web_search"}]}, "tools of type `web_search` do not run here: send functions"),
        ({"tools": [{**SPACE, "tools": []}]}, "tools of type `namespace` do not run here"),
        ({"tools": [{**SPACE, "name": "a b"}]}, "`tools.0.namespace`: "),
        ({"tools": [{"type": "function", "name": "a b"}]}, "`tools.0.name`"),
        ({"tool_choice": "required"}, "a function of one of `tools` is expected"),
        (
            {"tool_choice": {"type": "file_search"}},
            '`tool_choice`: none, auto, required, {"type": "function"',
        ),
        ({"conversation": "c"}, "`conversation` is not supported yet"),
        ({"prompt": {"id": "p"}}, "`prompt` is not supported yet"),
        ({"messages": [USER]}, "`messages` is not a field of a request"),
        ({"max_output_tokens": 0}, "`max_output_tokens`"),
        ({"text": {"format": {"type": "grammar"}}}, "`text.format`"),
        ({"metadata": {"a": 1}}, "`metadata.a`"),
        ({"metadata": {str(i): "" for i in range(17)}}, "`metadata`"),
        ({"reasoning": {"effort": "a lot"}}, "`reasoning.effort`"),
        ({"background": True, "store": False}, "exclude each other"),
        ({"webhook": "https://a.example"}, "`webhook` is for `background: true` alone"),
        ({"webhook": 7, "background": True}, "`webhook`"),
        ({"keep": {}}, "`keep` is not a field of a request"),
    ],
)
def test_wrong_field_is_named(more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read({"input": "Hi", **more})
    assert refused.value.message.startswith(why) or why in refused.value.message


def test_a_webhook_goes_to_the_keeper() -> None:
    asked = {"model": "m", "input": "Hi", "background": True, "webhook": "https://a.example"}
    call = read_call(read(asked), chat=True, request_id="r")
    assert call.bodies[0]["webhook"] == "https://a.example"
    assert "webhook" not in call.keep["response"]


def test_stored_fields_come_from_the_gateway_alone() -> None:
    call = read_call(read({"model": "m", "input": "Hi"}), chat=True, request_id="r")
    assert call.keep["path"] == PATH
    assert "keep" not in call.bodies[0]
    forged = read_call({"model": "m", "messages": [USER], "keep": {"path": PATH}}, chat=True, request_id="r")
    assert forged.keep == {}
    assert "keep" in forged.bodies[0]  # for the tokenizer to refuse
