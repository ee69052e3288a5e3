"""Answers with reasoning and calls in the shapes of the OpenAI API, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from services.gateway import openai_response
from services.gateway.openai_response import ChunkBuilder
from shared.openai.answer_parts import Functions, functions_of, reader_of
from shared.openai.call import Call

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FUNCTIONS = Functions({"weather": {"type": "object"}})
TAGS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
CALL = {
    "id": "call_r_0_0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
}


def test_the_functions_of_a_request() -> None:
    assert functions_of({"tools": [TOOL]}) == FUNCTIONS
    assert functions_of({"tools": [TOOL], "parallel_tool_calls": False}) == Functions(
        FUNCTIONS.schemas, False
    )
    for fields in ({}, {"tools": []}, {"tools": 3}, {"tools": [TOOL], "tool_choice": "none"}):
        assert functions_of(fields) is None


def test_plain_answers_have_no_reader() -> None:
    assert reader_of("hermes", None, "r") is None
    assert reader_of("", FUNCTIONS, "r") is None
    assert reader_of("of a later version", FUNCTIONS, "r") is None
    assert reader_of("qwen3", None, "r") is not None
    assert reader_of("harmony", None, "r") is not None


def answered(
    answer_format: str, text: str, functions: Functions | None = FUNCTIONS, end: str = "stop"
) -> Any:
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end}
    call = Call(chat=True, request_id="r", bodies=({"model": "m"},), functions=functions)
    native = {"created": 1, "model": "m", "choices": [choice], "usage": usage, "answer_format": answer_format}
    body = openai_response.answer(call, [native], ())
    ChatCompletion.model_validate(body, strict=True)
    return body["choices"][0]


def test_whole_answer_has_all_parts() -> None:
    called = answered("hermes", TAGS)
    assert called["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
    assert called["finish_reason"] == "tool_calls"
    mixed = answered("qwen3/thinking", f"Hm.\n</think>\n\nSo:{TAGS}")
    assert (mixed["message"]["content"], mixed["message"]["tool_calls"]) == ("So:", [CALL])
    assert mixed["message"]["reasoning_content"] == mixed["message"]["reasoning"] == "Hm."
    plain = answered("hermes", "No.")
    assert plain["message"] == {"role": "assistant", "content": "No.", "refusal": None}
    assert plain["finish_reason"] == "stop"


def test_an_answer_that_is_cut_within_a_call_keeps_its_finish_reason() -> None:
    cut = answered("hermes", TAGS[:47], end="length")
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"'}


def test_mistral_takes_ids_of_nine_letters_and_digits() -> None:
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"name": "weather", "arguments": {}}]'
    ids = [call["id"] for call in answered("mistral", text)["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def streamed(answer_format: str, *pieces: str, logprobs: bool = False) -> list[Any]:
    call = Call(chat=True, request_id="r", bodies=({"model": "m"},), stream=True, functions=FUNCTIONS)
    maker = ChunkBuilder(call)
    accepted = {"type": "accepted", "created": 1, "model": "m", "answer_format": answer_format}
    scores = {"logprobs": {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]}}
    frames = [
        {
            "type": "delta",
            "choices": [
                {
                    "index": 0,
                    "first": i,
                    "count": 1,
                    "delta": {"content": piece},
                    **(scores if logprobs else {}),
                }
            ],
        }
        for i, piece in enumerate(pieces)
    ]
    done = {"type": "done", "choices": [{"index": 0, "tokens": len(pieces), "finish_reason": "stop"}]}
    chunks = [json.loads(chunk) for frame in [accepted, *frames, done] for chunk in maker.convert(0, frame)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return [chunk["choices"][0] for chunk in chunks]


def test_a_stream_has_the_name_and_then_the_arguments() -> None:
    choices = streamed("qwen3", "<think>", "Hm.", "</think>", "So:", TAGS[:5], TAGS[5:47], TAGS[47:])
    first = {**CALL, "function": {"name": "weather", "arguments": ""}}
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"content": "So:"},
        {"tool_calls": [{"index": 0, **first}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'city": "Ulm"}'}}]},
        {},
    ]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_log_probabilities_stay_with_their_frames() -> None:
    choices = streamed("qwen3", "<think>", "Hm.", "</think>", "So.", logprobs=True)
    scored = [choice["delta"] for choice in choices if choice["logprobs"]]
    assert scored == [
        {"content": ""},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"content": ""},
        {"content": "So."},
    ]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_stream_that_starts_over_goes_on_where_it_was(size: int) -> None:
    call = Call(chat=True, request_id="r", bodies=({"model": "m"},), stream=True, functions=FUNCTIONS)
    maker = ChunkBuilder(call)
    accepted = {"type": "accepted", "created": 1, "model": "m", "answer_format": "hermes"}
    chunks: list[Any] = []

    def send(text: str) -> None:
        for i in range(0, len(text), size):
            delta = {"index": 0, "first": i, "count": 1, "delta": {"content": text[i : i + size]}}
            chunks.extend(map(json.loads, maker.convert(0, {"type": "delta", "choices": [delta]})))

    maker.convert(0, accepted)
    send(TAGS[:40])
    maker.convert(0, accepted)
    send(TAGS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Ulm"}'
    assert [call["id"] for call in calls if "id" in call] == ["call_r_0_0"]
