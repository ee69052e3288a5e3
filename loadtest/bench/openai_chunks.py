"""Enters the chunks of an OpenAI stream in the record of their request."""

from __future__ import annotations

import json
from typing import Any

from loadtest.bench.record import Record


def on_data(data: bytes, record: Record, now_us: int) -> None:
    """One event's data, which came at `now_us`. A chunk counts when it has text: the one with the role,
    the one with the finish reason and the usage are no tokens."""
    try:
        chunk = json.loads(data)
    except ValueError:
        record.error = f"an event is not JSON: {data[:80]!r}"
        return
    if not isinstance(chunk, dict):
        record.error = f"an event is no object: {data[:80]!r}"
        return
    if error := chunk.get("error"):
        record.error = failure(error)
        return
    texts = [text_of(choice) for choice in chunk.get("choices") or ()]
    if any(texts):
        record.took("".join(texts), now_us)
    if usage := chunk.get("usage"):
        count(usage, record)


def count(usage: dict[str, Any], record: Record) -> None:
    """The server's own count of tokens."""
    details = usage.get("prompt_tokens_details") or {}
    record.counted(
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        details.get("cached_tokens"),
    )


def text_of(choice: dict[str, Any]) -> str:
    """Text of a completion, of a chat, or of its reasoning."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or _reasoning(delta) or ""


def failure(error: Any) -> str:
    """An error body in one line."""
    if isinstance(error, dict):
        return f"{error.get('code') or error.get('type') or ''} {error.get('message', '')}".strip()[:200]
    return str(error)[:200]


def _reasoning(delta: dict[str, Any]) -> str:
    return delta.get("reasoning_content") or delta.get("reasoning") or ""
