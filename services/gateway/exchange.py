"""An `Exchange` records one HTTP request from its first byte to its last; `ExchangeCounters` counts them.

An exchange holds the tenant, the id and the stamps of a request; `spans` is its trace. The counters have
OpenTelemetry names, and `/metrics` exports them for Prometheus. `answer` and `refusal` build JSON responses.

The errors of HTTP requests are here, with their headers. Client libraries retry 408, 409, 429 and 5xx by
themselves, after `retry-after-ms`.

`AccessLog` writes a line of JSON for each HTTP request: client, result, times, tokens.

The middleware calls it after the last byte of an answer. Prompts and answers are left out; a setting
adds the body of the request. Invariant: a file that cannot be written costs lines of the log, never a
request.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from shared.api import REQUEST_ID
from shared.client.client import SlowReader
from shared.errors import HeadraceError, SetupError
from shared.openai.call import error_body, error_status, total
from shared.replies import to_json
from shared.telemetry import traces as c
from shared.telemetry.counters import Counted, GatewayCounter, HistogramPoint, Metrics, points
from shared.telemetry.counters import Counter as Declared
from shared.telemetry.traces import SpanData

EXCHANGE = "headrace.exchange"  # where a request's Exchange is kept in its scope
ID_HEADER = "x-request-id"
IGNORED_HEADER = "headrace-ignored"
MAX_IGNORED, _IGNORED_CHARS = 32, 64  # names in the header, and characters of each
_ID_BYTES = 12
_GIVEN_CHARS = 96  # of the client's id, as a prefix of the request's own

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


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


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP request. Stamps are wall-clock microseconds; 0 = not yet."""

    method: str
    route: str  # the path without its variable parts
    request_id: str  # unique
    given_id: str = ""  # the client's id, not unique
    trace: str = ""  # traceparent of the gateway's span, or the client's
    parent_span: str = ""  # parent of the gateway's span; empty: not traced here
    started_us: int = 0
    requested_us: int = 0  # the native request was sent
    first_us: int = 0  # the first chunk of a stream was ready
    answered_us: int = 0  # the last native message arrived
    ended_us: int = 0
    tenant: str = ""
    counted: bool = False  # in `ExchangeCounters.open`
    model: str = ""
    status: int = 0
    error: HeadraceError | None = None
    client: str = ""  # address
    agent: str = ""  # `User-Agent`
    stream: bool | None = None  # None: no request for an answer
    body: Mapping[str, Any] | None = None  # fields of the request; only for an access log that wants them
    usages: list[dict[str, Any]] = field(default_factory=list)  # of each prompt that was answered
    error_body: Callable[[HeadraceError, str], dict[str, Any]] = error_body  # in the shape of its API
    ignored: Sequence[str] = ()  # fields that change nothing

    @property
    def is_generation(self) -> bool:
        """True for a request for a new answer, with a key where one is needed."""
        return self.counted and self.method == "POST"


class Observer(Protocol):
    """What sees every exchange."""

    def begin(self, exchange: Exchange) -> None:
        """A request has arrived."""

    def end(self, exchange: Exchange) -> None:
        """It has ended."""


def exchange_of(request: Request) -> Exchange:
    """The Exchange of a request, made by the edge."""
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


def credential(request: Request) -> str:
    """The `Authorization` header, or one with the key in `X-Api-Key`."""
    headers = request.headers
    return headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"


def given_id(header: str) -> str:
    """The client's id from a header, empty if it is not valid."""
    return header if re.fullmatch(REQUEST_ID, header) else ""


def fresh_id(given: str) -> str:
    """A unique id. It starts with the client's id: a service mesh gives related calls the same one."""
    drawn = secrets.token_hex(_ID_BYTES)
    return f"{given[:_GIVEN_CHARS]}.{drawn}" if given else drawn


def headers_of_exchange(exchange: Exchange) -> dict[str, str]:
    """The headers of any response to a request: its id, its trace, and what of it was ignored. A name comes
    from the client: one with other than letters, digits and marks of names is quoted and escaped."""
    headers = {ID_HEADER: exchange.given_id or exchange.request_id}
    if exchange.trace:
        headers[c.HEADER] = exchange.trace
    if names := exchange.ignored[:MAX_IGNORED]:
        headers[IGNORED_HEADER] = ", ".join(
            name
            if re.fullmatch(r"[\w.:-]{1,64}", name, re.ASCII)
            else ascii(name[:_IGNORED_CHARS])[:_IGNORED_CHARS]
            for name in names
        )
    return headers


def spans(exchange: Exchange, component: str) -> list[SpanData]:
    """The gateway's spans of a request. Those of the native request lie between `receive` and `respond`."""
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
        SpanData(
            name, exchange.started_us, exchange.ended_us, None, {**attributes}, kind="server", error=error
        ),
        SpanData("receive", exchange.started_us, asked, attributes={**where}),
        SpanData("respond", answered, max(exchange.ended_us, answered), attributes={**where}),
    ]


