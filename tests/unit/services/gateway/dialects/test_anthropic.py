"""Anthropic's Messages API as chats of the OpenAI API, and OpenAI's chunks as its events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.dialects import anthropic
from services.gateway.dialects.anthropic import MessageEvents, message, read
from services.gateway.exchange import NotAuthorized
from services.tokenizer.prepare import _max_tokens, _too_long, read_request
from shared.api import ChatRequest
from shared.errors import BadRequest, EngineError, HeadraceError, Overloaded, Unavailable, UnknownModel
from shared.openai.call import Call, read_call

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
}
COUNTED = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 2,
}
KEEP_ONE = {"type": "thinking_turns", "value": 1}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def marked(**control: object) -> dict[str, Any]:
    """A request whose tools, system and messages each have a block with a `cache_control`."""
    day: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    block = {"type": "text", "text": "Hi", "cache_control": control}
    return {
        "tools": [{**TOOL, **day}],
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"ttl": "5m"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **day}, block]}],
    }


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"cache_control": {"type": "ephemeral"}}, None),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "3600s"),
        (marked(type="ephemeral"), "300s"),
        (marked(type="ephemeral", ttl="1h"), "3600s"),
        ({**marked(ttl="1m"), "cache_control": "of no form"}, "300s"),
    ],
)
def test_the_longest_ttl_of_a_request_is_its_wish_to_keep_blocks(
    more: dict[str, Any], kept: str | None
) -> None:
    body = read({**ASKED, **more})
    assert body.get("prompt_cache_retention") == kept
    assert isinstance(read_request(body), ChatRequest)


@pytest.mark.parametrize("ttl", ["25h", "-1m", "in_memory", "1e12", -1, 10**12, float("nan"), [], ""])
def test_a_ttl_that_is_no_time_is_named_with_its_place(ttl: object) -> None:
    expected = "a time of at most 24h is expected, as 300s, 5m or 24h"
    for more, param in (
        (marked(ttl=ttl), "messages.0.content.1.cache_control.ttl"),
        ({"cache_control": {"ttl": ttl}}, "cache_control.ttl"),
        ({"tools": [{**TOOL, "cache_control": {"ttl": ttl}}]}, "tools.0.cache_control.ttl"),
    ):
        with pytest.raises(BadRequest) as caught:
            read({**ASKED, **more})
        assert (caught.value.message, caught.value.param) == (f"`{param}`: {expected}", param)


def test_every_field_has_its_place_in_a_chat() -> None:
    more = {
        "system": [{"type": "text", "text": "Be", "cache_control": {}}, {"type": "text", "text": "brief"}],
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"},
        "service_tier": "auto",
    }
    body = read({**ASKED, **more})
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "Be\nbrief"}, {"role": "user", "content": "Hi"}],
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "u",
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }
    call = read_call(body, chat=True, request_id="r")
    assert isinstance(read_request(call.bodies[0]), ChatRequest)
    session = {"session_id": "a", "parent_session_id": "b", "nvext": {"agent_hints": {"osl": 9}}}
    assert {name: read({**ASKED, **session})[name] for name in session} == session
    schema = {"type": "object", "properties": {}}
    formed = read({**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert formed["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(("kind", "wanted"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(kind: str, wanted: bool) -> None:
    variables = {"enable_thinking": wanted, "thinking": wanted}
    for api in (anthropic.MESSAGES, anthropic.COUNT):
        fields = {**ASKED, "thinking": {"type": kind}}
        if api is anthropic.COUNT:
            del fields["max_tokens"]
        assert api.read(fields)["chat_template_kwargs"] == variables
    assert "chat_template_kwargs" not in read(ASKED)


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_the_choice_of_a_tool(choice: dict[str, Any], chosen: object) -> None:
    assert read({**ASKED, "tools": [TOOL], "tool_choice": choice})["tool_choice"] == chosen


def test_conversation_with_calls_is_translated() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": "c2", "content": "none", "is_error": True}
    used = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}
    body = read(
        {
            **ASKED,
            "messages": [
                {"role": "user", "content": "A"},
                {"role": "user", "content": [{"type": "text", "text": "B"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "t", "signature": ""}, used],
                },
                {"role": "user", "content": [result, failed, {"type": "text", "text": "C"}]},
            ],
        }
    )
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert body["messages"] == [
        {"role": "user", "content": "A\nB"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "t",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: none"},
        {"role": "user", "content": "C"},
    ]


def test_null_fields_of_blocks_mean_none() -> None:
    used = {"type": "tool_use", "id": "c", "name": "weather", "cache_control": None, "caller": None}
    result = {"type": "tool_result", "tool_use_id": "c", "content": None, "is_error": None}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "A", "citations": None}], "name": None},
        {"role": "assistant", "content": [{**used, "input": given} for given in ({}, None, "", {"a": None})]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "B"},
    ]
    tool = {**TOOL, "description": None, "input_schema": {"properties": {"a": {"const": None}}}}
    choice = {"type": "auto", "name": None, "disable_parallel_tool_use": None}
    body = read({**ASKED, "messages": messages, "tools": [tool], "tool_choice": choice})
    _, called, returned, answered, _ = body["messages"]
    arguments = [call["function"]["arguments"] for call in called["tool_calls"]]
    assert arguments == [{}, {}, {}, {"a": None}]
    assert returned == {"role": "tool", "tool_call_id": "c", "content": ""}
    assert answered == {"role": "assistant", "content": ""}
    assert body["tools"][0]["function"]["parameters"] == tool["input_schema"]


@pytest.mark.parametrize(
    "more",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}},
        {"context_management": {}},
        {"mcp_servers": []},
        {"speed": "fast", "fallbacks": [], "diagnostics": {}, "user_profile_id": "u", "billing_policy": {}},
        {"tools": []},
        {"output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 20_000}}},
    ],
)
def test_fields_without_effect_are_accepted(more: dict[str, Any]) -> None:
    assert read({**ASKED, **more}) == read(ASKED)


def test_tools_of_anthropics_servers_are_left_out_beside_others_and_named() -> None:
    tools = [SEARCH, {**TOOL, "type": "custom"}, {"type": "mcp_toolset", "mcp_server_name": "s"}]
    for api in (anthropic.MESSAGES, anthropic.COUNT):
        given = {
            name: value for name, value in ASKED.items() if api is anthropic.MESSAGES or name != "max_tokens"
        }
        assert api.read({**given, "tools": tools}) == api.read({**given, "tools": [TOOL]})
        assert api.ignored({**given, "tools": tools}) == ["tools.web_search", "tools.mcp_toolset"]
        assert api.ignored({**given, "tools": [TOOL], "speed": "fast"}) == ["speed"]


def test_nulls_in_blocks_and_tools_count_as_absent() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": None, "is_error": None}
    used = {"type": "tool_use", "id": "c1", "name": "weather", "input": None}
    turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    tool = {**TOOL, "description": None, "type": None, "strict": None}
    choice = {"type": "auto", "name": None, "disable_parallel_tool_use": None}
    body = read({**ASKED, "messages": ASKED["messages"] + turns, "tools": [tool], "tool_choice": choice})
    (call,) = body["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == {}
    assert body["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": ""}
    assert body["tools"][0]["function"] == {"name": "weather", "parameters": {"type": "object"}}
    assert "parallel_tool_calls" not in body


def test_a_strict_tool_stays_strict() -> None:
    (tool,) = read({**ASKED, "tools": [{**TOOL, "strict": True}]})["tools"]
    assert tool["function"]["strict"] is True


def test_the_old_name_of_the_form_of_an_answer() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert read({**ASKED, "output_format": form}) == read({**ASKED, "output_config": {"format": form}})


def test_an_answer_that_was_begun_goes_on() -> None:
    begun = {"role": "assistant", "content": "The best"}
    body = read({**ASKED, "messages": [*ASKED["messages"], begun]})
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"container": "c"}, "`container` is not a field of a request; leave it out"),
        ({"max_tokens": None}, "`max_tokens`: "),
        (
            {"system": [{"type": "image"}]},
            "`system`: blocks of type `image` are not supported here: send text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "`messages.0.user.content`: blocks of type `image` are not supported here: send text,",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "`messages.0.user.content.0.text.text`: ",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "name": "n"}]},
            "`messages.0.user.name` is not a field",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "`tools`: tools of type `web_search_20250305` do not run here: send tools with an `input_schema`",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "`context_management.edits`: edits of type `clear_tool_uses_20250919` are not supported here: ",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": KEEP_ONE}]}},
            "`context_management.edits.0.keep.",
        ),
        ({"mcp_servers": [{"type": "url", "name": "m", "url": "x"}]}, "`mcp_servers` is not supported yet"),
        ({"tool_choice": {"type": "tool"}}, "`tool_choice.name`"),
        ({"thinking": {"type": "much"}}, "`thinking.type`: "),
    ],
)
def test_wrong_field_is_named(more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read({name: value for name, value in {**ASKED, **more}.items() if value is not None})
    assert refused.value.message.startswith(why)
    assert refused.value.param == next(iter(more))


HEAD = {"model": "m", "created": 9, "answer_format": "hermes"}


def native(text: str, reason: str = "stop", **more: str) -> dict[str, Any]:
    answered = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": answered, "logprobs": None, "finish_reason": reason, **more}
    return {**HEAD, "id": "r", "choices": [choice], "usage": USAGE}


def asked(**more: Any) -> Call:
    return read_call(read({**ASKED, **more}), chat=True, request_id="r")


def test_plain_answer_has_anthropics_form() -> None:
    assert message(asked(), [native("Hello")], ()) == {
        "id": "r",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": COUNTED,
    }
    stopped = message(asked(), [native("", stop_reason="END")], ())
    assert (stopped["content"], stopped["stop_reason"], stopped["stop_sequence"]) == (
        [],
        "stop_sequence",
        "END",
    )
    assert message(asked(), [native("x", "length")], ())["stop_reason"] == "max_tokens"


def test_a_call_is_a_block() -> None:
    got = message(asked(tools=[TOOL]), [native(f"So: {CALLED}")], ())
    text, used = got["content"]
    assert text["text"].startswith("So:")
    assert (used["type"], used["name"], used["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    assert got["stop_reason"] == "tool_use"


ACCEPTED = {**HEAD, "type": "accepted", "attempt": 1, "frame": 0, "prompt_tokens": 7}


def delta(text: str) -> dict[str, Any]:
    choice = {"index": 0, "first": 0, "count": 1, "delta": {"content": text}, "finish_reason": None}
    return {"type": "delta", "choices": [choice]}


def done(**more: str) -> dict[str, Any]:
    choice = {"index": 0, "tokens": 2, "finish_reason": "stop", **more}
    return {"type": "done", "model": "m", "created": 9, "choices": [choice], "usage": USAGE, "timings": {}}


def events(call: Call, *frames: dict[str, Any]) -> list[dict[str, Any]]:
    made = MessageEvents(call)
    sent = b"".join(made.write(made.convert(0, frame)) for frame in frames).decode() + made.end(None).decode()
    found = []
    for event in sent.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_stream_has_anthropics_events() -> None:
    got = events(asked(stream=True), ACCEPTED, delta("Hel"), delta("lo"), done(stop_reason="END"))
    assert [each["type"] for each in got] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert got[0]["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}
    assert got[3] == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Hel"},
    }
    assert got[6] == {
        "type": "message_delta",
        "delta": {"stop_reason": "stop_sequence", "stop_sequence": "END"},
        "usage": COUNTED,
    }


def test_blocks_of_a_stream_follow_each_other() -> None:
    """At any pieces of reasoning, text and calls: one block is open at a time."""
    made = MessageEvents(asked(stream=True))
    head = {"id": "r", "model": "m"}

    def chunk(**delta: Any) -> list[dict[str, Any]]:
        chosen = {"index": 0, "delta": delta, "finish_reason": None}
        events = made._events({**head, "choices": [chosen]})
        return [json.loads(event.partition("data: ")[2]) for event in events]

    def call(index: int, arguments: str, **named: str) -> dict[str, Any]:
        about = {"id": f"c{index}"} if named else {}
        return {"index": index, **about, "function": {**named, "arguments": arguments}}

    got = chunk(role="assistant", content="") + chunk(reasoning_content="hm") + chunk(content="a")
    got += chunk(tool_calls=[call(0, "", name="f")]) + chunk(tool_calls=[call(0, '{"x"')])
    got += chunk(tool_calls=[call(0, ":1}")]) + chunk(tool_calls=[call(1, "{}", name="g")])
    opened = [each["content_block"]["type"] for each in got if each["type"] == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use", "tool_use"]
    shown = [(e["index"], *e["delta"].values()) for e in got if e["type"] == "content_block_delta"]
    assert shown == [
        (0, "thinking_delta", "hm"),
        (1, "text_delta", "a"),
        (2, "input_json_delta", '{"x"'),
        (2, "input_json_delta", ":1}"),
        (3, "input_json_delta", "{}"),
    ]
    assert [each["index"] for each in got if each["type"] == "content_block_stop"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("w", param="n"), "invalid_request_error"),
        (NotAuthorized("w"), "authentication_error"),
        (UnknownModel("w"), "not_found_error"),
        (Overloaded("w"), "rate_limit_error"),
        (EngineError("w"), "api_error"),
        (Unavailable("w"), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_form(error: HeadraceError, kind: str) -> None:
    body = anthropic.error_body(error, "r")
    assert body == {"type": "error", "error": {"type": kind, "message": "w"}, "request_id": "r"}
    assert MessageEvents(asked(stream=True)).end(body).startswith(b"event: error\ndata: ")


def test_error_over_the_context_has_the_words_by_which_clients_shorten_it() -> None:
    asked = read_request(read_call(read({**ASKED, "max_tokens": 900}), chat=True, request_id="r").bodies[0])
    assert isinstance(asked, ChatRequest)
    with pytest.raises(BadRequest) as over:
        _max_tokens(asked, 150, 1000)
    with pytest.raises(BadRequest) as full:
        _max_tokens(asked, 1000, 1000)
    long = _too_long("messages", "99999 characters", 1000)
    found = [anthropic.error_body(error)["error"]["message"] for error in (over.value, full.value, long)]
    assert [text.partition("; ")[0] for text in found] == [
        "input length and `max_tokens` exceed context limit: 150 + 900 > 1000",
        "prompt is too long: 1000 tokens > 1000 tokens maximum",
        "prompt is too long: 99999 characters > 1000 tokens maximum",
    ]
    assert found[0].endswith("; the prompt has 150 tokens and `max_tokens` is 900; ask for at most 850")
