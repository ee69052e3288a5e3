"""The OpenAPI document is true: it takes what the gateway and the tokenizer take, field by field."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from services.gateway.app import DOCUMENT
from services.gateway.dialects import anthropic
from services.gateway.dialects.responses import RESPONSES
from services.gateway.native_call import fields_of
from services.tokenizer.prepare import read_request
from shared.api import ChatRequest, CompletionRequest
from shared.errors import BadRequest
from shared.openai.call import read_call

COMPONENTS = DOCUMENT["components"]["schemas"]
CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
COMPLETION = {"model": "m", "stream": True, "prompt": "p"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
# What clients put in the place of anything: the ends of each bound, and what is beyond.
VALUES: list[Any] = [
    *(None, -(2**63) - 1, -(2**63), -3, -2, -1, 0, 1, 2, 10, 11, 20, 21, 64, 65, 101, 86_400, 86_401, 2**31),
    *(
        2**31 - 1,
        2**64 - 1,
        2**64,
        -2.5,
        0.005,
        0.5,
        1.5,
        2.5,
        True,
        False,
        "",
        "x",
        "a b",
        "x" * 257,
        "auto",
    ),
    *(
        "batch",
        "5",
        [],
        [1],
        ["a"],
        [""],
        [[]],
        [[1], []],
        ["a"] * 9,
        ["a"] * 17,
        [1] * 65,
        ["p"] * 65,
        [True],
    ),
    *(["text"], [{"name": "p", "x": 1}], [{"name": "p", "args": {}}], {}, {"5": 100}, {"5": 101}, {"a": 1}),
    *({"include_usage": True}, {"include_usage": 1}, {"x": True}, {"type": "json_object"}),
    *({"type": "json_object", "x": 1}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}),
    *({"type": "json_schema", "json_schema": {"schema": {}, "name": "n"}}, {"regex": "a"}, {"regex": 1}),
    *({"choice": []}, {"choice": ["a"]}, {"choice": [""]}, {"json": {}, "regex": "a"}, {"json_object": True}),
    *(
        {"json_object": 1},
        {"json_object": False},
        FUNCTION,
        {"type": "function"},
        [FUNCTION],
        [FUNCTION] * 129,
    ),
    *([{**FUNCTION, "type": "f"}], [{"type": "function", "function": {"name": "a b", "parameters": {}}}]),
    *(
        [{"role": "user"}],
        [{"role": "a b"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5, "name": "n"}],
    ),
    *([{"role": "user", "content": [{"type": part, "text": "a"}]}] for part in ("text", "image_url")),
]


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": COMPONENTS}}
    return jsonschema.Draft202012Validator(schema)


def valid(name: str, body: dict[str, Any]) -> bool:
    return bool(validator(name).is_valid(body))


def taken(body: dict[str, Any], *, chat: bool) -> bool:
    """By gateway and tokenizer, before a model and its vocabulary are asked."""
    try:
        for native in read_call(fields_of(json.dumps(body).encode()), chat=chat, request_id="r").bodies:
            read_request(native)
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_the_document_takes_what_is_taken(kind: type, body: dict[str, Any]) -> None:
    fields = COMPONENTS[kind.__name__]["properties"]
    assert fields.keys() | {"top_logprobs"} == kind.model_fields.keys() | {"top_logprobs"}
    outcomes = {True: 0, False: 0}
    for field, value in ((field, value) for field in fields for value in VALUES):
        asked = {**body, field: value}
        if value == "" and field in ("response_format", "structured_outputs"):
            continue
        found = taken(asked, chat=kind is ChatRequest)
        assert valid(kind.__name__, asked) == found, asked
        outcomes[found] += 1
    assert min(outcomes.values()) > 500  # the values are worth their time


def test_the_document_takes_the_tools_of_other_apis_as_they_do() -> None:
    client = {"name": "f", "input_schema": {"type": "object"}}
    custom, bare, server = {**client, "type": "custom"}, {"type": "custom"}, {"type": "web_search_20250305"}
    function, search = {"type": "function", "name": "f"}, {"type": "web_search"}
    space = {"type": "namespace", "name": "n", "tools": [function, {"type": "custom", "name": "p"}]}
    empty, nameless = {**space, "tools": []}, {"type": "namespace", "tools": [function]}
    turns: Any = [{"role": "user", "content": "x"}]
    asked: list[tuple[Any, str, dict[str, Any], list[list[Any]]]] = [
        (
            anthropic.COUNT.read,
            "CountTokensRequest",
            {"messages": turns},
            [[], [client], [server], [server, client], [custom], [bare], [5]],
        ),
        (
            RESPONSES.read,
            "ResponseRequest",
            {"input": turns},
            [[], [function], [search], [search, function], [space], [search, space], [empty], [nameless]],
        ),
    ]
    for read, name, body, table in asked:
        outcomes = []
        for tools in table:
            try:
                read({**body, "tools": tools})
                outcomes.append(True)
            except BadRequest:
                outcomes.append(False)
            assert valid(name, {**body, "tools": tools}) == outcomes[-1], tools
        assert {*outcomes} == {True, False}


def test_each_field_has_a_description() -> None:
    bare = [
        field
        for kind in (ChatRequest, CompletionRequest)
        for field, schema in COMPONENTS[kind.__name__]["properties"].items()
        if not {"description", "$ref"} & {key for part in (schema, *schema.get("anyOf", ())) for key in part}
    ]
    assert bare == []


@pytest.mark.parametrize("name", sorted(COMPONENTS))
def test_the_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(COMPONENTS[name])


def test_every_reference_leads_somewhere() -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    described = DOCUMENT
    found = set(references(described))
    assert found == {f"#/components/schemas/{name}" for name in COMPONENTS}
    assert described["paths"]["/v1/completions"]["post"]["responses"].keys() >= {"200", "429", "503", "504"}


@pytest.mark.parametrize(
    ("more", "right"),
    [
        ({}, True),
        ({"metadata": None, "webhook": None}, True),
        ({"metadata": {"a": "b"}, "webhook": "https://a.example/"}, True),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3_600}}, True),
        ({"output_expires_after": {"seconds": 1}}, False),
        ({"metadata": {"a": 1}}, False),
        ({"input_file_id": None}, False),
        ({"colour": "red"}, False),
    ],
)
def test_document_takes_a_batch_when_the_keeper_takes_it(more: dict[str, Any], right: bool) -> None:
    fields = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h", **more}
    assert valid("BatchRequest", fields) is right


def test_no_default_is_named_where_a_model_may_state_another() -> None:
    """A client that fills in the defaults of the document would override the model's."""
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    schemas = COMPONENTS
    for kind in ("ChatRequest", "CompletionRequest", "ResponseRequest", "Options", "MessagesRequest"):
        found = {name: schemas[kind]["properties"].get(name, {}).get("anyOf", ()) for name in fields}
        assert found["temperature"]
        assert [name for name, ways in found.items() if any("default" in way for way in ways)] == [], kind


def test_an_unknown_field_is_refused() -> None:
    assert valid("ChatRequest", {**CHAT, "n": None, "temperature": None})
    assert not valid("ChatRequest", {**CHAT, "max_tokns": 3})