def answer(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(to_json(body), status, headers, "application/json")


def refusal(error: HeadraceError, exchange: Exchange) -> Response:
    """An error response with its headers."""
    return answer(exchange.error_body(error, exchange.request_id), error_status(error), headers_of(error))


@dataclass(slots=True)
class Durations:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, took_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.total_s += took_s

    def histogram(self, of: Declared, *attributes: str) -> HistogramPoint:
        """The histogram as a metric."""
        return of.histogram(BOUNDS_S, self.counts, self.total_s, *attributes)


class ExchangeCounters:
    """The counts of one gateway."""

    def __init__(self) -> None:
        self.active = 0
        self.slow_readers = 0
        self.chunks = 0
        self.open: Counter[str] = Counter()  # requests for an answer, by tenant
        self._hints: Counter[tuple[str, str]] = Counter()  # by header of a session, and what became of it
        self._took: dict[tuple[str, int], Durations] = {}
        self._first: dict[str, Durations] = {}

    def begin(self) -> None:
        """A request has arrived."""
        self.active += 1

    def enter(self, exchange: Exchange) -> None:
        """A request of a tenant to a model."""
        exchange.counted = True
        self.open[exchange.tenant] += 1

    def note_hints(self, fates: Mapping[str, str]) -> None:
        """What became of the headers of a request that name its session."""
        self._hints.update(fates.items())

    def end(self, exchange: Exchange) -> None:
        """A request was answered, or its client has gone."""
        self.active -= 1
        if exchange.counted:
            self.open[exchange.tenant] -= 1
            self.open += Counter()  # drops the zeros
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

    @property
    def counted(self) -> Counted:
        """Those without attributes."""
        return {
            GatewayCounter.ACTIVE: self.active,
            GatewayCounter.REQUESTS: self.requests,
            GatewayCounter.CHUNKS: self.chunks,
            GatewayCounter.SLOW_READERS: self.slow_readers,
        }

    def metrics(self) -> Metrics:
        """All counters."""
        took = [
            durations.histogram(GatewayCounter.DURATION, route, str(status))
            for (route, status), durations in sorted(self._took.items())
        ]
        first = [
            durations.histogram(GatewayCounter.FIRST_CHUNK, route)
            for route, durations in sorted(self._first.items())
        ]
        hints = [GatewayCounter.HINTS.point(count, *key) for key, count in sorted(self._hints.items())]
        return [*points(self.counted), *took, *first, *hints]


log = logging.getLogger("headrace.gateway")

STDOUT = "-"
MAX_AGENT_CHARS = 256  # of a client's own header


class AccessLog:
    """The access log of one gateway. A file that was moved, as logrotate does it, is opened again."""

    def __init__(self, target: str, *, prompts: bool = False) -> None:
        """`target` is a file, or STDOUT; `prompts` adds the bodies of requests. Raises SetupError."""
        self.prompts = prompts
        self._target, self._lost = target, 0
        try:
            self._handler: logging.Handler = (
                logging.StreamHandler(sys.stdout) if target == STDOUT else WatchedFileHandler(target)
            )
        except OSError as error:
            raise SetupError(f"access_log: {target} cannot be written: {error}") from None
        self._handler.handleError = self._on_error  # type: ignore[method-assign]  # else a traceback a line

    def write(self, line: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> None:
        """Write the line of a request that has ended (`line_of`), with the body of the request if given."""
        lost = self._lost
        text = to_json(line if body is None else {**line, "body": body}).decode()
        self._handler.handle(logging.LogRecord("access", logging.INFO, "", 0, text, None, None))
        if lost and lost == self._lost:
            log.info("access_log: %s is written again; %d lines are lost", self._target, lost)
            self._lost = 0

    def close(self) -> None:
        """Close the file."""
        self._handler.close()

    def _on_error(self, record: logging.LogRecord) -> None:
        if not self._lost:
            log.error("access_log: %s cannot be written: %s", self._target, sys.exc_info()[1])
        self._lost += 1


def access_line(exchange: Exchange, now_us: int = 0) -> dict[str, Any]:
    """The fields of a line. Times are milliseconds; a field that a request does not have is left out.
    `now_us`: the time of the clock, for a request that has not ended."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(exchange.started_us / 1e6, UTC).isoformat(timespec="milliseconds"),
        "client": exchange.client,
        "tenant": exchange.tenant,
        "method": exchange.method,
        "path": exchange.route,
        "status": exchange.status,
        "request_id": exchange.request_id,
        "model": exchange.model,
        "stream": exchange.stream,
        "duration_ms": _ms(max((exchange.ended_us or now_us) - exchange.started_us, 0)),
        "first_chunk_ms": _ms(exchange.first_us - exchange.started_us) if exchange.first_us else None,
        "error": exchange.error.type if exchange.error is not None else None,
        "user_agent": exchange.agent[:MAX_AGENT_CHARS],
        "traceparent": exchange.trace,
    }
    if exchange.usages:
        usage = total(exchange.usages)
        line |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        line["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
    return {name: value for name, value in line.items() if value not in (None, "")}


def _ms(us: int) -> float:
    return round(us / 1000, 1)
