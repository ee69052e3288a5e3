"""Trace context, W3C style: what travels with a request so that its spans join into one trace.

A trace is a string, the `traceparent` itself, carried in the NATS header at the edges and in the
envelope inside; an empty string means not traced and costs nothing. Spec: W3C Trace Context 1.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

HEADER = "traceparent"
SAMPLED = 0x01

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def new_trace(sampled: bool = True) -> str:
    """The traceparent of a new trace."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{SAMPLED if sampled else 0:02x}"


def from_headers(headers: Mapping[str, str]) -> str:
    """The traceparent of a message, empty when there is none or it is not valid."""
    text = headers.get(HEADER, "")
    return text if text and is_valid(text) else ""


def is_valid(trace: str) -> bool:
    """True for a traceparent as the specification wants it: later versions may carry more fields."""
    match = _FORM.fullmatch(trace)
    if match is None:
        return False
    version, trace_id, span_id, _, rest = match.groups()
    known_form = version != "ff" and not (version == "00" and rest)
    return known_form and set(trace_id) != {"0"} and set(span_id) != {"0"}


def child(trace: str) -> str:
    """The same trace with a new span id; empty stays empty."""
    if not trace:
        return ""
    _, trace_id, _, flags = trace.split("-")[:4]
    return f"00-{trace_id}-{secrets.token_hex(8)}-{flags}"


def trace_id(trace: str) -> str:
    """The 32 hex digits that name the trace, empty when not traced."""
    return trace.split("-")[1] if trace else ""


def is_sampled(trace: str) -> bool:
    """Whether the caller records this trace."""
    return bool(trace) and bool(int(trace.split("-")[3], 16) & SAMPLED)
