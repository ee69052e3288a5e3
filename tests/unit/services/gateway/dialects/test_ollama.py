"""Ollama's API as chats of the OpenAI API, and OpenAI's chunks as its lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.structured import grammar_of

from services.gateway.dialects import anthropic, ollama
from services.gateway.dialects.ollama import (
    Lines,
    OllamaChatRequest,
    OllamaGenerateRequest,
    read,
    read_embed,
    read_show,
)
from services.tokenizer.prepare import read_request
from shared.errors import BadRequest
from shared.openai.call import read_call
from shared.openai.responses import request as responses

CHAT: dict[str, Any] = {"model": "m:latest", "messages": [{"role": "user", "content": "Hi", "images": None}]}
TURNS = [{"role": "user", "content": "Hi"}]
TIMINGS = {"total_ms": 3.5, "prefill_ms": 1.0, "decode_ms": 2.0}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
}
ENDING = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 3_500_000,
    "load_duration": 0,
    "prompt_eval_count": 7,
    "prompt_eval_duration": 1_000_000,
    "eval_count": 2,
    "eval_duration": 2_000_000,
}
HEAD = {"model": "m", "created_at": "1970-01-01T00:00:09Z"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_chat_is_translated() -> None:
    options = {
        "num_predict": 5,
        "temperature": 0,
        "repeat_penalty": 1.1,
        "stop": "a",
        "seed": None,
        "num_ctx": 9,
    }
    body = read({**CHAT, "options": options, "keep_alive": "5m"}, OllamaChatRequest)
    assert body == {
        "model": "m",
        "messages": TURNS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "temperature": 0,
        "repetition_penalty": 1.1,
        "stop": ["a"],
    }
    read_request(read_call(body, chat=True, request_id="r").bodies[0])
    assert "max_tokens" not in read({**CHAT, "options": {"num_predict": -1}}, OllamaChatRequest)


@pytest.mark.parametrize(
    ("think", "wanted", "effort"),
    [
        (True, True, None),
        (False, False, None),
        ("low", True, "low"),
        ("high", True, "high"),
        ("max", True, "xhigh"),
    ],
)
def test_thinking_is_a_variable_of_the_template(think: object, wanted: bool, effort: str | None) -> None:
    variables = {"enable_thinking": wanted, "thinking": wanted}
    for kind in (OllamaChatRequest, OllamaGenerateRequest):
        asked = CHAT if kind is OllamaChatRequest else {"prompt": "Hi"}
        body = read({**asked, "think": think}, kind)
        assert (body["chat_template_kwargs"], body.get("reasoning_effort")) == (variables, effort)
        read_request(read_call({**body, "model": "m"}, chat=True, request_id="r").bodies[0])
    raw = read({"prompt": "Hi", "raw": True, "think": think}, OllamaGenerateRequest)
    assert raw.keys() == {"prompt", "stream", "stream_options"}  # no template, no variable


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")]
)
def test_a_request_without_a_prompt_loads_the_model(keep_alive: object, reason: str) -> None:
    for api, asked, content in (
        (ollama.CHAT, {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        (ollama.CHAT, {}, {"message": {"role": "assistant", "content": ""}}),
        (ollama.GENERATE, {"prompt": ""}, {"response": ""}),
        (ollama.GENERATE, {"raw": True, "stream": False}, {"response": ""}),
    ):
        fields = api.read({"model": "m:latest", "keep_alive": keep_alive, **asked})
        whole = ollama.loaded(fields, 9, chat=api is ollama.CHAT)
        assert whole == {**HEAD, **content, "done": True, "done_reason": reason}
    assert "done_reason" not in ollama.CHAT.read({**CHAT, "keep_alive": keep_alive})


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ("", None),
        ("json", {"type": "json_object"}),
        (
            {"type": "string"},
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "string"}}},
        ),
    ],
)
def test_formats_are_translated(asked: object, form: object) -> None:
    assert read({**CHAT, "format": asked}, OllamaChatRequest).get("response_format") == form


def test_a_prompt_goes_through_the_chat_template_unless_it_is_raw() -> None:
    asked = {"model": "m", "prompt": "Hi", "stream": False, "context": [], "suffix": ""}
    assert read({**asked, "system": "Be brief."}, OllamaGenerateRequest) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, *TURNS],
        "stream": False,
    }
    raw = read({**asked, "raw": True}, OllamaGenerateRequest)
    assert raw == {"model": "m", "prompt": "Hi", "stream": False}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "`images` is not supported yet",
        ),
        ({"messages": [{"role": "someone", "content": "x"}]}, "`messages.0.role`: Input should be 'system'"),
        ({"think": "much"}, "`think."),
        ({"think": 0}, "`think."),
        ({"options": {"temperature": 3}}, "`options.temperature`: "),
        ({"logprobs": True}, "`logprobs` is not supported yet"),
        ({"format": "yaml"}, "`format."),
    ],
)
def test_wrong_field_is_named(more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read({**CHAT, **more}, OllamaChatRequest)
    assert refused.value.message.startswith(why)
    with pytest.raises(BadRequest, match="`suffix` is not supported yet"):
        read({"prompt": "x", "suffix": "y"}, OllamaGenerateRequest)


def test_call_for_vectors_is_translated() -> None:
    body = {"model": "m:latest", "input": ["a"], "truncate": False, "keep_alive": "5m"}
    assert read_embed(body) == {"model": "m", "input": ["a"], "truncate": False}


# Samplers that ollama had, what loads a model, and names that were never its own.
IDLE_OPTIONS: dict[str, Any] = {
    "mirostat": 2, "mirostat_eta": 0.1, "mirostat_tau": 5, "tfs_z": 0.9, "typical_p": 0.7,
    "penalize_newline": True, "repeat_last_n": 64, "num_ctx": 4096, "num_batch": 2, "num_gpu": 1,
    "main_gpu": 0, "num_keep": 4, "num_thread": 8, "numa": False, "low_vram": True, "f16_kv": True,
    "vocab_only": False, "logits_all": False, "use_mmap": True, "use_mlock": False, "draft_num_predict": 4,
    "max_tokens": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE_OPTIONS)
def test_an_option_that_ollama_ignores_is_ignored_and_named(name: str) -> None:
    options = {name: IDLE_OPTIONS[name], "temperature": 0}
    for api, asked in ((ollama.CHAT, CHAT), (ollama.GENERATE, {"prompt": "Hi"})):
        given = {**asked, "options": options}
        assert api.read(given) == api.read({**asked, "options": {"temperature": 0}})
        assert api.ignored(given) == [f"options.{name}"]


def test_top_level_fields_that_ollama_ignores_are_ignored_and_named() -> None:
    more = {"logit_bias": {}, "truncate": True, "shift": False, "keep_alive": "-1m", "options": None}
    assert ollama.CHAT.read({**CHAT, **more}) == ollama.CHAT.read(CHAT)
    assert ollama.CHAT.ignored({**CHAT, **more}) == ["logit_bias", "truncate", "shift"]
    embed = {"model": "m", "input": "a", "options": {"num_ctx": 1}, "keep_alive": 0}
    assert ollama.EMBED.read(embed) == {"model": "m", "input": "a"}
    assert ollama.EMBED.ignored(embed) == ["options", "keep_alive"]
    assert ollama.SHOW.ignored({"model": "m", "system": "s"}) == ["system"]


@pytest.mark.parametrize(
    ("options", "body", "named"),
    [
        ({"num_predict": 0}, {}, ["options.num_predict"]),
        ({"num_predict": -1}, {}, []),
        ({"num_predict": -2}, {}, []),
        ({"num_predict": -128}, {}, []),
        ({"num_predict": 5.0}, {"max_tokens": 5}, []),
        ({"seed": -1}, {}, []),
        ({"seed": 0}, {"seed": 0}, []),
        ({"mirostat": None}, {}, []),
        ({"stop": []}, {"stop": []}, []),
    ],
)
def test_values_of_options_mean_what_they_do_in_ollama(
    options: dict[str, Any], body: dict[str, Any], named: list[str]
) -> None:
    given = {**CHAT, "options": options}
    assert ollama.CHAT.read(given) == {**ollama.CHAT.read(CHAT), **body}
    assert ollama.CHAT.ignored(given) == named


def test_model_to_show_is_named() -> None:
    assert [read_show({name: "m:latest"}) for name in ("model", "name")] == [{"model": "m"}] * 2


ACCEPTED = {
    "type": "accepted", "attempt": 1, "frame": 0, "model": "m", "created": 9, "answer_format": "hermes"
}  # fmt: skip


def frames(*texts: str, chat: bool = True) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [ACCEPTED]
    for text in texts:
        content: Any = {"delta": {"content": text}} if chat else {"text": text}
        choice = {"index": 0, "first": 0, "count": 1, **content, "finish_reason": None}
        made.append({"type": "delta", "choices": [choice]})
    ended = {"index": 0, "tokens": 2, "finish_reason": "stop"}
    about = {"model": "m", "created": 9, "usage": USAGE, "timings": TIMINGS}
    return [*made, {"type": "done", "choices": [ended], **about}]


def lines(body: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    chat = "messages" in body
    made = Lines(read_call({**body, "model": "m"}, chat=chat, request_id="r"), chat=chat)
    sent = [made.write(made.convert(0, frame)) for frame in frames(*texts, chat=chat)]
    return [json.loads(line) for line in (b"".join(sent) + made.end(None)).splitlines()]


def test_the_lines_of_a_stream() -> None:
    assert lines(read(CHAT, OllamaChatRequest), "Hel", "lo") == [
        {**HEAD, "message": {"role": "assistant", "content": "Hel"}, "done": False},
        {**HEAD, "message": {"role": "assistant", "content": "lo"}, "done": False},
        {**HEAD, "message": {"role": "assistant", "content": ""}, **ENDING},
    ]
    assert lines(read({"prompt": "x", "raw": True}, OllamaGenerateRequest), "Hel") == [
        {**HEAD, "response": "Hel", "done": False},
        {**HEAD, "response": "", **ENDING},
    ]


def test_a_call_is_whole_in_its_line() -> None:
    called = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    got = lines(read({**CHAT, "tools": [TOOL]}, OllamaChatRequest), called[:20], called[20:])
    assert [line["message"].get("tool_calls") for line in got] == [
        [{"function": {"name": "f", "arguments": {"x": 1}}}],
        None,
    ]


def test_plain_answer_has_ollamas_form() -> None:
    call = read_call(read({**CHAT, "stream": False}, OllamaChatRequest), chat=True, request_id="r")
    answered = {"role": "assistant", "content": "Hello"}
    choice = {"index": 0, "message": answered, "logprobs": None, "finish_reason": "stop"}
    native = {"created": 9, "model": "m", "choices": [choice], "usage": USAGE, "timings": TIMINGS}
    assert ollama.whole_answer(call, [native], (), chat=True) == {**HEAD, "message": answered, **ENDING}


def test_errors_have_ollamas_form() -> None:
    body = ollama.error_body(BadRequest("wrong"))
    call = read_call(read(CHAT, OllamaChatRequest), chat=True, request_id="r")
    assert (body, Lines(call, chat=True).end(body)) == ({"error": "wrong"}, b'{"error":"wrong"}\n')


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": SCHEMA}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ASKED_WITH_BOTH: dict[str, Any] = {
    "ollama": read(
        {
            "model": "m",
            "messages": TURNS,
            "format": SCHEMA,
            "tools": [{"type": "function", "function": FUNCTION}],
        },
        OllamaChatRequest,
    ),
    "anthropic": anthropic.read(
        {
            "model": "m",
            "max_tokens": 9,
            "messages": TURNS,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        }
    ),
    "responses": responses.read(
        {
            "model": "m",
            "input": "Hi",
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        }
    ),
}


@pytest.mark.parametrize("api", ASKED_WITH_BOTH)
def test_tools_and_the_form_of_the_text_are_one_request_in_every_api(api: str) -> None:
    body = ASKED_WITH_BOTH[api]
    chat = {"tools": [{"type": "function", "function": FUNCTION}], "response_format": FORM}
    assert grammar_of({name: body[name] for name in chat}) == grammar_of(chat)
    assert "answer: text | calls" in json.loads(grammar_of(chat))["source"]
