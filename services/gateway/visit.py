"""One HTTP request from its first byte to its last: who asks, under which id, and when what happened."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from shared import conventions as c
from shared.errors import HeadraceError
from shared.spans import SpanRecord

ID_HEADER = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # as the native protocol wants it
_ID_BYTES = 12


@dataclass(slots=True, kw_only=True)
class Visit:
    """Stamps are wall-clock microseconds; 0 = has not happened."""

    method: str
    route: str  # the path, without what is different in each request
    request_id: str
    trace: str = ""  # the traceparent of our own span, or what the client sent
    parent_span: str = ""  # above our own span; empty: not traced by us
    started_us: int = 0
    asked_us: int = 0  # the native request was sent
    first_us: int = 0  # of a stream: its first chunk was ready
    answered_us: int = 0  # the last native message came
    ended_us: int = 0
    tenant: str = ""
    model: str = ""
    status: int = 0
    error: HeadraceError | None = None


def request_id(given: str) -> str:
    """The id that the client gave if it can be one, else a new one."""
    return given if _ID.fullmatch(given) else secrets.token_hex(_ID_BYTES)


def spans(visit: Visit, component: str) -> list[SpanRecord]:
    """The request as the gateway sees it; between its two stages lie the spans of the native request."""
    attributes: dict[str, str | int] = {
        c.COMPONENT: component,
        c.REQUEST_ID: visit.request_id,
        c.TENANT: visit.tenant,
        c.HTTP_METHOD: visit.method,
        c.HTTP_ROUTE: visit.route,
        c.HTTP_STATUS: visit.status,
    }
    error = visit.error.message if visit.error is not None else ""
    if visit.error is not None:
        attributes[c.ERROR_TYPE] = visit.error.type
    name = f"{visit.method} {visit.route}"
    asked = visit.asked_us or visit.ended_us
    answered = max(visit.answered_us or visit.ended_us, asked)
    where = {c.COMPONENT: component}
    return [
        SpanRecord(name, visit.started_us, visit.ended_us, None, {**attributes}, kind="server", error=error),
        SpanRecord("receive", visit.started_us, asked, attributes={**where}),
        SpanRecord("respond", answered, max(visit.ended_us, answered), attributes={**where}),
    ]
