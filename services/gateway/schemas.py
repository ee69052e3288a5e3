"""JSON Schemas of requests and answers, for the OpenAPI document. The limits are the tokenizer's, and a test
holds them equal (tests/unit/test_gateway_openapi.py)."""

from __future__ import annotations

from typing import Any

from services.gateway.calls import MAX_PROMPTS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKENS: Schema = {"type": "array", "items": COUNT}


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
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
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
    {"id": TEXT, "object": _one_of("model"), "created": COUNT, "owned_by": TEXT},
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
