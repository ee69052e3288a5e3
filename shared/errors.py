"""Typed errors: each has a public code and a message with the cause and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.messages import Rejected, Tokenized

# `client.probe` tests for these messages.
NO_TEMPLATE = "this model has no chat template; send `prompt`"
NO_VECTOR = "a service of this model has an older version, which gives no vectors: update it, or try again"
NO_PROMPT_SCORES = "an engine of this model gives no log probabilities of prompts: leave them out"
SCORES_LOST = "the log probabilities of the prompt were lost as a service died: send the request again"
NO_TEXT = "is an encoder, which gives vectors of texts and generates nothing; send `input`"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error about a mistyped word; empty if it resembles nothing `known`."""
    import difflib  # not on the path of a health check, which starts each few seconds

    near = difflib.get_close_matches(word[:64], sorted({*known}), 1)
    return f"; did you mean `{near[0]}`?" if near else ""


class HeadraceError(Exception):
    """Base of all errors for users. `code` is an HTTP status; `type` is OpenAI's name for it."""

    code = 500
    type = "server_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms


class BadRequest(HeadraceError):
    """The request can never work as it is."""

    code, type = 400, "invalid_request_error"


class Forbidden(HeadraceError):
    """The credentials do not allow it."""

    code, type = 403, "permission_denied"


class UnknownModel(HeadraceError):
    """No service serves this model."""

    code, type = 404, "model_not_found"


class UnknownRequest(HeadraceError):
    """No such request is running or remembered."""

    code, type = 404, "request_not_found"


class UnknownSession(HeadraceError):
    """No scheduler has the session."""

    code, type = 404, "session_not_found"


class DeadlineExceeded(HeadraceError):
    """The request's own time limit passed."""

    code, type, retryable = 408, "timeout", True


class DuplicateRequest(HeadraceError):
    """A request with this id is running."""

    code, type = 409, "duplicate_request"


class Moved(HeadraceError):
    """Another reader has attached to this request, and reads on."""

    code, type = 409, "moved"


class PayloadTooLarge(HeadraceError):
    """A message over the limit of the nats-server, or of Headrace."""

    code, type = 413, "payload_too_large"


class Overloaded(HeadraceError):
    """A queue is full; try again after `retry_after_ms`."""

    code, type, retryable = 429, "overloaded", True


class Cancelled(HeadraceError):
    """The client cancelled the request."""

    code, type = 499, "cancelled"


class EngineError(HeadraceError):
    """The engine failed on this request."""

    code, type = 500, "engine_error"


class Unavailable(HeadraceError):
    """No service is ready, or the service is draining."""

    code, type, retryable = 503, "unavailable", True


def drain_over(kind: str) -> Unavailable:
    """The error for clients of a stopped service after its time limit to drain."""
    why = f"the {kind} was stopped and its time to drain is over (drain_timeout_s)"
    return Unavailable(f"{why}: send the request again, or raise the limit", retry_after_ms=1_000)


class WireError(HeadraceError):
    """Bytes that are not a message of this protocol version."""

    code, type = 500, "wire_error"


class SetupError(HeadraceError):
    """The installation or configuration cannot work; the message names the remedy."""

    code, type = 500, "setup_error"


_BY_CODE = {
    error.code: error
    for error in (
        BadRequest, Forbidden, UnknownModel, DeadlineExceeded, DuplicateRequest, PayloadTooLarge,
        Overloaded, Cancelled, EngineError, Unavailable,
    )
}  # fmt: skip


def from_code(code: int, message: str, retry_after_ms: int = 0) -> HeadraceError:
    """The error of a public code; an unknown code becomes EngineError."""
    return _BY_CODE.get(code, EngineError)(message, retry_after_ms=retry_after_ms)


def error_body(error: HeadraceError, request_id: str = "", trace_id: str = "") -> dict[str, object]:
    """The public error object, OpenAI-shaped."""
    body: dict[str, object] = {
        "code": error.code,
        "type": error.type,
        "message": error.message,
        "param": error.param,
        "retryable": error.retryable,
        "retry_after_ms": error.retry_after_ms,
        "request_id": request_id,
        "trace_id": trace_id,
    }
    return {"error": body}


def error_headers(error: HeadraceError) -> dict[str, str]:
    """The NATS service headers that mark an error reply (ADR-32)."""
    return {"Nats-Service-Error": error.message, "Nats-Service-Error-Code": str(error.code)}


def rejection(asked: Tokenized, code: int, message: str, retry_after_ms: int = 0) -> Rejected:
    """The message that refuses a request."""
    from shared.messages import Rejected  # the errors are on the path of a health check, the wire is not

    return Rejected(
        tenant=asked.tenant,
        request=asked.request,
        attempt=asked.attempt,
        code=code,
        message=message,
        retry_after_ms=retry_after_ms,
    )
