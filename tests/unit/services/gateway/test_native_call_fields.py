"""From an HTTP body to native requests: what passes as it is, and what is translated."""

from __future__ import annotations

import re
from typing import Any

import pytest

from services.gateway.exchange import Unprocessable
from services.gateway.native_call import fields_of, model_of
from shared.api import REQUEST_ID
from shared.errors import BadRequest
from shared.openai.call import MAX_PROMPTS, Call, read_call

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Call:
    return read_call({"model": "m", "messages": MESSAGES, **fields}, chat=True, request_id="r")


def completion(**fields: Any) -> Call:
    return read_call({"model": "m", "prompt": "p", **fields}, chat=False, request_id="r")


def test_fields_pass_as_they_are() -> None:
    call = chat(temperature=0, stop=["a"], logit_bias={"1": 2}, logprobs=True, top_logprobs=3, n=2, x=[1])
    assert call.bodies == (
        {
            "model": "m",
            "messages": MESSAGES,
            "temperature": 0,
            "stop": ["a"],
            "logit_bias": {"1": 2},
            "logprobs": True,
            "top_logprobs": 3,
            "n": 2,
            "x": [1],
            "request_id": "r",
        },
    )
    assert (call.chat, call.request_id, call.stream, call.n, call.model) == (True, "r", False, 2, "m")


def test_a_body_may_name_its_own_id() -> None:
    call = completion(request_id="mine")
    assert (call.request_id, call.bodies[0]["request_id"]) == ("mine", "mine")


@pytest.mark.parametrize(
    "body",
    [
        rb'{"request_id": "\ud800"}',
        b'{"request_id": "\xed\xa0\x80"}',
        rb'{"messages": [{"a": {"\udc00": 1}}]}',
        rb'{"\ud800": 1}',
        '{"user": "\\ud800"}'.encode("utf-16-le"),
    ],
)
def test_half_a_character_goes_no_further(body: bytes) -> None:
    with pytest.raises(BadRequest):
        fields_of(body)


@pytest.mark.parametrize(
    ("options", "usage", "native"),
    [
        (None, False, {"include_usage": True}),
        ({}, False, {"include_usage": True}),
        ({"include_usage": True}, True, {"include_usage": True}),
        ({"include_usage": None}, False, {"include_usage": True}),
        ({"include_usage": False, "y": 1}, False, {"include_usage": True, "y": 1}),
        ({"include_usage": "x"}, False, {"include_usage": "x"}),
    ],
)
def test_usage_of_a_stream_is_sent_on_request(
    options: dict[str, Any] | None, usage: bool, native: dict[str, Any]
) -> None:
    call = chat(stream=True, **({} if options is None else {"stream_options": options}))
    assert (call.include_usage, call.bodies[0]["stream_options"]) == (usage, native)


def test_options_of_another_type_are_for_the_tokenizer_to_refuse() -> None:
    assert chat(stream=True, stream_options=3).bodies[0]["stream_options"] == 3


@pytest.mark.parametrize("prompt", ["p", "", [], [1, 2], [[1, 2]], ["p"]])
def test_one_prompt_is_one_request(prompt: Any) -> None:
    (body,) = completion(prompt=prompt).bodies
    assert body["request_id"] == "r"
    assert body["prompt"] == (prompt[0] if prompt in ([[1, 2]], ["p"]) else prompt)


def test_several_prompts_are_several_requests() -> None:
    call = completion(prompt=["a", "b"], n=3)
    assert [(b["prompt"], b["request_id"], b["n"]) for b in call.bodies] == [("a", "r:0", 3), ("b", "r:1", 3)]
    assert call.request_id == "r"


@pytest.mark.parametrize("chars", [1, 124, 125, 127, 128])
def test_an_id_of_any_length_names_several_prompts(chars: int) -> None:
    ends = ("a", "b")  # two requests that differ in their last character alone
    calls = [completion(prompt=["p"] * 64, request_id="x" * (chars - 1) + end) for end in ends]
    names = [body["request_id"] for call in calls for body in call.bodies]
    assert len(set(names)) == 128
    assert all(re.fullmatch(REQUEST_ID, name) for name in names)
    assert calls[0].request_id == "x" * (chars - 1) + "a"


@pytest.mark.parametrize("wrong", ["x" * 129, "x" * 100 + " " * 27, "\ud800" * 126, ["x"] * 130, 10**126])
def test_invalid_id_is_left_for_the_tokenizer_to_refuse(wrong: object) -> None:
    (first, _) = completion(prompt=["p", "q"], request_id=wrong).bodies
    assert first["request_id"] == f"{wrong}:0"
    assert not re.fullmatch(REQUEST_ID, first["request_id"])


def test_prompts_over_the_bound_are_refused() -> None:
    assert len(completion(prompt=["a"] * MAX_PROMPTS).bodies) == MAX_PROMPTS
    with pytest.raises(BadRequest, match="65 prompts are over 64") as caught:
        completion(prompt=["a"] * (MAX_PROMPTS + 1))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "echo", "native"),
    [
        ({"echo": True}, True, None),
        ({"echo": False}, False, False),
        ({"echo": True, "logprobs": 1}, True, None),
        ({"echo": 1}, False, 1),
    ],
)
def test_echo_is_passed_on(fields: dict[str, Any], echo: bool, native: Any) -> None:
    call = completion(**fields)
    assert (call.echo, call.bodies[0].get("echo")) == (echo, native)


@pytest.mark.parametrize(
    ("kind", "fields", "param", "why"),
    [
        (True, {}, "messages", "`messages` is missing"),
        (False, {}, "prompt", "`prompt` is missing"),
        (True, {"messages": MESSAGES, "prompt": "p"}, "prompt", "send it to /v1/completions"),
        (False, {"messages": MESSAGES, "prompt": "p"}, "messages", "send it to /v1/chat/completions"),
        (True, {"messages": MESSAGES, "stream": 1}, "stream", "true or false"),
        (True, {"messages": MESSAGES, "stream_options": {}}, "stream_options", "`stream: true` alone"),
    ],
)
def test_invalid_fields_are_refused_by_the_gateway(
    kind: bool, fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        read_call({"model": "m", **fields}, chat=kind, request_id="r")
    assert caught.value.param == param


def test_null_means_absent() -> None:
    assert fields_of(b'{"a": null, "b": 0, "c": false}') == {"b": 0, "c": False}


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"{'a': 1}", b'{"a":' * 100_000])
def test_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match=r"not JSON|nested too deeply"):
        fields_of(body)


@pytest.mark.parametrize("body", [b"[]", b"3", b'"a"', b"null", b"true"])
def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Unprocessable, match="an object with fields is expected"):
        fields_of(body)


def test_the_only_model_need_not_be_named() -> None:
    assert model_of({}, ["one"]) == "one"
    assert model_of({"model": "other"}, ["one"]) == "other"
    for fields, served in (({}, []), ({}, ["a", "b"]), ({"model": ""}, ["a"]), ({"model": 3}, ["a"])):
        with pytest.raises(BadRequest, match="the name of a model is expected") as caught:
            model_of(fields, served)
        assert (caught.value.param, "; there is" in caught.value.message) == ("model", bool(served))
