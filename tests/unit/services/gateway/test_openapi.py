"""The OpenAPI document tells the truth: the fields and limits are the tokenizer's, and it is valid."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from services.gateway import openapi
from services.gateway.openapi import CHAT_FIELDS, COMMON, COMPLETION_FIELDS, COMPONENTS, NOT_YET, document
from services.tokenizer import request as native
from services.tokenizer.request import GenerateRequest, read_request
from shared.codec import MAX_PROCESSORS
from shared.errors import BadRequest

OWN = {**COMMON, **NOT_YET, **CHAT_FIELDS, **COMPLETION_FIELDS}
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def test_every_field_of_a_request_is_described() -> None:
    assert set(OWN) == native._KNOWN - {"audio"}


def test_the_limits_are_the_tokenizers() -> None:
    theirs = GenerateRequest.model_json_schema()["properties"]
    for name, schema in COMMON.items():
        if set(LIMITS) & set(schema):
            their = theirs[name].get("anyOf", [theirs[name]])[0]
            assert {k: schema[k] for k in LIMITS if k in schema} == {
                k: their[k] for k in LIMITS if k in their
            }
    text, texts = COMMON["stop"]["anyOf"]
    assert (text["maxLength"], texts["maxItems"]) == (native.MAX_STOP_CHARS, native.MAX_STOPS)
    assert COMMON["stop_token_ids"]["maxItems"] == native.MAX_STOP_IDS
    assert COMMON["logit_bias"]["maxProperties"] == native.MAX_BIASES
    assert COMMON["request_id"]["pattern"] == native.REQUEST_ID
    assert COMMON["logits_processors"]["maxItems"] == MAX_PROCESSORS
    assert CHAT_FIELDS["messages"]["maxItems"] == native.MAX_MESSAGES
    assert CHAT_FIELDS["top_logprobs"]["maximum"] == native.MAX_LOGPROBS
    assert COMPLETION_FIELDS["logprobs"]["maximum"] == native.MAX_LOGPROBS


def test_what_is_not_there_yet_is_described_so() -> None:
    for name, schema in NOT_YET.items():
        for value in schema["enum"]:
            read_request({"prompt": "p", name: value})
        with pytest.raises(BadRequest, match="is not supported yet"):
            read_request({"prompt": "p", name: "more"})


@pytest.mark.parametrize("name", sorted(COMPONENTS))
def test_the_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(COMPONENTS[name])


def test_every_reference_leads_somewhere() -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    described = document("1")
    found = set(references(described))
    assert found == {f"#/components/schemas/{name}" for name in COMPONENTS}
    assert described["paths"]["/v1/completions"]["post"]["responses"].keys() >= {"200", "429", "503", "504"}


def test_a_request_of_the_official_client_is_valid() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "n": None}
    jsonschema.validate(body, COMPONENTS["ChatRequest"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "max_tokns": 3}, openapi.COMPONENTS["ChatRequest"])
