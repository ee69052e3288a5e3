"""What a client asks for by its headers and its query."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from services.gateway.app import _route
from services.gateway.dialects.later import is_async
from services.gateway.dialects.responses import START, Place, Responses, _place
from services.gateway.endpoints import Endpoints
from services.gateway.store import call_of
from shared.clock import SystemClock
from shared.errors import BadRequest
from shared.openai.responses.output import of_state
from shared.openai.responses.request import read


def request(query: str = "", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "query_string": query.encode(), "headers": raw}
    return Request(scope)


@pytest.mark.parametrize(
    ("prefer", "wanted"),
    [
        ("respond-async", True),
        ("wait=3, respond-async", True),
        ("Respond-Async; x=1, wait=3", True),
        ("", False),
        ("wait=3", False),
        ("respond-asynchronously", False),
        ("not-respond-async", False),
    ],
)
def test_the_preference_for_an_answer_later(prefer: str, wanted: bool) -> None:
    assert is_async(request(prefer=prefer)) is wanted
    assert not is_async(request())


def test_place_of_a_reader_comes_from_the_query_or_a_header() -> None:
    assert _place(request()) == START
    assert _place(request("starting_after=7")) == Place(1, 7)
    assert _place(request(f"starting_after={(4 << 32) + 9}")) == Place(5, 9)
    assert _place(request("starting_after=7", last_event_id="5.9")) == Place(5, 9)
    for wrong in ("-1", "x", "1.5", "", "1" * 17):
        with pytest.raises(BadRequest, match="`starting_after`"):
            _place(request(f"starting_after={wrong}"))
    for wrong in ("7", "1.2.3", "1,2", "x"):
        with pytest.raises(BadRequest, match="`Last-Event-ID`"):
            _place(request(last_event_id=wrong))


async def test_a_conversation_with_functions_in_a_namespace_is_continued() -> None:
    """A client such as Codex sends its tools again and the result of the call, not the conversation."""
    function = {"type": "function", "name": "close", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "agents", "tools": [function]}]
    call = '<tool_call>\n{"name": "agents__close", "arguments": {"target": "x"}}\n</tool_call>'
    first = read({"model": "m", "input": "Hi", "instructions": "Be brief.", "tools": tools})
    keep = first.pop("keep")
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": call},
        "finish_reason": "stop",
        "logprobs": None,
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    answer = {"choices": [choice], "usage": usage, "created": 1, "model": "m", "answer_format": "hermes"}
    state = {
        "id": "resp_1", "status": "completed", "keep": keep, "model": "m", "request": first, "answer": answer,
        "created_at": 1, "ended_at": 2,
    }  # fmt: skip

    class Keeper:
        tenant = "acme"

        async def state(self, request_id: str) -> Any:
            return json.loads(json.dumps(state))

    client: Any = Keeper()
    responses = Responses(cast("Endpoints", SimpleNamespace(clock=SystemClock())))
    (item,) = of_state(call_of(state), state)["output"]
    assert (item["name"], item["namespace"]) == ("close", "agents")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "closed"}
    asked = {"model": "m", "previous_response_id": "resp_1", "input": [result], "tools": tools}
    again = await responses.continued(read(asked), client)
    function = {"name": "agents__close", "arguments": '{"target": "x"}'}
    assert again["messages"] == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": item["call_id"], "content": "closed"},
    ]
    assert again["session_id"] == "resp_1"  # a chain is a session, named by its first response
    state["request"]["session_id"] = "resp_0"
    assert (await responses.continued(read(asked), client))["session_id"] == "resp_0"
    named = {**read(asked), "session_id": "of the client"}
    assert (await responses.continued(named, client))["session_id"] == "of the client"
    (offered,) = again["tools"]
    assert offered["function"]["name"] == "agents__close"


def test_paths_with_an_id_are_one_route_in_metrics() -> None:
    assert _route("/v1/responses/resp_1") == "/v1/responses/{id}"
    assert _route("/v1/responses/resp_1/cancel") == "/v1/responses/{id}/cancel"
    assert _route("/v1/chat/completions/r") == "/v1/chat/completions/{id}"
    assert _route("/v1/chat/completions") == "/v1/chat/completions"
    assert _route("/v1/responses/a/b") == "other"
