"""`Operation`: a line of the table of paths. `document` builds the OpenAPI document from all of them.

The JSON Schemas of requests come from the models that the tokenizer validates with (shared/api.py). `Part` is
what a module of the table in app.py adds: lines, and the schemas of their requests and answers.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from shared.api import ChatRequest, CompletionRequest, EmbeddingRequest
from shared.errors import HeadraceError
from shared.openai.call import MAX_INPUTS, MAX_PROMPTS, error_body

Json = dict[str, Any]
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": ["string", "null"]}
EVENTS = "text/event-stream"
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
FINDING = (*LISTING, 404)
LOOKING = (400, 401, 404, 410, 429, 500, 503, 504)
ASKING = (400, 401, 404, 408, 413, 415, 422, 500, 503, 504)
GENERATING = (*ASKING, 403, 409, 429, 499)

_VARIABLE: Json = {"required": True, "schema": {**TEXT, "minLength": 1}}
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
class Operation:
    """A line of the table of paths."""

    verb: str
    path: str  # a variable part may be `{name:path}`, with slashes in it
    handler: Callable[..., Awaitable[Response]]  # of the `owner` of its part, and the request
    described: Json | None = None  # None: it is no part of the API, and counts as `other`


@dataclass(frozen=True, slots=True)
class Part:
    """Lines that belong together, with the answers that they describe."""

    operations: Sequence[Operation]
    schemas: dict[str, Schema] = field(default_factory=dict)
    requests: Sequence[type[BaseModel]] = ()
    owner: Callable[[Any], Any] = lambda endpoints: endpoints  # what handlers get, of a gateway's Endpoints
    error_body: Callable[[HeadraceError, str], Json] = error_body  # an error in the shape of this API


def document(version: str, parts: Sequence[Part]) -> Json:
    """OpenAPI 3.1. The first of two lines with one path and verb counts."""
    paths: Json = {}
    for path, verb, described in ((o.path, o.verb, o.described) for p in parts for o in p.operations):
        if described is not None:
            entry = paths.setdefault(path.replace(":path}", "}"), {})
            entry.setdefault(verb.lower(), described)
            if names := re.findall(r"{(\w+)", path):
                entry["parameters"] = [{"name": name, "in": "path", **_VARIABLE} for name in names]
    schemas = _requests([kind for part in parts for kind in part.requests])
    for part in parts:
        schemas |= part.schemas
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": "The OpenAI API, and other APIs, over the actors of one NATS server.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def post(name: str, summary: str, errors: tuple[int, ...], *, stream: str = "", api: str = "") -> Json:
    """`stream`: the media type of one. `api` has errors of its own shape; empty: OpenAI's."""
    body = {"required": True, "content": {"application/json": {"schema": ref(f"{name}Request")}}}
    asked = {**get(name, summary, errors, api), "requestBody": body}
    asked["responses"]["200"] = good = body_of(f"{name}Answer", "the answer")
    if stream:
        good["content"][stream] = {"schema": {}}
    return asked


def stored(name: str, summary: str, *, failing: bool = False) -> Json:
    """An answer that may be read later. `failing`: the error of the request is that of this path."""
    errors = (*LOOKING, 403, 408, 409, 413, 499) if failing else LOOKING
    got = get(f"{name}Answer", summary, errors, operation=f"stored{name.lower()}")
    got["parameters"] = [_LAST_ID, *([] if failing else _STREAMS)]
    got["responses"]["200"]["content"][EVENTS] = {"schema": {}}
    got["responses"]["204"] = {"description": "the reader has all events"}
    if failing:
        got["responses"]["202"] = body_of("Accepted", "it waits or runs")
    return got


def get(name: str, summary: str, errors: tuple[int, ...], api: str = "", operation: str = "") -> Json:
    return {
        "summary": summary,
        "operationId": operation or name.lower(),
        "security": [{}, {"key": []}, {"x_api_key": []}],
        "responses": {"200": body_of(name, "the answer"), **_errors(errors, api)},
    }


def state(summary: str) -> Json:
    responses = {"200": body_of("State", "yes"), "503": body_of("State", "no: why")}
    return {"summary": summary, "responses": responses}


def version(summary: str) -> Json:
    return {"summary": summary, "responses": {"200": body_of("Version", "the version")}}


def _errors(codes: tuple[int, ...], api: str = "") -> Json:
    return {str(code): body_of(f"{api}Error", _WHY[code]) for code in sorted(codes)}


