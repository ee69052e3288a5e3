"""The OpenAPI document describes every path of the gateway and every answer it can give.

COMPONENTS are the JSON Schemas of requests and answers. Their limits are the tokenizer's, and a test holds
them equal (tests/unit/services/gateway/test_openapi.py).
"""

from __future__ import annotations

from typing import Any

from services.gateway.openai_request import MAX_PROMPTS

Json = dict[str, Any]
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKENS: Schema = {"type": "array", "items": COUNT}

_WHY = {
    400: "a field is wrong; `param` names it",
    401: "no API key, or one that is not known",
    403: "the credentials do not allow this, or the class that `slo_class` names",
    404: "no such model",
    408: "the body did not come in time",
    409: "a request with this id is running",
    413: "the body is too large",
    415: "the body does not say that it is JSON",
    422: "the body is JSON, but not an object",
    429: "too many requests wait; come back after `Retry-After`",
    499: "cancelled",
    500: "a service failed on this request",
    503: "nobody is there to serve it; come back after `Retry-After`",
    504: "the time limit of the request has passed",
}
_ASKING = (400, 401, 404, 408, 413, 415, 422, 500, 503, 504)


def document(version: str) -> Json:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": "The OpenAI API over the actors of one NATS server. Nothing but a translation.",
        },
        "paths": _paths(),
        "components": {
            "schemas": COMPONENTS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> Json:
    generating = (*_ASKING, 403, 409, 429, 499)
    return {
        "/v1/chat/completions": {"post": _post("Chat", "answer a conversation", generating, stream=True)},
        "/v1/completions": {"post": _post("Completion", "continue a prompt", generating, stream=True)},
        "/v1/models": {"get": _get("Models", "the models served", (401, 500, 503, 504))},
        "/v1/models/{model}": {
            "get": {
                **_get("Model", "one of them", (401, 404, 500, 503, 504)),
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            }
        },
        "/tokenize": {"post": _post("Tokenize", "the token ids of a prompt", _ASKING)},
        "/detokenize": {"post": _post("Detokenize", "the text of token ids", _ASKING)},
        "/health": {"get": _state("would a request succeed now?")},
        "/ready": {"get": _state("does this gateway take requests?")},
        "/version": {"get": {"summary": "the version", "responses": {"200": _json("Version", "it")}}},
        "/metrics": {
            "get": {
                "summary": "for Prometheus; where there are keys, with the operator's",
                "security": [{}, {"key": []}],
                "responses": {"200": _content("text/plain", "figures"), **_errors((401, 403))},
            }
        },
        "/openapi.json": {
            "get": {"summary": "this document", "responses": {"200": _content("application/json", "it")}}
        },
    }


def _post(name: str, summary: str, errors: tuple[int, ...], *, stream: bool = False) -> Json:
    good = _json(f"{name}Answer", "the answer")
    if stream:
        good["content"]["text/event-stream"] = {"schema": {}}  # chunks, then [DONE]
    return {
        "summary": summary,
        "operationId": name.lower(),
        "security": [{}, {"key": []}],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(f"{name}Request")}},
        },
        "responses": {"200": good, **_errors(errors)},
    }


def _get(name: str, summary: str, errors: tuple[int, ...]) -> Json:
    return {
        "summary": summary,
        "operationId": name.lower(),
        "security": [{}, {"key": []}],
        "responses": {"200": _json(name, "the answer"), **_errors(errors)},
    }


def _state(summary: str) -> Json:
    return {"summary": summary, "responses": {"200": _json("State", "yes"), "503": _json("State", "no: why")}}


def _errors(codes: tuple[int, ...]) -> Json:
    return {str(code): _json("Error", _WHY[code]) for code in sorted(codes)}


