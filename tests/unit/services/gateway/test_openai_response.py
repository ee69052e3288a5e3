"""Native answers and frames as the OpenAI API has them, to the letter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from services.gateway import openai_response
from services.gateway.openai_response import ChunkBuilder
from shared.errors import EngineError
from shared.openai.call import Call

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 4},
}
TWICE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 8},
}
ACCEPTED = {"type": "accepted", "request_id": "r", "attempt": 1, "frame": 0, "model": "m", "created": 9}
SCORED = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def call(chat: bool = True, **more: Any) -> Call:
    return Call(chat=chat, request_id="r", bodies=({"model": "m"},), stream=True, **more)


def delta(text: str, index: int = 0, first: int = 0, count: int = 1, chat: bool = True, **more: Any) -> Any:
    content = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": index, "first": first, "count": count, **content, "finish_reason": None, **more}
    return {"type": "delta", "request_id": "r", "attempt": 1, "frame": 1, "choices": [choice]}


def done(*reasons: str) -> dict[str, Any]:
    choices = [{"index": i, "tokens": 2, "finish_reason": reason} for i, reason in enumerate(reasons)]
    return {
        "type": "done",
        "model": "m",
        "created": 9,
        "choices": choices,
        "usage": USAGE,
        "timings": {"t": 1},
    }


def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    head = {"id": "r", "object": "chat.completion.chunk", "created": 9, "model": "m"}
    return {**head, "choices": [{**choice, **more}]}


def taken(maker: ChunkBuilder, *frames: dict[str, Any], prompt: int = 0) -> list[dict[str, Any]]:
    return [json.loads(made) for frame in frames for made in maker.convert(prompt, frame)]


def test_chat_stream_has_openais_chunks() -> None:
    got = taken(ChunkBuilder(call()), ACCEPTED, delta("Hel"), delta("lo", first=1), done("stop"))
    assert got == [
        chunk(0, {"role": "assistant", "content": ""}),
        chunk(0, {"content": "Hel"}),
        chunk(0, {"content": "lo"}),
        chunk(0, {}, "stop"),
    ]
    for made in got:
        ChatCompletionChunk.model_validate(made, strict=True)


def test_the_usage_is_the_last_chunk() -> None:
    got = taken(ChunkBuilder(call(include_usage=True)), ACCEPTED, delta("x"), done("length"))
    assert [made.get("usage", "absent") for made in got] == [None, None, None, USAGE]
    assert got[-1] == {
        "id": "r",
        "object": "chat.completion.chunk",
        "created": 9,
        "model": "m",
        "choices": [],
        "usage": USAGE,
        "timings": {"t": 1},
    }
    ChatCompletionChunk.model_validate(got[-1], strict=True)


def test_choices_have_a_chunk_each() -> None:
    both = delta("a")
    both["choices"].append(delta("b", index=1)["choices"][0])
    got = taken(ChunkBuilder(call(n=2)), ACCEPTED, both, done("stop", "length"))
    assert got == [
        chunk(0, {"role": "assistant", "content": ""}),
        chunk(1, {"role": "assistant", "content": ""}),
        chunk(0, {"content": "a"}),
        chunk(1, {"content": "b"}),
        chunk(0, {}, "stop"),
        chunk(1, {}, "length"),
    ]


def test_an_empty_answer_has_its_role_and_end() -> None:
    got = taken(ChunkBuilder(call()), ACCEPTED, done("stop"))
    assert got == [chunk(0, {"role": "assistant", "content": ""}), chunk(0, {}, "stop")]


def test_several_prompts_are_choices_of_one_stream() -> None:
    asked = Call(
        chat=False, request_id="r", bodies=({"model": "m"},) * 2, stream=True, include_usage=True, n=2
    )
    maker = ChunkBuilder(asked, ("P0", "P1"))
    got = taken(maker, ACCEPTED) + taken(maker, ACCEPTED, prompt=1)
    got += taken(maker, delta("x", index=1, chat=False), done("stop", "stop"), prompt=1)
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in got] == [
        (2, "P1"),
        (3, "P1"),
        (3, "x"),
        (2, ""),
        (3, ""),
    ]
    last = taken(maker, done("stop", "length"))
    assert [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in last[2:4]] == [
        (0, "stop"),
        (1, "length"),
    ]
    assert last[-1] == {
        "id": "r",
        "object": "text_completion",
        "created": 9,
        "model": "m",
        "choices": [],
        "usage": TWICE,
    }
    for made in [*got, *last[:4]]:
        assert made["usage"] is None
        Completion.model_validate(
            {**made, "choices": [{**c, "finish_reason": "stop"} for c in made["choices"]]}, strict=True
        )


def test_the_stop_string_that_ended_a_choice() -> None:
    ended = done("stop")
    ended["choices"][0]["stop_reason"] = "END"
    got = taken(ChunkBuilder(call()), ACCEPTED, delta("a"), ended)
    assert got[-1] == chunk(0, {}, "stop", stop_reason="END")
    (choice,) = NATIVE["choices"]
    native = {**NATIVE, "choices": [{**choice, "stop_reason": "END"}]}
    assert openai_response.answer(call(), [native], ())["choices"][0]["stop_reason"] == "END"


def test_a_stream_that_starts_over_repeats_nothing() -> None:
    maker = ChunkBuilder(call())
    taken(maker, ACCEPTED, delta("Hel"), delta("lo", first=1))
    assert taken(maker, ACCEPTED, delta("Hello, wor", count=4)) == [chunk(0, {"content": ", wor"})]
    assert taken(maker, delta("ld", first=4)) == [chunk(0, {"content": "ld"})]
    again = taken(maker, ACCEPTED, delta("Hello"), delta(", world!", first=2), done("stop"))
    assert again == [chunk(0, {"content": "!"}), chunk(0, {}, "stop")]


def test_repeated_log_probabilities_are_left_out() -> None:
    maker = ChunkBuilder(call())
    taken(maker, ACCEPTED, delta("ab", count=2, logprobs={"content": [SCORED, SCORED]}))
    third = {**SCORED, "token": "c"}
    again = delta("abc", count=3, logprobs={"content": [SCORED, third]})  # the first was not known any more
    assert taken(maker, ACCEPTED, again) == [chunk(0, {"content": "c"}, logprobs={"content": [third]})]


def test_log_probabilities_of_a_completion_are_cut_alike() -> None:
    maker = ChunkBuilder(call(chat=False))
    columns = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1, -2],
        "top_logprobs": [{}, {}],
        "text_offset": [0, 1],
    }
    taken(maker, ACCEPTED, delta("a", chat=False, logprobs={n: c[:1] for n, c in columns.items()}))
    (made,) = taken(maker, ACCEPTED, delta("ab", count=2, chat=False, logprobs=columns))
    assert made["choices"][0]["logprobs"] == {name: column[1:] for name, column in columns.items()}


@pytest.mark.parametrize("frames", [[delta("Hex"), delta("lo", first=1)], [delta("He"), done("stop")]])
def test_an_answer_that_changed_is_an_error(frames: list[dict[str, Any]]) -> None:
    maker = ChunkBuilder(call())
    taken(maker, ACCEPTED, delta("Hello"))
    with pytest.raises(EngineError, match="not the same again"):
        taken(maker, ACCEPTED, *frames)


def test_events_have_these_bytes() -> None:
    assert (
        ChunkBuilder(call()).write(['{"a":"é\\n"}', '{"b":1}'])
        == 'data: {"a":"é\\n"}\n\ndata: {"b":1}\n\n'.encode()
    )


NATIVE: dict[str, Any] = {
    "id": "r",
    "object": "chat.completion",
    "created": 9,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi"},
            "logprobs": {"content": [SCORED]},
            "finish_reason": "stop",
        }
    ],
    "timings": {"ttft_ms": 1.5},
    "usage": USAGE,
}


def test_plain_chat_has_openais_form() -> None:
    got = openai_response.answer(call(), [NATIVE], ())
    assert got == {
        "id": "r",
        "object": "chat.completion",
        "created": 9,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": {"content": [SCORED]},
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
        "timings": {"ttft_ms": 1.5},
    }
    ChatCompletion.model_validate(got, strict=True)


def test_a_plain_completion_of_two_prompts() -> None:
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
    native = {**NATIVE, "object": "text_completion", "choices": [choice, {**choice, "index": 1}]}
    got = openai_response.answer(call(chat=False, n=2), [native, native], ("P", "Q"))
    assert [(c["index"], c["text"]) for c in got["choices"]] == [(0, "Px"), (1, "Px"), (2, "Qx"), (3, "Qx")]
    assert (got["object"], got["usage"], "timings" in got) == ("text_completion", TWICE, False)
    Completion.model_validate(got, strict=True)
