"""Typed errors in the shape of the OpenAI API: status, body, headers. Pure.

    native 408 (a time limit passed)     504, since the client was not the slow one
    others                               the same code

Programs test `error.code` (`model_not_found`, `overloaded`, …); it is null for invalid fields. Client
libraries retry 408, 409, 429 and 5xx by themselves, after `retry-after-ms`.
"""

from __future__ import annotations

import math
from typing import Any

from shared.errors import BadRequest, HeadraceError

CONTEXT_LENGTH = "context_length_exceeded"
DEFAULT_RETRY_MS = 1_000
_TIMEOUTS = {408: 504}
_INVALID, _SERVER = "invalid_request_error", "server_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class NotAuthorized(HeadraceError):
    """No API key, or an unknown one."""

    code, type = 401, "invalid_api_key"


class NoRoute(HeadraceError):
    """An unknown path."""

    code, type = 404, "not_found"


class Gone(HeadraceError):
    """A durable request that was kept for its time."""

    code, type = 410, "request_expired"


class NoKeeper(HeadraceError):
    """A request that must be kept, and no keeper. Not Unavailable, after which `/health` tries the services:
    other requests work."""

    code, type, retryable = 503, "unavailable", True


class StoreAway(HeadraceError):
    """The keeper or its store does not answer now. Other requests work, as above."""

    code, type, retryable = 503, "unavailable", True


class WrongMethod(HeadraceError):
    """A known path, with another method."""

    code, type = 405, "method_not_allowed"


class SlowRequest(HeadraceError):
    """The head or the body of a request did not arrive in time."""

    code, type, retryable = 408, "request_timeout", True
    status = 408  # the client was the slow one


class WrongMediaType(HeadraceError):
    """A body with a content type other than JSON."""

    code, type = 415, "unsupported_media_type"


class HeadTooLarge(HeadraceError):
    """The headers of a request are too long."""

    code, type = 431, "head_too_large"


class Unprocessable(HeadraceError):
    """JSON, but not an object."""

    code, type = 422, "unprocessable"


def status_of(error: HeadraceError) -> int:
    """The HTTP status."""
    return int(getattr(error, "status", 0)) or _TIMEOUTS.get(error.code, error.code)


def body_of(error: HeadraceError, request_id: str = "") -> dict[str, Any]:
    """The OpenAI error object, with the request's id as a further field."""
    status = status_of(error)
    fields: dict[str, Any] = {
        "message": error.message,
        "type": _TYPES.get(status, _INVALID if status < 500 else _SERVER),
        "param": error.param,
        "code": _word(error),
    }
    if request_id:
        fields["request_id"] = request_id
    return {"error": fields}


def headers_of(error: HeadraceError) -> dict[str, str]:
    """The headers for authentication and for retries."""
    status = status_of(error)
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if status not in (429, 503):
        return {}
    wait_ms = error.retry_after_ms or DEFAULT_RETRY_MS
    return {"Retry-After": str(math.ceil(wait_ms / 1000)), "Retry-After-Ms": str(wait_ms)}


def _word(error: HeadraceError) -> str | None:
    if isinstance(error, BadRequest):
        return CONTEXT_LENGTH if error.message.startswith(CONTEXT_LENGTH) else None
    return error.type
