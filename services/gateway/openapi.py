"""`document` builds the OpenAPI document: every path of the gateway with its requests and answers.

COMPONENTS are the JSON Schemas. Those of requests come from the models that the tokenizer validates with
(shared/api.py).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from services.gateway.anthropic import CountTokensRequest, MessagesRequest
from services.gateway.batches import MOST_LIMIT
from services.gateway.ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from shared.api import ChatRequest, CompletionRequest, EmbeddingRequest
from shared.openai.batch_lines import URLS, WINDOW
from shared.openai.call import MAX_INPUTS, MAX_PROMPTS
from shared.openai.responses.request import ResponseRequest

Json = dict[str, Any]
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
_WORD: Schema = {"type": ["string", "null"]}
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
_LISTING = (401, 500, 503, 504)
_LOOKING = (400, 401, 404, 410, 429, 500, 503, 504)
_ASKING = (400, 401, 404, 408, 413, 415, 422, 500, 503, 504)

_ID: Json = {"name": "id", "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}
_PREFER: Json = {
    "name": "Prefer",
    "in": "header",
    "schema": TEXT,
    "description": "`respond-async`: answer 202 at once, and keep the request until it is answered; "
    "the body may then have `webhook`, a URL that gets a signed event at its end",
}
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


def document(version: str) -> Json:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": "The OpenAI API, and other APIs, over the actors of one NATS server.",
        },
        "paths": _paths(),
        "components": {
            "schemas": COMPONENTS,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _paths() -> Json:
    generating = (*_ASKING, 403, 409, 429, 499)
    chat = _post("Chat", "answer a conversation", generating, stream=True)
    completion = _post("Completion", "continue a prompt", generating, stream=True)
    response = _post("Response", "answer a conversation (Responses API)", (*generating, 410), stream=True)
    return {
        "/v1/chat/completions": {"post": _later(chat)},
        "/v1/chat/completions/{id}": {
            "get": _stored("Chat", "the answer to a durable chat", failing=True),
            "parameters": [_ID],
        },
        "/v1/completions": {"post": _later(completion)},
        "/v1/completions/{id}": {
            "get": _stored("Completion", "the answer to a durable completion", failing=True),
            "parameters": [_ID],
        },
        "/v1/responses": {"post": response},
        "/v1/responses/{id}": {
            "get": _stored("Response", "a stored response"),
            "delete": _get("ResponseDeleted", "delete a response", _LOOKING),
            "parameters": [_ID],
        },
        "/v1/responses/{id}/cancel": {
            "post": {
                **_get("ResponseAnswer", "cancel a response", _LOOKING),
                "operationId": "cancelresponse",
            },
            "parameters": [_ID],
        },
        "/v1/embeddings": {"post": _post("Embedding", "the vectors of texts", generating)},
        "/v1/messages": {
            "post": _post(
                "Messages", "answer a conversation (Anthropic)", generating, stream=True, api="Anthropic"
            )
        },
        "/v1/messages/count_tokens": {
            "post": _post("CountTokens", "the size of a prompt (Anthropic)", _ASKING, api="Anthropic")
        },
        "/api/chat": {
            "post": _post(
                "OllamaChat", "answer a conversation (ollama)", generating, stream=True, api="Ollama"
            )
        },
        "/api/generate": {
            "post": _post("OllamaGenerate", "answer a prompt (ollama)", generating, stream=True, api="Ollama")
        },
        "/api/embed": {"post": _post("OllamaEmbed", "vectors of texts (ollama)", generating, api="Ollama")},
        "/api/tags": {"get": _get("OllamaModels", "the models served (ollama)", _LISTING, "Ollama")},
        "/api/ps": {"get": _get("OllamaModels", "the models loaded (ollama)", _LISTING, "Ollama")},
        "/api/show": {"post": _post("OllamaShow", "one served model (ollama)", _ASKING, api="Ollama")},
        "/api/version": {
            "get": {"summary": "the version (ollama)", "responses": {"200": _json("Version", "the version")}}
        },
        "/v1/models": {"get": _get("Models", "the models served", _LISTING)},
        "/v1/models/{model}": {
            "get": _get("Model", "one served model", (401, 404, 500, 503, 504)),
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}
            ],
        },
        **_batch_paths(),
        "/tokenize": {"post": _post("Tokenize", "the token ids of a prompt", _ASKING)},
        "/detokenize": {"post": _post("Detokenize", "the text of token ids", _ASKING)},
        "/health": {"get": _state("would a request succeed now?")},
        "/ready": {"get": _state("does this gateway accept requests?")},
        "/version": {
            "get": {"summary": "the version", "responses": {"200": _json("Version", "the version")}}
        },
        "/metrics": {
            "get": {
                "summary": "metrics for Prometheus; if there are keys, only with the operator's key",
                "security": [{}, {"key": []}],
                "responses": {"200": _content("text/plain", "metrics"), **_errors((401, 403))},
            }
        },
        "/openapi.json": {
            "get": {"summary": "this document", "responses": {"200": _content("application/json", "OpenAPI")}}
        },
    }


_LIMIT = {"type": "integer", "minimum": 1, "maximum": MOST_LIMIT}


def _batch_paths() -> Json:
    """Files and batches, whose ids are in the path."""
    which = {"parameters": [{"name": "id", "in": "path", "required": True, "schema": _NAME}]}
    listing = one = (400, 404, *_LISTING)
    listed = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in {"after": _NAME, "limit": _LIMIT}.items()
    ]
    upload = _get("File", "store a file for a batch", (400, 401, 408, 413, 429, 499, 500, 503, 504))
    form = {"multipart/form-data": {"schema": _ref("FileRequest")}}
    upload |= {"operationId": "upload", "requestBody": {"required": True, "content": form}}
    content = _get("File", "the content of a file", one)
    content["operationId"] = "content"
    content["responses"]["200"] = _content("application/octet-stream", "the file")
    batch = {name: _get("Batch", f"{name} a batch", one) for name in ("read", "cancel")}
    return {
        "/v1/files": {"post": upload, "get": {**_get("Files", "your files", listing), "parameters": listed}},
        "/v1/files/{id}": {
            "get": _get("File", "one file", one),
            "delete": _get("FileDeleted", "delete a file", one),
            **which,
        },
        "/v1/files/{id}/content": {"get": content, **which},
        "/v1/batches": {
            "post": _post("Batch", "answer a file of requests", (*_ASKING, 409, 429)),
            "get": {**_get("Batches", "your batches", listing), "parameters": listed},
        },
        "/v1/batches/{id}": {"get": {**batch["read"], "operationId": "readbatch"}, **which},
        "/v1/batches/{id}/cancel": {"post": {**batch["cancel"], "operationId": "cancelbatch"}, **which},
    }  # fmt: skip


def _post(name: str, summary: str, errors: tuple[int, ...], *, stream: bool = False, api: str = "") -> Json:
    """`api` has errors of its own shape; empty: OpenAI's."""
    body = {"required": True, "content": {"application/json": {"schema": _ref(f"{name}Request")}}}
    asked = {**_get(name, summary, errors, api), "requestBody": body}
    asked["responses"]["200"] = good = _json(f"{name}Answer", "the answer")
    if stream:
        media_type = "application/x-ndjson" if api == "Ollama" else "text/event-stream"
        good["content"][media_type] = {"schema": {}}
    return asked


