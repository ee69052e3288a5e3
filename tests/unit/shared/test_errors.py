"""The errors a client sees: code, type, body and headers."""

from __future__ import annotations

import pytest

from shared.errors import (
    BadRequest,
    EngineError,
    HeadraceError,
    Overloaded,
    error_body,
    error_headers,
    from_code,
)

CODES = {
    400: ("invalid_request_error", False),
    404: ("model_not_found", False),
    408: ("timeout", True),
    409: ("duplicate_request", False),
    413: ("payload_too_large", False),
    429: ("overloaded", True),
    499: ("cancelled", False),
    500: ("engine_error", False),
    503: ("unavailable", True),
}


@pytest.mark.parametrize("code", CODES)
def test_a_code_makes_its_error(code: int) -> None:
    error = from_code(code, "why", retry_after_ms=20)
    assert (error.code, error.type, error.retryable) == (code, *CODES[code])
    assert (error.message, str(error), error.retry_after_ms) == ("why", "why", 20)


def test_an_unknown_code_is_an_engine_error() -> None:
    assert type(from_code(418, "teapot")) is EngineError
    assert HeadraceError("x").code == 500


def test_the_body_is_shaped_as_openai_does() -> None:
    assert error_body(BadRequest("n must be 1", param="n"), "r1", "t1") == {
        "error": {
            "code": 400,
            "type": "invalid_request_error",
            "message": "n must be 1",
            "param": "n",
            "retryable": False,
            "retry_after_ms": 0,
            "request_id": "r1",
            "trace_id": "t1",
        }
    }


def test_the_headers_mark_an_error_reply() -> None:
    headers = error_headers(Overloaded("queue is full"))
    assert headers == {"Nats-Service-Error": "queue is full", "Nats-Service-Error-Code": "429"}
