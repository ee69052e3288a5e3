"""A Exchange records one HTTP request from its first byte to its last, and a Meter counts all exchanges.

A Exchange holds the tenant, the id and the stamps of a request; `spans` is its trace. The Meter names what it
counts as OpenTelemetry does, and `/metrics` writes that for Prometheus. Responses are JSON: answers, and
refusals of the OpenAI form.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from services.gateway.errors import body_of, headers_of, status_of
from shared.api import REQUEST_ID
from shared.client import SlowReader
from shared.errors import HeadraceError
from shared.replies import to_json
from shared.telemetry import traces as c
from shared.telemetry.readings import Attributes, HistogramPoint, MetricPoint, Metrics
from shared.telemetry.traces import SpanRecord

ID_HEADER = "x-request-id"
_ID_BYTES = 12
_GIVEN_CHARS = 96  # of a given id that begin the request's own

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
OURS = "headrace.gateway"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Stamps are wall-clock microseconds; 0 = has not happened."""

    method: str
    route: str  # the path, without what is different in each request
    request_id: str  # the request's own: no other that runs has it
    given_id: str = ""  # what the client calls it: it may say so of several
    trace: str = ""  # the traceparent of our own span, or what the client sent
    parent_span: str = ""  # above our own span; empty: not traced by us
    started_us: int = 0
    requested_us: int = 0  # the native request was sent
    first_us: int = 0  # of a stream: its first chunk was ready
    answered_us: int = 0  # the last native message came
    ended_us: int = 0
    tenant: str = ""
    counted: bool = False  # as open, of its tenant
    model: str = ""
    status: int = 0
    error: HeadraceError | None = None


def given_id(header: str) -> str:
    """The id that the client gave if it can be one."""
    return header if re.fullmatch(REQUEST_ID, header) else ""


def fresh_id(given: str) -> str:
    """An id that no other request has. It begins with the one that the client gave: a mesh gives the calls
    that belong together the same."""
    drawn = secrets.token_hex(_ID_BYTES)
    return f"{given[:_GIVEN_CHARS]}.{drawn}" if given else drawn


def spans(exchange: Exchange, component: str) -> list[SpanRecord]:
    """The request as the gateway sees it; between its two stages lie the spans of the native request."""
    attributes: dict[str, str | int] = {
        c.COMPONENT: component,
        c.REQUEST_ID: exchange.request_id,
        c.TENANT: exchange.tenant,
        c.HTTP_METHOD: exchange.method,
        c.HTTP_ROUTE: exchange.route,
        c.HTTP_STATUS: exchange.status,
    }
    error = exchange.error.message if exchange.error is not None else ""
    if exchange.error is not None:
        attributes[c.ERROR_TYPE] = exchange.error.type
    name = f"{exchange.method} {exchange.route}"
    asked = exchange.requested_us or exchange.ended_us
    answered = max(exchange.answered_us or exchange.ended_us, asked)
    where = {c.COMPONENT: component}
    return [
        SpanRecord(
            name, exchange.started_us, exchange.ended_us, None, {**attributes}, kind="server", error=error
        ),
        SpanRecord("receive", exchange.started_us, asked, attributes={**where}),
        SpanRecord("respond", answered, max(exchange.ended_us, answered), attributes={**where}),
    ]


def answer(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(to_json(body), status, headers, "application/json")


def refusal(error: HeadraceError, request_id: str) -> Response:
    """An error, with its headers."""
    return answer(body_of(error, request_id), status_of(error), headers_of(error))


@dataclass(slots=True)
class Durations:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, took_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.total_s += took_s

    def histogram(self, name: str, attributes: Attributes = ()) -> HistogramPoint:
        """As others read it."""
        return HistogramPoint(name, BOUNDS_S, list(self.counts), self.total_s, "s", attributes)


class ExchangeCounters:
    """The counts of one gateway."""

    def __init__(self) -> None:
        self.active = 0
        self.slow_readers = 0
        self.chunks = 0
        self.open: Counter[str] = Counter()  # requests for an answer, by tenant
        self._took: dict[tuple[str, int], Durations] = {}
        self._first: dict[str, Durations] = {}

    def begin(self) -> None:
        """A request came."""
        self.active += 1

    def enter(self, exchange: Exchange) -> None:
        """It asks for an answer, in the name of a tenant."""
        exchange.counted = True
        self.open[exchange.tenant] += 1

    def end(self, exchange: Exchange) -> None:
        """It was answered, or its client has gone."""
        self.active -= 1
        if exchange.counted:
            self.open[exchange.tenant] -= 1
            self.open += Counter()  # without those of whom nothing is open
        self.slow_readers += isinstance(exchange.error, SlowReader)
        took = self._took.setdefault((exchange.route, exchange.status), Durations())
        took.add((exchange.ended_us - exchange.started_us) / 1e6)
        if exchange.first_us:
            first = self._first.setdefault(exchange.route, Durations())
            first.add((exchange.first_us - exchange.started_us) / 1e6)

    @property
    def requests(self) -> int:
        """Requests that have ended."""
        return sum(sum(took.counts) for took in self._took.values())

    def metrics(self) -> Metrics:
        """Everything, now."""
        counted = [
            MetricPoint("http.server.active_requests", self.active, "{request}"),
            MetricPoint(f"{OURS}.chunks", self.chunks, "{chunk}", is_counter=True),
            MetricPoint(f"{OURS}.slow_readers", self.slow_readers, "{stream}", is_counter=True),
        ]
        took = [
            durations.histogram(
                "http.server.request.duration", ((c.HTTP_ROUTE, route), (c.HTTP_STATUS, str(status)))
            )
            for (route, status), durations in sorted(self._took.items())
        ]
        first = [
            durations.histogram(f"{OURS}.time_to_first_chunk", ((c.HTTP_ROUTE, route),))
            for route, durations in sorted(self._first.items())
        ]
        return [*counted, *took, *first]
