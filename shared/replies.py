"""The last message to a client: how it is marked, and the form of an error.

Error bodies are `{"type":"error","error":{…}}`, the same as one reply and as the last frame of a
stream, so a client needs one test for both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shared.errors import HeadraceError, error_body, error_headers
from shared.telemetry.traces import HEADER, trace_id

END_HEADER = "Headrace-End"
MAX_HEADER_CHARS = 512


def to_json(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON. What is not UTF-8 in an echoed string (a lone surrogate) becomes `?`."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def end_headers(error: HeadraceError | None = None, trace: str = "") -> dict[str, str]:
    """Headers of the last message."""
    headers = {END_HEADER: "1"}
    if error is not None:  # the body has the whole message
        headers |= {name: _one_line(value) for name, value in error_headers(error).items()}
    if trace:
        headers[HEADER] = trace
    return headers


def error_reply(
    error: HeadraceError, request: str, trace: str, extra: Mapping[str, Any] | None = None
) -> bytes:
    """Body of an error; `extra` are fields of a stream frame."""
    return to_json({"type": "error", **(extra or {}), **error_body(error, request, trace_id(trace))})


def _one_line(text: str) -> str:
    """What a header can hold: one line of text, not too long, in UTF-8."""
    line = " ".join(text[:MAX_HEADER_CHARS].split())
    return "".join(c if c.isprintable() else "?" for c in line)
