"""JSON responses: answers, and refusals of the OpenAI form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from services.gateway.refusals import body_of, headers_of, status_of
from shared.errors import HeadraceError
from shared.replies import to_json


def answer(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(to_json(body), status, headers, "application/json")


def refusal(error: HeadraceError, request_id: str) -> Response:
    """An error, with its headers."""
    return answer(body_of(error, request_id), status_of(error), headers_of(error))
