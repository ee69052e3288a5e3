"""`document` builds the OpenAPI document: every path of the gateway with its requests and answers.

The JSON Schemas of requests come from the models that the tokenizer validates with (shared/api.py). `Part` is
what a module of the table in app.py adds to the paths of the gateway and to this document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from shared.api import ChatRequest, CompletionRequest, EmbeddingRequest
from shared.openai.call import MAX_INPUTS, MAX_PROMPTS

Json = dict[str, Any]
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKENS: Schema = {"type": "array", "items": COUNT}

_WHY = {
    400: "a field is wrong; `param` names it",
    401: "no API key, or an unknown one",
    403: "the credentials do not allow this, or the class that `slo_class` names",
    404: "no such model",
    408: "the body did not arrive in time",
    409: "a request with this id is running",
    410: "it was kept for a day, which has passed",
    413: "the body is too large",
    415: "the content type of the body is not JSON, or it has a content encoding",
    422: "the body is JSON, but not an object",
    429: "too many requests wait; try again after `Retry-After`",
    499: "cancelled",
    500: "a service failed on this request",
    503: "no service is ready for it; try again after `Retry-After`",
    504: "the time limit of the request has passed",
}
LISTING = (401, 500, 503, 504)
LOOKING = (400, 401, 404, 410, 429, 500, 503, 504)
ASKING = (400, 401, 404, 408, 413, 415, 422, 500, 503, 504)
GENERATING = (*ASKING, 403, 409, 429, 499)

ID: Json = {"name": "id", "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}


_LAST_ID: Json = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": TEXT,
    "description": "the `id` of an event: a stream has those after it",
}
_STREAMS: list[Json] = [
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": {**COUNT, "maximum": 10**16 - 1}},
]


@dataclass(frozen=True, slots=True)
class Part:
    """One more API of the gateway. Its routes come first, and so do its descriptions of their paths."""

    name: str
    routes: Callable[[Any], list[Route]]  # of the `Endpoints` of app.py
    paths: Json
    schemas: dict[str, Schema]
    requests: Sequence[type[BaseModel]] = field(default=())


def document(version: str, parts: Sequence[Part]) -> Json:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": "The OpenAI API, and other APIs, over the actors of one NATS server.",
        },
        "paths": _paths({path: described for part in parts for path, described in part.paths.items()}),
        "components": {
            "schemas": _components(parts),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _paths(of_parts: Json) -> Json:
    return {
        "/v1/chat/completions": {"post": CHAT},
        "/v1/completions": {"post": COMPLETION},
        "/v1/embeddings": {"post": post("Embedding", "the vectors of texts", GENERATING)},
        **of_parts,
        "/v1/models": {"get": get("Models", "the models served", LISTING)},
        "/v1/models/{model}": {
            "get": get("Model", "one served model", (401, 404, 500, 503, 504)),
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}
            ],
        },
        "/tokenize": {"post": post("Tokenize", "the token ids of a prompt", ASKING)},
        "/detokenize": {"post": post("Detokenize", "the text of token ids", ASKING)},
        "/health": {"get": _state("would a request succeed now?")},
        "/ready": {"get": _state("does this gateway accept requests?")},
        "/version": {
            "get": {"summary": "the version", "responses": {"200": body_of("Version", "the version")}}
        },
        "/metrics": {
            "get": {
                "summary": "metrics for Prometheus; if there are keys, only with the operator's key",
                "security": [{}, {"key": []}],
                "responses": {"200": content("text/plain", "metrics"), **_errors((401, 403))},
            }
        },
        "/openapi.json": {
            "get": {"summary": "this document", "responses": {"200": content("application/json", "OpenAPI")}}
        },
    }


def post(name: str, summary: str, errors: tuple[int, ...], *, stream: bool = False, api: str = "") -> Json:
    """`api` has errors of its own shape; empty: OpenAI's."""
    body = {"required": True, "content": {"application/json": {"schema": ref(f"{name}Request")}}}
    asked = {**get(name, summary, errors, api), "requestBody": body}
    asked["responses"]["200"] = good = body_of(f"{name}Answer", "the answer")
    if stream:
        media_type = "application/x-ndjson" if api == "Ollama" else "text/event-stream"
        good["content"][media_type] = {"schema": {}}
    return asked