def _later(post: Json) -> Json:
    """A request that may be answered later."""
    responses = {**post["responses"], "202": _json("Accepted", "`Location` will have the answer")}
    return {**post, "parameters": [_PREFER], "responses": responses}


def _stored(name: str, summary: str, *, failing: bool = False) -> Json:
    """An answer that may be read later. `failing`: the error of the request is that of this path."""
    errors = (*_LOOKING, 403, 408, 409, 413, 499) if failing else _LOOKING
    got = {**_get(f"{name}Answer", summary, errors), "operationId": f"stored{name.lower()}"}
    got["parameters"] = [_LAST_ID, *([] if failing else _STREAMS)]
    got["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    got["responses"]["204"] = {"description": "the reader has all events"}
    if failing:
        got["responses"]["202"] = _json("Accepted", "it waits or runs")
    return got


def _get(name: str, summary: str, errors: tuple[int, ...], api: str = "") -> Json:
    return {
        "summary": summary,
        "operationId": name.lower(),
        "security": [{}, {"key": []}, {"x_api_key": []}],
        "responses": {"200": _json(name, "the answer"), **_errors(errors, api)},
    }


def _state(summary: str) -> Json:
    return {"summary": summary, "responses": {"200": _json("State", "yes"), "503": _json("State", "no: why")}}


def _errors(codes: tuple[int, ...], api: str = "") -> Json:
    return {str(code): _json(f"{api}Error", _WHY[code]) for code in sorted(codes)}


def _json(name: str, description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _content(media_type: str, description: str) -> Json:
    return {"description": description, "content": {media_type: {"schema": {}}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def _object(*optional: str, **fields: Schema) -> Schema:
    """An object with these fields and no others; fields that are not `optional` are required."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    null = {"type": "null"}
    return schema if null in schema.get("anyOf", ()) else {"anyOf": [schema, null]}


def _either(name: str, idle: list[object], other: str, needed: list[object]) -> Schema:
    """A field has an `idle` value or is absent, or the `other` field has one of these values."""
    absent = [] if None in needed else [other]
    return {
        "anyOf": [
            {"properties": {name: _one_of(*idle)}},
            {"properties": {other: _one_of(*needed)}, "required": absent},
        ]
    }


def _or_several(kinds: list[Schema], most: int) -> list[Schema]:
    return kinds + [{"type": "array", "items": each, "minItems": 1, "maxItems": most} for each in kinds]


def _requests() -> dict[str, Schema]:
    """The models of shared/api.py with the additions of HTTP: null for any field but the prompt, also for one
    that is not known; several prompts and `echo` of a completion."""
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]]
    kinds = [
        (kind, "validation")
        for kind in (
            ChatRequest, CompletionRequest, MessagesRequest, CountTokensRequest, OllamaChatRequest,
            OllamaGenerateRequest, OllamaShowRequest, ResponseRequest, EmbeddingRequest,
            OllamaEmbedRequest,
        )
    ]  # fmt: skip
    schemas: dict[str, Schema]
    schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")[1]["$defs"]
    chat, completion = (schemas[kind.__name__]["properties"] for kind in (ChatRequest, CompletionRequest))
    prompts = completion["prompt"]["anyOf"]
    completion["prompt"]["anyOf"] = _or_several(prompts, MAX_PROMPTS)
    given = schemas["EmbeddingRequest"]["properties"]["input"]
    given["anyOf"] = _or_several(given["anyOf"], MAX_INPUTS)
    completion["echo"] = {"type": "boolean", "description": "start with the prompt; not with `logprobs`"}
    for schema in schemas.values():
        fields, required = schema.get("properties", {}), schema.get("required", ())
        fields |= {field: _or_null(each) for field, each in fields.items() if field not in required}
    for name in (*(kind.__name__ for kind, _ in kinds), "Options", "OllamaMessage"):
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
            _object("model", model=chat["model"], prompt={"anyOf": prompts}),
            _object(*optional, **{name: chat[name] for name in ("messages", *optional)}),
        ]
    }
    schemas["DetokenizeRequest"] = {
        **_object("model", model=chat["model"], tokens=prompts[1]),
        "additionalProperties": True,  # without effect
    }
    return schemas


_USAGE = _object(
    "prompt_tokens_details",
    "completion_tokens_details",
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT),
    prompt_tokens_details=_object(cached_tokens=COUNT),
    completion_tokens_details=_object(reasoning_tokens=COUNT),
)


def _answer(kind: str, **content: Schema) -> Schema:
    logprobs = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    reason = _one_of("stop", "length", "tool_calls")
    choice = _object(
        "stop_reason", index=COUNT, **content, logprobs=logprobs, finish_reason=reason, stop_reason=TEXT
    )
    return _object(
        "timings",
        id=TEXT,
        object=_one_of(kind),
        created=COUNT,
        model=TEXT,
        choices={"type": "array", "items": choice},
        usage=_USAGE,
        timings={"type": "object", "description": "milliseconds, and tokens a second"},
    )


def _ollama_answer(*optional: str, **content: Schema) -> Schema:
    counts = (
        *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
        *("eval_count", "eval_duration"),
    )
    return _object(
        *optional,
        *counts,  # absent if a model was only loaded
        model=TEXT,
        created_at=TEXT,
        **content,
        done=_one_of(True),
        done_reason=_one_of("stop", "length", "load", "unload"),
        **dict.fromkeys(counts, COUNT),
    )


def _response() -> Schema:
    listed: Schema = {"type": "array", "items": {"type": "object"}}
    some: Schema = {"type": "object"}
    yes_or_no: Schema = {"type": "boolean"}
    number: Schema = {"type": "number"}
    usage = _object(
        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT),
        input_tokens_details=_object(cached_tokens=COUNT, cache_write_tokens=COUNT),
        output_tokens_details=_object(reasoning_tokens=COUNT),
    )
    repeated = {
        **dict.fromkeys(("background", "parallel_tool_calls", "store"), yes_or_no),
        **dict.fromkeys(("instructions", "previous_response_id", "user"), _WORD),
        **dict.fromkeys(("metadata", "reasoning", "text"), some),
        **dict.fromkeys(("service_tier", "truncation"), TEXT),
        **dict.fromkeys(("temperature", "top_p"), _or_null(number)),
        "max_output_tokens": _or_null(COUNT),
        "top_logprobs": COUNT,
        "tool_choice": {"type": ["string", "object"]},
        "tools": listed,
    }
    return _object(
        "completed_at",
        id=TEXT,
        object=_one_of("response"),
        created_at=COUNT,
        completed_at=COUNT,
        status=_one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        error=_or_null(_object(code=TEXT, message=TEXT)),
        incomplete_details=_or_null(_object(reason=TEXT)),
        model=TEXT,
        output=listed,
        usage=_or_null(usage),
        **repeated,
    )


_ASSISTANT = _object(
    "refusal",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    role=_one_of("assistant"),
    content=_WORD,
    refusal={"type": "null"},
    reasoning_content=TEXT,
    reasoning=TEXT,
    tool_calls={"type": "array", "items": {"type": "object"}},
)
_ERROR = _object("request_id", message=TEXT, type=TEXT, param=_WORD, code=_WORD, request_id=TEXT)

_NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
_NAME: Schema = {**TEXT, "minLength": 1, "maxLength": 128}
_TIME: Schema = {"type": ["integer", "null"], "description": "seconds since 1970"}
_METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {**TEXT, "maxLength": 512},
}
_FILE = _object(
    id=TEXT,
    object=_one_of("file"),
    bytes=COUNT,
    created_at=COUNT,
    expires_at=COUNT,
    filename=TEXT,
    purpose=_one_of("batch", "batch_output"),
    status=_one_of("processed"),
)
_BATCH = _object(
    id=TEXT,
    object=_one_of("batch"),
    endpoint=_one_of(*URLS),
    errors=_or_null(
        _object(
            object=_one_of("list"),
            data={
                "type": "array",
                "items": _object(code=TEXT, message=TEXT, param=_WORD, line={"type": ["integer", "null"]}),
            },
        )
    ),
    input_file_id=TEXT,
    completion_window=TEXT,
    status=_one_of(
        *("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling"),
        "cancelled",
    ),
    output_file_id=_WORD,
    error_file_id=_WORD,
    created_at=COUNT,
    expires_at=COUNT,
    **dict.fromkeys(
        (
            *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
            *("cancelling_at", "cancelled_at"),
        ),
        _TIME,
    ),
    request_counts=_object(total=COUNT, completed=COUNT, failed=COUNT),
    metadata=_METADATA,
)


def _list_of(schema: str) -> Schema:
    return _object(
        object=_one_of("list"),
        data={"type": "array", "items": _ref(schema)},
        first_id=_WORD,
        last_id=_WORD,
        has_more={"type": "boolean"},
    )


COMPONENTS: dict[str, Schema] = {
    **_requests(),
    "ChatAnswer": _answer("chat.completion", message=_ASSISTANT),
    "CompletionAnswer": _answer("text_completion", text=TEXT),
    "ResponseAnswer": _response(),
    "Accepted": _object(id=TEXT, object=_one_of("chat.completion", "text_completion"), status=TEXT),
    "EmbeddingAnswer": _object(
        object=_one_of("list"),
        data={
            "type": "array",
            "items": _object(object=_one_of("embedding"), index=COUNT, embedding={"anyOf": [_NUMBERS, TEXT]}),
        },
        model=TEXT,
        usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "OllamaEmbedAnswer": _object(
        model=TEXT,
        embeddings={"type": "array", "items": _NUMBERS},
        **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), COUNT),
    ),
    "MessagesAnswer": _object(
        id=TEXT,
        type=_one_of("message"),
        role=_one_of("assistant"),
        model=TEXT,
        content={"type": "array", "items": {"type": "object"}},
        stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=_WORD,
        usage=_object(
            input_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
            cache_read_input_tokens=COUNT,
            output_tokens=COUNT,
        ),
    ),
    "CountTokensAnswer": _object(input_tokens=COUNT),
    "OllamaChatAnswer": _ollama_answer(message={"type": "object"}),
    "OllamaGenerateAnswer": _ollama_answer("thinking", response=TEXT, thinking=TEXT),
    "OllamaModels": _object(models={"type": "array", "items": {"type": "object"}}),
    "OllamaShowAnswer": _object(
        modified_at=TEXT,
        details={"type": "object"},
        model_info={"type": "object"},
        capabilities={"type": "array", "items": TEXT},
    ),
    "OllamaError": _object(error=TEXT),
    "Model": _object(
        *("max_model_len", "root", "state", "targets"),
        id=TEXT,
        object=_one_of("model"),
        created=COUNT,
        owned_by=TEXT,
        root=TEXT,
        max_model_len=COUNT,
        state=TEXT,
        targets={"type": "array", "items": _object("state", model=TEXT, weight=COUNT, state=TEXT)},
    ),
    "Models": _object(object=_one_of("list"), data={"type": "array", "items": _ref("Model")}),
    "TokenizeAnswer": _object(model=TEXT, count=COUNT, tokens=_TOKENS),
    "DetokenizeAnswer": _object(model=TEXT, prompt=TEXT),
    "FileRequest": {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {**TEXT, "format": "binary", "minLength": 1}, "purpose": _one_of("batch")},
    },
    "File": _FILE,
    "Files": _list_of("File"),
    "ResponseDeleted": _object(id=TEXT, object=_one_of("response"), deleted=_one_of(True)),
    "FileDeleted": _object(id=TEXT, object=_one_of("file"), deleted=_one_of(True)),
    "BatchRequest": {
        "type": "object",
        "required": ["input_file_id", "endpoint", "completion_window"],
        "properties": {
            "input_file_id": TEXT,
            "endpoint": _one_of(*URLS),
            "completion_window": {**TEXT, "pattern": WINDOW},
            "metadata": _METADATA,
            "webhook": {**TEXT, "description": "a URL that gets a signed event when the batch has ended"},
        },
        "additionalProperties": False,
    },
    "BatchAnswer": _ref("Batch"),
    "Batch": _BATCH,
    "Batches": _list_of("Batch"),
    "State": _object("reason", status=_one_of("ok", "unavailable"), reason=TEXT),
    "Version": _object(version=TEXT),
    "Error": _object(error=_ERROR),
    "AnthropicError": _object(type=_one_of("error"), error=_object(type=TEXT, message=TEXT), request_id=TEXT),
}
