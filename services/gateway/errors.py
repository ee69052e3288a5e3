"""Errors of HTTP requests, and the headers of an error. Their body: shared/openai/call.py. Pure.

Client libraries retry 408, 409, 429 and 5xx by themselves, after `retry-after-ms`.
"""

from __future__ import annotations

import math

from shared.errors import HeadraceError
from shared.openai.call import error_status

DEFAULT_RETRY_MS = 1_000


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
    """A body with a content type other than JSON, or with a content encoding."""

    code, type = 415, "unsupported_media_type"


class HeadTooLarge(HeadraceError):
    """The headers of a request are too long."""

    code, type = 431, "head_too_large"


class UnknownCoding(HeadraceError):
    """A body with a transfer coding other than chunked."""

    code, type = 501, "unsupported_transfer_coding"


class Unprocessable(HeadraceError):
    """JSON, but not an object."""

    code, type = 422, "unprocessable"


def headers_of(error: HeadraceError) -> dict[str, str]:
    """The headers for authentication and for retries."""
    status = error_status(error)
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if status not in (429, 503):
        return {}
    wait_ms = error.retry_after_ms or DEFAULT_RETRY_MS
    return {"Retry-After": str(math.ceil(wait_ms / 1000)), "Retry-After-Ms": str(wait_ms)}
