"""What a client asks for by its headers and its query."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from services.gateway.app import _route
from services.gateway.durable.endpoints import _place, prefers_async
from services.gateway.responses.events import START, Place
from shared.errors import BadRequest


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
    assert prefers_async(request(prefer=prefer)) is wanted
    assert not prefers_async(request())


def test_the_place_of_a_reader() -> None:
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


def test_paths_with_an_id_are_one_route_in_metrics() -> None:
    assert _route("/v1/responses/resp_1") == "/v1/responses/{id}"
    assert _route("/v1/responses/resp_1/cancel") == "/v1/responses/{id}/cancel"
    assert _route("/v1/chat/completions/r") == "/v1/chat/completions/{id}"
    assert _route("/v1/chat/completions") == "/v1/chat/completions"
    assert _route("/v1/responses/a/b") == "other"