def stored(name: str, summary: str, *, failing: bool = False) -> Json:
    """An answer that may be read later. `failing`: the error of the request is that of this path."""
    errors = (*LOOKING, 403, 408, 409, 413, 499) if failing else LOOKING
    got = {**get(f"{name}Answer", summary, errors), "operationId": f"stored{name.lower()}"}
    got["parameters"] = [_LAST_ID, *([] if failing else _STREAMS)]
    got["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    got["responses"]["204"] = {"description": "the reader has all events"}
    if failing:
        got["responses"]["202"] = body_of("Accepted", "it waits or runs")
    return got


def get(name: str, summary: str, errors: tuple[int, ...], api: str = "") -> Json:
    return {
        "summary": summary,
        "operationId": name.lower(),
        "security": [{}, {"key": []}, {"x_api_key": []}],
        "responses": {"200": body_of(name, "the answer"), **_errors(errors, api)},
    }


def _state(summary: str) -> Json:
    return {
        "summary": summary,
        "responses": {"200": body_of("State", "yes"), "503": body_of("State", "no: why")},
    }


def _errors(codes: tuple[int, ...], api: str = "") -> Json:
    return {str(code): body_of(f"{api}Error", _WHY[code]) for code in sorted(codes)}


def body_of(name: str, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(name)}}}


