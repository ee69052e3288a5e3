"""Builds the last message to a client: its headers, and the body of an error.

Error bodies are `{"type":"error","error":{…}}`, both as a plain reply and as the last frame of a stream, so
that a client needs one test.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Mapping
from hashlib import sha256
from typing import Any

from shared.errors import BadRequest, EngineError, HeadraceError, error_body, error_headers
from shared.telemetry.traces import HEADER, trace_id

END_HEADER = "Headrace-End"
MAX_HEADER_CHARS = 512
HASH_DIGITS = 16  # of a text's SHA-256: 64 bits, so two texts of a request never look equal by chance


def to_json(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON. A lone surrogate in an echoed string becomes `?`."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def text_hash(text: str) -> str:
    """The hash of a text by which a reader shows what it has: the first digits of its SHA-256, as hex."""
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:HASH_DIGITS]


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


async def change_reply(change: Awaitable[Mapping[str, Any]], subject: str, log: logging.Logger) -> bytes:
    """What the operator's change at `subject` gives, or its error. A ValueError is one of the subject."""
    try:
        return to_json(await change)
    except HeadraceError as error:
        return error_reply(error, "", "")
    except ValueError as error:
        return error_reply(BadRequest(f"the subject is damaged: {error}", param="subject"), "", "")
    except Exception:  # a bug is a 500 for the operator, never silence
        log.exception("nothing is changed by %.120s", subject)
        return error_reply(EngineError("the tokenizer failed on this change: see its log"), "", "")


def _one_line(text: str) -> str:
    """A text cut and cleaned for a header: one printable line."""
    line = " ".join(text[:MAX_HEADER_CHARS].split())
    return "".join(c if c.isprintable() else "?" for c in line)
