"""Functions that a model may call: what a request may say, what the model is told, what its text means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.structured import grammar_of, tools_of

from services.gateway import openai_response
from services.gateway.openai_request import TAGGED, WHOLE, Call, ToolText, how_called
from services.gateway.openai_response import ChunkBuilder
from services.tokenizer.structured_output import parsed, spelled, with_tools
from shared.errors import BadRequest

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": CITY},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "clock"}}
CLOSED = {**CITY, "additionalProperties": False}
ANY = {"type": "object", "additionalProperties": True}


def call_schema(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("choice", "kind", "source"),
    [
        ("required", "json", {"anyOf": [call_schema("weather", CLOSED), call_schema("clock", ANY)]}),
        (NAMED, "json", call_schema("clock", ANY)),
        (
            "auto",
            "tags",
            {
                "trigger": "<tool_call>",
                "tags": [
                    {
                        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
                        "schema": schema,
                        "end": "}\n</tool_call>",
                    }
                    for name, schema in (("weather", CLOSED), ("clock", ANY))
                ],
            },
        ),
    ],
)
def test_the_grammar_of_calls(choice: Any, kind: str, source: Any) -> None:
    packed = json.loads(grammar_of({"tools": [WEATHER, CLOCK], "tool_choice": choice}))
    assert (packed["kind"], json.loads(packed["source"])) == (kind, source)


def test_no_tools_no_grammar() -> None:
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "auto"}):
        assert grammar_of(fields) == ""
        assert tools_of(fields) is None
        assert how_called(fields) == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(fields)
    assert caught.value.param == param


def test_a_template_without_tools_is_told_in_the_system_message() -> None:
    tools = tools_of({"tools": [CLOCK]})
    assert tools is not None
    user = {"role": "user", "content": "Hi"}
    first, second = with_tools([user], tools)
    assert first["role"] == "system"
    assert json.dumps(CLOCK) in first["content"]
    assert second == user
    (merged, _) = with_tools([{"role": "system", "content": "Be brief."}, user], tools)
    assert merged["content"] == f"Be brief.\n\n{first['content']}"


def test_earlier_calls_in_the_conversation() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert spelled(turn) == {"role": "assistant", "content": text}
    assert spelled({**turn, "content": "Well."})["content"] == f"Well.\n{text}"
    function = {"name": "weather", "arguments": {"city": "Ulm"}}
    assert parsed(turn)["tool_calls"] == [{"type": "function", "function": function}]
    plain = {"role": "user", "content": "x"}
    assert spelled(plain) == parsed(plain) == plain
    with pytest.raises(BadRequest, match="a tool call is"):
        spelled({**turn, "tool_calls": [{"function": {}}]})


# ---- what comes back --------------------------------------------------------------------------------

CALL = {"name": "weather", "arguments": {"city": "Ulm"}}
FUNCTION = {"name": "weather", "arguments": '{"city": "Ulm"}'}
TAGS = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


def read(how: str, *pieces: str) -> tuple[str, str, list[dict[str, Any]]]:
    text = ToolText(how, "r_0")
    shown = "".join(map(text.feed, pieces))
    rest, calls = text.finish()
    return shown, rest, [call["function"] for call in calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_in_text_by_pieces_of_any_size(size: int) -> None:
    text = f"I ask <b>two</b>:\n{TAGS}\n{TAGS}"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(TAGGED, *pieces) == ("I ask <b>two</b>:\n", "", [FUNCTION, FUNCTION])


def test_text_without_calls_is_content() -> None:
    assert read(TAGGED, "2 <", "tool 3") == ("2 <tool 3", "", [])
    assert read(TAGGED, "ends with <tool") == ("ends with ", "<tool", [])


def test_a_call_that_was_cut_short_is_content() -> None:
    assert read(TAGGED, "a", TAGS[:-3]) == ("a", TAGS[:-3], [])
    assert read(WHOLE, '{"name": "we') == ("", '{"name": "we', [])
    assert read(WHOLE, '{"name": 3, "arguments": {}}')[2] == []


def test_the_whole_text_is_a_call() -> None:
    whole = json.dumps(CALL)
    assert read(WHOLE, whole[:9], whole[9:]) == ("", "", [FUNCTION])
    assert read(WHOLE, '{"name": "a", "arguments": {"b": "c\x01"}}')[2][0]["arguments"] == '{"b": "c\\u0001"}'


def answered(how: str, text: str) -> dict[str, Any]:
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    call = Call(chat=True, request_id="r", bodies=({"model": "m"},), tools=how)
    native = {"created": 1, "model": "m", "choices": [choice], "usage": usage}
    body = openai_response.answer(call, [native], ())
    ChatCompletion.model_validate(body, strict=True)
    return dict(body["choices"][0])


def test_a_plain_answer_with_calls() -> None:
    calls = [{"id": "call_r_0_0", "type": "function", "function": FUNCTION}]
    whole = answered(WHOLE, json.dumps(CALL))
    assert whole["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    assert whole["finish_reason"] == "tool_calls"
    mixed = answered(TAGGED, f"So:{TAGS}")
    assert (mixed["message"]["content"], mixed["message"]["tool_calls"]) == ("So:", calls)
    plain = answered(TAGGED, "No.")
    assert (plain["message"]["content"], plain["finish_reason"]) == ("No.", "stop")
    assert "tool_calls" not in plain["message"]


def test_a_stream_with_calls() -> None:
    maker = ChunkBuilder(Call(chat=True, request_id="r", bodies=({"model": "m"},), stream=True, tools=TAGGED))
    accepted = {"type": "accepted", "created": 1, "model": "m"}
    frames = [
        {"type": "delta", "choices": [{"index": 0, "first": i, "count": 1, "delta": {"content": piece}}]}
        for i, piece in enumerate(["So:", TAGS[:5], TAGS[5:]])
    ]
    done = {"type": "done", "choices": [{"index": 0, "tokens": 3, "finish_reason": "stop"}]}
    chunks = [json.loads(chunk) for frame in [accepted, *frames, done] for chunk in maker.take(0, frame)]
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "So:"},
        {"tool_calls": [{"index": 0, "id": "call_r_0_0", "type": "function", "function": FUNCTION}]},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
