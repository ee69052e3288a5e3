"""The hints of clients about their sessions, by all their names, in one form; a damaged one is named."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import pytest

from shared import session_hints
from shared.api import ChatRequest
from shared.errors import BadRequest
from shared.session_hints import (
    MALFORMED,
    PASSED_OVER,
    USED,
    Hints,
    hints_of,
    name_of,
    seconds_of,
    with_headers,
)

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def hints(**fields: Any) -> Hints:
    """The hints of a chat with these fields, as its tokenizer reads them."""
    asked = ChatRequest.model_validate({**CHAT, **fields})
    return hints_of(asked, asked.prompt_cache_retention)


def headers(
    body: dict[str, Any] | None = None, **given: str | list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that these headers add, their names written with `_`."""
    values = {name.replace("_", "-").lower(): value for name, value in given.items()}

    def of(header: str) -> list[str]:
        value = values.get(header.lower(), [])
        return [value] if isinstance(value, str) else value

    return with_headers(body or {}, of)


def test_a_body_without_hints_has_none() -> None:
    assert hints() == Hints()
    assert headers() == ({}, {})
    assert headers(User_Agent="curl", X_Request_Id="7") == ({}, {})


def test_the_hints_of_a_body_are_read_by_all_their_names() -> None:
    nvext = {
        "agent_hints": {"osl": 200.0, "speculative_prefill": True, "priority": -3, "later": {}},
        "other": 1,
    }
    found = hints(
        session_id="child", parent_session_id="mid", root_session_id="top", session_final=True, nvext=nvext,
        prompt_cache_retention="5m",
    )  # fmt: skip
    assert found == Hints("child", "mid", "top", True, 200, 300_000_000, True)
    assert hints(session_id="a", parent_session_id="b").root == "b"
    assert hints(session_id="a").root == "a"
    assert hints(nvext={"agent_hints": {"osl": None, "priority": None}, "annotations": []}) == Hints()
    assert hints(nvext={"agent_hints": None}) == Hints()
    assert hints(nvext={"agent_hints": {"osl": 10**400, "priority": -(10**400)}}).expects_tokens == 10**400


def test_tenants_with_one_id_have_two_sessions() -> None:
    expected = blake2b(b"acme\0run 1", digest_size=16).hexdigest()
    assert (name_of("acme", "run 1"), len(expected)) == (expected, 32)
    assert name_of("other", "run 1") != expected
    assert name_of("acme", "") == ""


@pytest.mark.parametrize(
    ("retention", "seconds"),
    [("in_memory", 0), ("in-memory", 0), ("24h", 86_400), ("5m", 300), ("1h", 3_600), ("90s", 90)],
)
def test_a_retention_is_a_time(retention: str, seconds: int) -> None:
    assert seconds_of(retention) == seconds
    assert hints(prompt_cache_retention=retention).keep_us == seconds * 1_000_000


