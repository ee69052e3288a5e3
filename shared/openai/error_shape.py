"""The shape of an error of the OpenAI API: status and body. Pure.

    native 408 (a time limit passed)     504, since the client was not the slow one
    others                               the same code

Programs test `error.code` (`model_not_found`, `overloaded`, …); it is null for invalid fields.
"""

from __future__ import annotations

from typing import Any

from shared.errors import BadRequest, HeadraceError

CONTEXT_LENGTH = "context_length_exceeded"
_TIMEOUTS = {408: 504}
_INVALID, _SERVER = "invalid_request_error", "server_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


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


def _word(error: HeadraceError) -> str | None:
    if isinstance(error, BadRequest):
        return CONTEXT_LENGTH if error.message.startswith(CONTEXT_LENGTH) else None
    return error.type
