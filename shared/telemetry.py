"""Trace context, W3C style: what travels with a request so that its spans join into one trace.

A trace is a string, the `traceparent` itself, carried in the NATS header at the edges and in the
envelope inside; an empty string means not traced and costs nothing. Spec: W3C Trace Context 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HEADER = "traceparent"
SAMPLED = 1  # bit of the flags
NO_PARENT = "0" * 16  # span id in the place of a root's parent
MAX_CHARS = 256  # it travels in every message of the request; version 00 has 55

_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def from_headers(headers: Mapping[str, str]) -> str:
    """The traceparent of a message, empty when there is none or it is not valid."""
    text = headers.get(HEADER, "")
    return text if len(text) <= MAX_CHARS and is_valid(text) else ""


def is_valid(trace: str) -> bool:
    """True for a traceparent as the specification wants it: later versions may carry more fields."""
    match = _FORM.fullmatch(trace)
    if match is None:
        return False
    version, trace_id, span_id, _, rest = match.groups()
    known_form = version != "ff" and not (version == "00" and rest)
    return known_form and set(trace_id) != {"0"} and set(span_id) != {"0"}


def trace_id(trace: str) -> str:
    """The 32 hex digits that name the trace, empty when not traced."""
    fields = trace.split("-")
    return fields[1] if len(fields) >= 4 else ""


def span_id(trace: str) -> str:
    """The 16 hex digits of the span that the traceparent names, empty when not traced."""
    fields = trace.split("-")
    return fields[2] if len(fields) >= 4 else ""


def is_sampled(trace: str) -> bool:
    """Whether whoever made the traceparent wants the trace recorded; False for what is none."""
    return is_valid(trace) and bool(int(trace.split("-")[3], 16) & SAMPLED)


def span_number(span: str) -> int:
    """A span id as a number; 0, which names none, for what is no span id."""
    return int(span, 16) if _SPAN_ID.fullmatch(span) else 0


def make(trace: str, span: str, *, sampled: bool) -> str:
    """The traceparent of a trace id (32 hex digits) and a span id (16)."""
    return f"00-{trace}-{span}-{SAMPLED if sampled else 0:02x}"