def content(media_type: str, description: str) -> Json:
    return {"description": description, "content": {media_type: {"schema": {}}}}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def object_of(*optional: str, **fields: Schema) -> Schema:
    """An object with these fields and no others; fields that are not `optional` are required."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": False}


def or_null(schema: Schema) -> Schema:
    null = {"type": "null"}
    return schema if null in schema.get("anyOf", ()) else {"anyOf": [schema, null]}


def _either(name: str, idle: list[object], other: str, needed: list[object]) -> Schema:
    """A field has an `idle` value or is absent, or the `other` field has one of these values."""
    absent = [] if None in needed else [other]
    return {
        "anyOf": [
            {"properties": {name: one_of(*idle)}},
            {"properties": {other: one_of(*needed)}, "required": absent},
        ]
    }


def _or_several(kinds: list[Schema], most: int) -> list[Schema]:
    return kinds + [{"type": "array", "items": each, "minItems": 1, "maxItems": most} for each in kinds]


def _requests(more: Sequence[type[BaseModel]]) -> dict[str, Schema]:
    """The models of shared/api.py with the additions of HTTP: null for any field but the prompt, also for one
    that is not known; several prompts and `echo` of a completion."""
    kinds: list[type[BaseModel]] = [ChatRequest, CompletionRequest, EmbeddingRequest, *more]
    schemas: dict[str, Schema]
    named = [(kind, "validation") for kind in kinds]
    schemas = models_json_schema(named, ref_template="#/components/schemas/{model}")[1]["$defs"]  # type: ignore[arg-type]  # a text for a literal
    chat, completion = (schemas[kind.__name__]["properties"] for kind in (ChatRequest, CompletionRequest))
    prompts = completion["prompt"]["anyOf"]
    completion["prompt"]["anyOf"] = _or_several(prompts, MAX_PROMPTS)
    given = schemas["EmbeddingRequest"]["properties"]["input"]
    given["anyOf"] = _or_several(given["anyOf"], MAX_INPUTS)
    completion["echo"] = {"type": "boolean", "description": "start with the prompt; not with `logprobs`"}
    for schema in schemas.values():
        fields, required = schema.get("properties", {}), schema.get("required", ())
        fields |= {field: or_null(each) for field, each in fields.items() if field not in required}
    for name in (kind.__name__ for kind in kinds):
        if schemas[name].get("additionalProperties") is False:
            schemas[name]["additionalProperties"] = {"type": "null"}
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["allOf"] = [_either("stream_options", [None], "stream", [True])]
    schemas["ChatRequest"]["allOf"] += [
        _either("top_logprobs", [None, 0], "logprobs", [True]),
        _either("continue_final_message", [None, False], "add_generation_prompt", [None, False]),
    ]
    optional = (
        *("model", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("chat_template_kwargs", "reasoning_effort", "tools"),
    )
    schemas["TokenizeRequest"] = {
        "anyOf": [
            object_of("model", model=chat["model"], prompt={"anyOf": prompts}),
            object_of(*optional, **{name: chat[name] for name in ("messages", *optional)}),
        ]
    }
    schemas["DetokenizeRequest"] = {
        **object_of("model", model=chat["model"], tokens=prompts[1]),
        "additionalProperties": True,  # without effect
    }
    return schemas


_USAGE = object_of(
    "prompt_tokens_details",
    "completion_tokens_details",
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT),
    prompt_tokens_details=object_of(cached_tokens=COUNT),
    completion_tokens_details=object_of(reasoning_tokens=COUNT),
)


def _answer(kind: str, **content: Schema) -> Schema:
    logprobs = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    reason = one_of("stop", "length", "tool_calls")
    choice = object_of(
        "stop_reason", index=COUNT, **content, logprobs=logprobs, finish_reason=reason, stop_reason=TEXT
    )
    return object_of(
        "timings",
        id=TEXT,
        object=one_of(kind),
        created=COUNT,
        model=TEXT,
        choices={"type": "array", "items": choice},
        usage=_USAGE,
        timings={"type": "object", "description": "milliseconds, and tokens a second"},
    )


_ASSISTANT = object_of(
    "refusal",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    role=one_of("assistant"),
    content=WORD,
    refusal={"type": "null"},
    reasoning_content=TEXT,
    reasoning=TEXT,
    tool_calls={"type": "array", "items": {"type": "object"}},
)
_ERROR = object_of("request_id", message=TEXT, type=TEXT, param=WORD, code=WORD, request_id=TEXT)

_NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
_COMPONENTS: dict[str, Schema] = {
    "ChatAnswer": _answer("chat.completion", message=_ASSISTANT),
    "CompletionAnswer": _answer("text_completion", text=TEXT),
    "EmbeddingAnswer": object_of(
        object=one_of("list"),
        data={
            "type": "array",
            "items": object_of(
                object=one_of("embedding"), index=COUNT, embedding={"anyOf": [_NUMBERS, TEXT]}
            ),
        },
        model=TEXT,
        usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "Model": object_of(
        *("max_model_len", "root", "state", "targets"),
        id=TEXT,
        object=one_of("model"),
        created=COUNT,
        owned_by=TEXT,
        root=TEXT,
        max_model_len=COUNT,
        state=TEXT,
        targets={"type": "array", "items": object_of("state", model=TEXT, weight=COUNT, state=TEXT)},
    ),
    "Models": object_of(object=one_of("list"), data={"type": "array", "items": ref("Model")}),
    "TokenizeAnswer": object_of(model=TEXT, count=COUNT, tokens=_TOKENS),
    "DetokenizeAnswer": object_of(model=TEXT, prompt=TEXT),
    "State": object_of("reason", status=one_of("ok", "unavailable"), reason=TEXT),
    "Version": object_of(version=TEXT),
    "Error": object_of(error=_ERROR),
}
CHAT = post("Chat", "answer a conversation", GENERATING, stream=True)
COMPLETION = post("Completion", "continue a prompt", GENERATING, stream=True)


def _components(parts: Sequence[Part]) -> dict[str, Schema]:
    """The JSON Schemas by name."""
    requests = _requests([kind for part in parts for kind in part.requests])
    return requests | _COMPONENTS | {name: schema for part in parts for name, schema in part.schemas.items()}