ID = "1 to 256 printable ASCII characters are expected"
TIME = "a time of at most 24h is expected, as 300s, 5m or 24h, or in_memory"
OSL = "the expected tokens of the answer, a whole number from 1 on, are expected"
OBJECT, FLAG, NUMBER = "an object is expected", "true or false is expected", "a finite number is expected"


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"session_id": "i" * 257}, "session_id", ID),
        ({"session_id": "i" * 10_000_000}, "session_id", ID),
        ({"session_id": ""}, "session_id", ID),
        ({"session_id": "a\nb"}, "session_id", ID),
        ({"session_id": "a\x7f"}, "session_id", ID),
        ({"session_id": "Zürich"}, "session_id", ID),
        ({"session_id": 7}, "session_id", ID),
        ({"session_id": "a", "parent_session_id": "b\0"}, "parent_session_id", ID),
        ({"root_session_id": []}, "root_session_id", ID),
        (
            {"session_id": "a", "parent_session_id": "a"},
            "parent_session_id",
            "the session itself is no parent of it",
        ),
        ({"parent_session_id": "a"}, "parent_session_id", "`session_id` is missing beside it"),
        ({"session_final": "yes"}, "session_final", FLAG),
        ({"nvext": []}, "nvext", OBJECT),
        ({"nvext": "osl"}, "nvext", OBJECT),
        ({"nvext": {"agent_hints": [1]}}, "nvext.agent_hints", OBJECT),
        ({"nvext": {"agent_hints": {"osl": "many"}}}, "nvext.agent_hints.osl", OSL),
        ({"nvext": {"agent_hints": {"osl": 0}}}, "nvext.agent_hints.osl", OSL),
        ({"nvext": {"agent_hints": {"osl": 2.5}}}, "nvext.agent_hints.osl", OSL),
        ({"nvext": {"agent_hints": {"osl": True}}}, "nvext.agent_hints.osl", OSL),
        (json.loads('{"nvext": {"agent_hints": {"osl": 1e400}}}'), "nvext.agent_hints.osl", OSL),
        (json.loads('{"nvext": {"agent_hints": {"osl": NaN}}}'), "nvext.agent_hints.osl", OSL),
        (
            json.loads('{"nvext": {"agent_hints": {"priority": 1e400}}}'),
            "nvext.agent_hints.priority",
            NUMBER,
        ),
        (
            {"nvext": {"agent_hints": {"speculative_prefill": 1}}},
            "nvext.agent_hints.speculative_prefill",
            FLAG,
        ),
        (
            {"nvext": {"agent_hints": {"strict_priority": "high"}}},
            "nvext.agent_hints.strict_priority",
            "true, false or a finite number is expected",
        ),
        ({"prompt_cache_retention": "25h"}, "prompt_cache_retention", TIME),
        ({"prompt_cache_retention": "-1s"}, "prompt_cache_retention", TIME),
        ({"prompt_cache_retention": "1e12s"}, "prompt_cache_retention", TIME),
        ({"prompt_cache_retention": "0s"}, "prompt_cache_retention", TIME),
        ({"prompt_cache_retention": 300}, "prompt_cache_retention", TIME),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_damaged_hint_is_named_with_what_is_expected(fields: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(BadRequest) as caught:
        hints(**fields)
    assert (caught.value.message, caught.value.param) == (f"`{param}`: {why}", param)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (
            {"X_Dynamo_Session_ID": "c", "X_Dynamo_Parent_Session_ID": "p", "X_Dynamo_Session_Final": "TRUE"},
            {"session_id": "c", "parent_session_id": "p", "session_final": True},
        ),
        ({"X_Claude_Code_Session_Id": "s"}, {"session_id": "s"}),
        (
            {"X_Claude_Code_Session_Id": "s", "X_Claude_Code_Agent_Id": "a"},
            {"session_id": "s/a", "parent_session_id": "s", "root_session_id": "s"},
        ),
        (
            {
                "X_Claude_Code_Session_Id": "s", "X_Claude_Code_Agent_Id": "b",
                "X_Claude_Code_Parent_Agent_Id": "a",
            },
            {"session_id": "s/b", "parent_session_id": "s/a", "root_session_id": "s"},
        ),
        ({"Session_Id": "s"}, {"session_id": "s"}),
        ({"Session_Id": "s", "Thread_Id": "s"}, {"session_id": "s"}),
        (
            {"Session_Id": "s", "Thread_Id": "t", "X_Codex_Parent_Thread_Id": "p"},
            {"session_id": "t", "parent_session_id": "p", "root_session_id": "s"},
        ),
        ({"X_Session_Id": " s "}, {"session_id": "s"}),
        ({"X_Session_Id": "s", "X_Parent_Session_Id": "p"}, {"session_id": "s", "parent_session_id": "p"}),
        ({"X_Session_Id": "s", "X_Parent_Session_Id": "s"}, {"session_id": "s"}),
        ({"X_Parent_Session_Id": "p"}, {}),
        ({"X_Session_Id": " ", "X_Dynamo_Session_ID": ""}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_the_headers_of_each_client_name_its_session(given: dict[str, str], fields: dict[str, Any]) -> None:
    found, _ = headers(**given)
    assert found == fields
    hints(**found)


def test_a_body_goes_before_the_header_of_an_agent_and_after_the_first_row() -> None:
    body = {"session_id": "body"}
    assert headers(body, X_Session_Id="agent") == ({}, {"X-Session-Id": PASSED_OVER})
    assert headers(X_Session_Id="open", X_Claude_Code_Session_Id="claude") == (
        {"session_id": "claude"},
        {"X-Claude-Code-Session-Id": USED, "X-Session-Id": PASSED_OVER},
    )
    found, fates = headers(X_Dynamo_Session_ID="ours", X_Session_Id="agent")
    assert (found, fates["X-Session-Id"]) == ({"session_id": "ours"}, PASSED_OVER)
    assert headers(body, X_Dynamo_Session_ID="body")[0] == body
    assert headers(body, X_Dynamo_Session_Final="1")[0] == {"session_final": True}


@pytest.mark.parametrize(
    ("body", "given", "param", "why"),
    [
        ({}, {"X_Dynamo_Session_ID": "i" * 257}, "X-Dynamo-Session-ID", ID),
        ({}, {"X_Dynamo_Session_ID": ["a", "b"]}, "X-Dynamo-Session-ID", ID),
        ({}, {"X_Dynamo_Parent_Session_ID": "ü"}, "X-Dynamo-Parent-Session-ID", ID),
        ({}, {"X_Dynamo_Session_Final": "maybe"}, "X-Dynamo-Session-Final", FLAG),
        (
            {"session_id": "a"},
            {"X_Dynamo_Session_ID": "b"},
            "session_id",
            "the header X-Dynamo-Session-ID has another value: send one of both",
        ),
        (
            {"session_final": False},
            {"X_Dynamo_Session_Final": "true"},
            "session_final",
            "the header X-Dynamo-Session-Final has another value: send one of both",
        ),
    ],
    ids=str,
)
def test_a_damaged_header_of_the_first_row_is_named(
    body: dict[str, Any], given: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        headers(body, **given)
    assert (caught.value.message, caught.value.param) == (f"`{param}`: {why}", param)


@pytest.mark.parametrize(
    "given",
    [
        {"X_Session_Id": "i" * 257},
        {"X_Session_Id": ["a", "b"]},
        {"X_Session_Id": "a\x01"},
        {"X_Session_Id": "a", "X_Parent_Session_Id": "ü"},
    ],
    ids=str,
)
def test_a_damaged_header_of_an_agent_is_passed_over_and_counted(given: dict[str, Any]) -> None:
    assert headers(**given) == ({}, {"X-Session-Id": MALFORMED})


def test_an_agent_whose_id_is_too_long_beside_its_session_is_passed_over() -> None:
    long = "i" * session_hints.MAX_ID_CHARS
    found = headers(X_Claude_Code_Session_Id=long, X_Claude_Code_Agent_Id="a")
    assert found == ({}, {"X-Claude-Code-Session-Id": MALFORMED})