def _json(name: str, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _content(media_type: str, description: str) -> Json:
    return {"description": description, "content": {media_type: {"schema": {}}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _number(least: float, most: float, kind: str = "number", **more: Any) -> Schema:
    return {"type": kind, "minimum": least, "maximum": most, **more}


def _one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def _object(required: list[str], properties: dict[str, Schema], *, extra: bool = False) -> Schema:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": extra,
    }


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


# Fields of both kinds of request, beside the prompt and the log probabilities.
COMMON: dict[str, Schema] = {
    "model": {"type": "string", "minLength": 1, "description": "may be left out where only one is served"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "max_completion_tokens": {"type": "integer", "minimum": 1},
    "n": _number(1, 64, "integer"),
    "temperature": _number(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _number(-1, 2**31 - 1, "integer"),
    "min_p": _number(0, 1),
    "seed": {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**64},
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": 256},
            {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16},
        ]
    },
    "stop_token_ids": {"type": "array", "items": COUNT, "maxItems": 64},
    "ignore_eos": {"type": "boolean"},
    "include_stop_str_in_output": {"type": "boolean"},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 10),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
        "additionalProperties": _number(-100, 100),
        "maxProperties": 1024,
    },
    "stream": {"type": "boolean"},
    "stream_options": _object(
        [], {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}}
    ),
    "user": TEXT,
    "request_id": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
    "slo_class": _one_of("interactive", "standard", "batch"),
    "finish_detached": {"type": "boolean"},
    "logits_processors": {"type": "array", "maxItems": 8},
    "tools": {"type": "array", "maxItems": 128},
    "tool_choice": {
        "anyOf": [_one_of("none", "auto", "required"), {"type": "object", "required": ["type", "function"]}]
    },
    "response_format": {"type": "object", "description": "text, json_object or json_schema"},
    "structured_outputs": {"type": "object", "description": "json, regex, choice, grammar or json_object"},
    "grammar": {"type": "string", "description": "EBNF with a rule root"},
    "metadata": {},
    "store": {},
    "service_tier": {},
    "parallel_tool_calls": {},
    "safety_identifier": {},
}
# Fields that are known and can ask for what happens anyway, no more.
NOT_YET: dict[str, Schema] = {
    "functions": _one_of([]),
    "prompt_logprobs": _one_of(False, 0),
    "suffix": _one_of(""),
    "best_of": _one_of(1),
    "modalities": _one_of(["text"]),
}
_MESSAGE = _object(
    ["role"],
    {
        "role": {"type": "string", "pattern": "^[A-Za-z_-]{1,32}$"},
        "content": {
            "anyOf": [
                TEXT,
                {"type": "null"},
                {
                    "type": "array",
                    "items": _object(["type", "text"], {"type": _one_of("text"), "text": TEXT}, extra=True),
                },
            ]
        },
    },
    extra=True,
)
CHAT_FIELDS: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 4096},
    "add_generation_prompt": {"type": "boolean"},
    "logprobs": {"type": "boolean"},
    "top_logprobs": _number(0, 20, "integer"),
    "echo": _one_of(False),
}
COMPLETION_FIELDS: dict[str, Schema] = {
    "prompt": {
        "anyOf": [
            TEXT,
            _TOKENS,
            {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
            {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS},
        ]
    },
    "add_generation_prompt": {"type": "boolean"},
    "logprobs": _number(0, 20, "integer"),
    "echo": {"type": "boolean", "description": "not together with logprobs"},
}


def _request(required: str, own: dict[str, Schema]) -> Schema:
    fields = {**COMMON, **NOT_YET, **own}
    return _object(
        [required],
        {name: schema if name == required else _or_null(schema) for name, schema in fields.items()},
    )


_MODEL_NAME = _or_null(COMMON["model"])
_USAGE = _object(
    ["prompt_tokens", "completion_tokens", "total_tokens"],
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object(["cached_tokens"], {"cached_tokens": COUNT}),
    },
)
_REASON = _one_of("stop", "length", "tool_calls")
_LOGPROBS: Schema = {"anyOf": [{"type": "object"}, {"type": "null"}]}


def _answer(kind: str, content: dict[str, Schema]) -> Schema:
    choice = {"index": COUNT, **content, "logprobs": _LOGPROBS, "finish_reason": _REASON}
    return _object(
        ["id", "object", "created", "model", "choices", "usage"],
        {
            "id": TEXT,
            "object": _one_of(kind),
            "created": COUNT,
            "model": TEXT,
            "choices": {"type": "array", "items": _object(list(choice), choice)},
            "usage": _USAGE,
            "timings": {"type": "object", "description": "milliseconds, and tokens a second"},
        },
    )


_ASSISTANT = _object(
    ["role", "content"],
    {
        "role": _one_of("assistant"),
        "content": {"type": ["string", "null"]},
        "refusal": {"type": "null"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
)
_MODEL = _object(
    ["id", "object", "created", "owned_by"],
    {"id": TEXT, "object": _one_of("model"), "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT},
)
_ERROR = _object(
    ["message", "type", "param", "code"],
    {
        "message": TEXT,
        "type": TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
        "request_id": TEXT,
    },
)

COMPONENTS: dict[str, Schema] = {
    "ChatRequest": _request("messages", CHAT_FIELDS),
    "CompletionRequest": _request("prompt", COMPLETION_FIELDS),
    "ChatAnswer": _answer("chat.completion", {"message": _ASSISTANT}),
    "CompletionAnswer": _answer("text_completion", {"text": TEXT}),
    "Model": _MODEL,
    "Models": _object(
        ["object", "data"],
        {
            "object": _one_of("list"),
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
    ),
    "TokenizeRequest": {
        "anyOf": [
            _object(["prompt"], {"model": _MODEL_NAME, "prompt": {"anyOf": [TEXT, _TOKENS]}}),
            _object(
                ["messages"],
                {
                    "model": _MODEL_NAME,
                    "messages": CHAT_FIELDS["messages"],
                    "add_generation_prompt": _or_null({"type": "boolean"}),
                },
            ),
        ]
    },
    "TokenizeAnswer": _object(
        ["model", "count", "tokens"], {"model": TEXT, "count": COUNT, "tokens": _TOKENS}
    ),
    "DetokenizeRequest": _object(["tokens"], {"model": _MODEL_NAME, "tokens": _TOKENS}),
    "DetokenizeAnswer": _object(["model", "prompt"], {"model": TEXT, "prompt": TEXT}),
    "State": _object(["status"], {"status": _one_of("ok", "unavailable"), "reason": TEXT}),
    "Version": _object(["version"], {"version": TEXT}),
    "Error": _object(["error"], {"error": _ERROR}),
}
