"""The OpenAPI document of the gateway: every path, every answer it can give."""

from __future__ import annotations

from typing import Any

from services.gateway.schemas import COMPONENTS

Json = dict[str, Any]

_WHY = {
    400: "a field is wrong; `param` names it",
    401: "no API key, or one that is not known",
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
    generating = (*_ASKING, 409, 429, 499)
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
            "get": {"summary": "for Prometheus", "responses": {"200": _content("text/plain", "figures")}}
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