def body_of(name: str, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": ref(name)}}}


def content(media_type: str, description: str) -> Json:
    return {"description": description, "content": {media_type: {"schema": {}}}}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(each: Schema) -> Schema:
    return {"type": "array", "items": each}


def schemas_of(name: str, body: Any, **fields: Schema) -> dict[str, Schema]:
    """The schemas of a body of shared/bodies.py, which gets `name`; null for what may be left out. `fields`:
    more about some."""
    schema = TypeAdapter(body).json_schema(ref_template="#/components/schemas/{model}")
    for name_of, each in schema["properties"].items():
        each |= fields.get(name_of, {})
        schema["properties"][name_of] = each if name_of in schema["required"] else or_null(each)
    return {**schema.pop("$defs", {}), name: schema}


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
    completion["echo"] = {
        "type": "boolean",
        "description": "start with the prompt, and with `logprobs` with those of the prompt",
    }
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


_DETAILS = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
# fmt: off
_USAGE = object_of(
    "prompt_tokens_details", "completion_tokens_details",
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT),
    prompt_tokens_details=object_of(cached_tokens=COUNT),
    completion_tokens_details=object_of(*_DETAILS, **dict.fromkeys(_DETAILS, COUNT)),
)


def _answer(kind: str, **content: Schema) -> Schema:
    choice = object_of(
        "stop_reason", index=COUNT, **content, logprobs={"anyOf": [{"type": "object"}, {"type": "null"}]},
        finish_reason=one_of("stop", "length", "tool_calls"), stop_reason=TEXT,
    )
    return object_of(
        "timings", id=TEXT, object=one_of(kind), created=COUNT, model=TEXT, choices=list_of(choice),
        usage=_USAGE, timings={"type": "object", "description": "milliseconds, and tokens a second"},
    )


_ASSISTANT = object_of(
    "refusal", "reasoning_content", "reasoning", "tool_calls", role=one_of("assistant"), content=WORD,
    refusal={"type": "null"}, reasoning_content=TEXT, reasoning=TEXT, tool_calls=list_of({"type": "object"}),
)
_ERROR = object_of("request_id", message=TEXT, type=TEXT, param=WORD, code=WORD, request_id=TEXT)
_VECTOR: Schema = {"anyOf": [list_of({"type": "number"}), TEXT]}
_TARGET = object_of("state", model=TEXT, weight=COUNT, state=TEXT)
COMPONENTS: dict[str, Schema] = {
    "ChatAnswer": _answer("chat.completion", message=_ASSISTANT),
    "CompletionAnswer": _answer("text_completion", text=TEXT),
    "EmbeddingAnswer": object_of(
        object=one_of("list"), model=TEXT, usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
        data=list_of(object_of(object=one_of("embedding"), index=COUNT, embedding=_VECTOR)),
    ),
    "Model": object_of(
        "max_model_len", "root", "state", "targets", id=TEXT, object=one_of("model"), created=COUNT,
        owned_by=TEXT, root=TEXT, max_model_len=COUNT, state=TEXT, targets=list_of(_TARGET),
    ),
    "Models": object_of(object=one_of("list"), data=list_of(ref("Model"))),
    "TokenizeAnswer": object_of(model=TEXT, count=COUNT, tokens=_TOKENS),
    "DetokenizeAnswer": object_of(model=TEXT, prompt=TEXT),
    "State": object_of("reason", status=one_of("ok", "unavailable"), reason=TEXT),
    "Version": object_of(version=TEXT),
    "Error": object_of(error=_ERROR),
}
# fmt: on
CHAT = post("Chat", "answer a conversation", GENERATING, stream=EVENTS)
COMPLETION = post("Completion", "continue a prompt", GENERATING, stream=EVENTS)
EMBEDDING = post("Embedding", "the vectors of texts", GENERATING)
TOKENIZE = post("Tokenize", "the token ids of a prompt", ASKING)
DETOKENIZE = post("Detokenize", "the text of token ids", ASKING)
METRICS: Json = {
    "summary": "metrics for Prometheus; if there are keys, only with the operator's key",
    "security": [{}, {"key": []}],
    "responses": {"200": content("text/plain", "metrics"), **_errors((401, 403))},
}
ITSELF: Json = {"summary": "this document", "responses": {"200": content("application/json", "OpenAPI")}}
