"""The lines of a batch, right and wrong, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from shared.errors import BadRequest
from shared.openai.batch_lines import InputCheck, answered, read_line

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"custom_id": 1}, {"custom_id": ""}, {"method": "GET"}, {"method": []}, {"url": "/v1/embeddings"},
        {"url": {}}, {"url": []}, {"body": []}, {"body": {}}, {"body": {"prompt": "x", "stream": True}},
        {"body": {"prompt": "x", "echo": True}}, {"body": {"prompt": "x", "durable": "tokens"}},
        {"body": {"messages": []}},
    ],
)  # fmt: skip
def test_a_wrong_field_of_any_type_is_a_bad_request(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        read_line(json.dumps({**GOOD, **wrong}).encode())


def test_an_error_names_its_line_and_blank_lines_count() -> None:
    check, good = InputCheck(), json.dumps(GOOD).encode()
    line = check.read(b"\xef\xbb\xbf" + good)  # a byte order mark, as some editors write it
    assert line is not None
    assert (line.custom_id, line.body) == ("a", {"prompt": "x"})
    assert check.read(b"  ") is None
    with pytest.raises(BadRequest, match="line 3: its custom_id 'a' is that of line 1"):
        check.read(good)
    with pytest.raises(BadRequest, match="line 4: it is not JSON"):
        check.read(b"{")
    assert (check.line, check.requests) == (4, 1)


RESPONSE: dict[str, Any] = {"custom_id": "r", "url": "/v1/responses", "body": {"input": "hi", "seed": 3}}
NATIVE: dict[str, Any] = {
    "created": 7,
    "choices": [
        {"index": 0, "message": {"content": "yes"}, "logprobs": None, "finish_reason": "stop"},
    ],
    "usage": {
        "prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}  # fmt: skip


def test_a_line_for_responses_is_a_chat_and_its_answer_a_response() -> None:
    """The defaults of a batch hold; the response shows that it is not stored apart."""
    line = read_line(json.dumps(RESPONSE).encode())
    defaults = {"model": "m", "seed": 1, "slo_class": "batch", "finish_detached": True}
    call = line.call("batch_1.1", defaults)
    assert call.bodies == (
        {
            "model": "m", "seed": 3, "slo_class": "batch", "finish_detached": True, "request_id": "batch_1.1",
            "messages": [{"role": "user", "content": "hi"}],
        },
    )  # fmt: skip
    response = answered(call, [NATIVE], line.custom_id)["response"]
    parsed = Response.model_validate(response["body"])
    assert (response["status_code"], parsed.id, parsed.output_text) == (200, "batch_1.1", "yes")
    assert (parsed.created_at, parsed.model, parsed.store) == (7, "m", False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "input"), ({"input": []}, "input"),
        ({"input": "x", "stream": True}, "body.stream"),
        ({"input": "x", "background": True}, "body.background"),
        ({"input": "x", "previous_response_id": "resp_1"}, "body.previous_response_id"),
    ],
)  # fmt: skip
def test_a_response_that_a_batch_cannot_give_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_line(json.dumps({**RESPONSE, "body": body}).encode())
    assert caught.value.param == param
