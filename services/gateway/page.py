"""The page for people at `/`: chat, the fleet's state, the last requests with their waterfalls, the KV tiers.

The page is static and open to all; the calls for its data need the key, where there are keys. A tenant sees
its own requests, the operator those of all tenants and the fleet.

    /, /page/…        HTML, scripts, style: from `static`, no CDN
    /docs             the API: /openapi.json, readable, with a form for each path
    /fleet            the states of all services
    /requests         the last requests of this gateway, and those that run
    /requests/{id}    where the time of one of them went; `?tenant=` names one of several with this id

Collects facts of the fleet over NATS: the metrics of all services, their states, the trace of a request.

    Prometheus ──GET /metrics──▶ gateway ──hr.<fleet>.metrics──▶ every service
                                         ◀──── its metrics ─────

The gateway answers its own request for metrics, so all gateways on one port give the same page. Invariant: a
service that does not answer delays a page by at most ANSWER_S, and has `headrace_up` 0 on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.errors import NoRoute
from services.gateway.exchange import Exchange, access_line, answer, credential
from shared.actor.mailbox import Mailbox
from shared.client.client import gather
from shared.clock import Clock, SystemClock
from shared.errors import WireError
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.telemetry.readings import MetricPoint, Metrics, unpack

KEPT = 200  # requests in the list, and at most as many that run
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_FOLDERS = ("static", "static/marked")  # marked reads Markdown: its version and licence are beside it
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Access(Protocol):
    """What a key allows to see."""

    def viewer_of(self, authorization: str) -> str | None:
        """The tenant of a key; None may see all tenants. Raises NotAuthorized."""

    def only_operator(self, authorization: str) -> None:
        """Raises NotAuthorized, Forbidden."""


class Page:
    """The page of one gateway, and the list of its last requests."""

    def __init__(self, fleet: Fleet, access: Access, clock: Clock | None = None) -> None:
        self._fleet, self._access, self._clock = fleet, access, clock or SystemClock()
        self._running: dict[int, Exchange] = {}  # by id(): a request gets its own id later
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._files = _files()

    def begin(self, exchange: Exchange) -> None:
        """A request has arrived. It is in the list once it is one for an answer."""
        self._running[id(exchange)] = exchange

    def end(self, exchange: Exchange) -> None:
        """A request has ended."""
        del self._running[id(exchange)]
        if exchange.asks:
            why = {"message": exchange.error.message} if exchange.error is not None else {}
            self._recent.appendleft({**access_line(exchange), **why})

    def routes(self) -> list[Route]:
        """The page's paths."""
        return [
            Route("/", self._file, methods=["GET"]),
            Route("/docs", self._docs, methods=["GET"]),
            Route("/page/{name}", self._file, methods=["GET"]),
            Route("/fleet", self._states, methods=["GET"]),
            Route("/requests", self._requests, methods=["GET"]),
            Route("/requests/{id}", self._trace, methods=["GET"]),
        ]

    async def _file(self, request: Request) -> Response:
        return self._sent(request.path_params.get("name", "index.html"))

    async def _docs(self, _: Request) -> Response:
        return self._sent("docs.html")

    def _sent(self, name: str) -> Response:
        if name not in self._files:
            raise NoRoute(f"the page has no file {name!r:.80}")
        media_type = _TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], headers=_HEADERS, media_type=media_type)

    async def _states(self, request: Request) -> Response:
        self._access.only_operator(credential(request))
        return answer({"services": await self._fleet.states()})

    async def _requests(self, request: Request) -> Response:
        return answer({"requests": self._seen_by(request)})

    async def _trace(self, request: Request) -> Response:
        wanted, tenant = request.path_params["id"], request.query_params.get("tenant")
        seen = [each["tenant"] for each in self._seen_by(request) if each["request_id"] == wanted]
        if tenant not in (None, *seen) or not seen:
            raise NoRoute(f"{wanted!r:.140} is not among the last {KEPT} requests of this gateway")
        if (found := await self._fleet.trace(tenant or seen[0], wanted)) is None:
            raise NoRoute(f"no scheduler knows the request {wanted!r:.140} any more")
        return answer(found)

    def _seen_by(self, request: Request) -> list[dict[str, Any]]:
        viewer = self._access.viewer_of(credential(request))
        run, now_us = [each for each in self._running.values() if each.asks], self._clock.wall_us()
        lines = [{**access_line(each, now_us), "running": True} for each in run[-KEPT:]]
        seen = [line for line in (*lines, *self._recent) if viewer is None or line["tenant"] == viewer]
        return sorted(seen, key=lambda line: str(line["time"]), reverse=True)


def _files() -> dict[str, bytes]:
    """The files that are sent, by name."""
    folders = [resources.files("services.gateway").joinpath(name) for name in _FOLDERS]
    files = [each for folder in folders for each in folder.iterdir()]
    return {each.name: each.read_bytes() for each in files if each.name.rpartition(".")[2] in _TYPES}


log = logging.getLogger("headrace.gateway")

ANSWER_S = 2.0  # a busy service answers within a step; Prometheus gives up after 10 s
KEPT_US = 900_000  # answers are collected at most once in this time: every client may request them

T = TypeVar("T")
Body = dict[str, Any]


class Collector(Generic[T]):
    """Asks all services on one subject. Requests within KEPT_US share one collection."""

    def __init__(self, mailbox: Mailbox, subject: str, read: Callable[[bytes], tuple[str, T]]) -> None:
        """`read` gives the actor `kind.id` and its answer; it raises WireError."""
        self._mailbox, self._subject, self._read = mailbox, subject, read
        self._collecting: asyncio.Task[dict[str, T | None]] | None = None
        self._since_us = 0

    async def collect(self) -> dict[str, T | None]:
        """The answers by actor, sorted; None of a living actor that did not answer within ANSWER_S."""
        now_us = self._mailbox.clock.now_us()
        if self._collecting is None or (self._collecting.done() and now_us - self._since_us > KEPT_US):
            self._since_us = now_us
            self._collecting = asyncio.create_task(self._collect())
        return await asyncio.shield(self._collecting)  # the task goes on when its first client leaves

    async def _collect(self) -> dict[str, T | None]:
        found: dict[str, T] = {}
        living = {*self._mailbox.peers.sources(), self._mailbox.source}

        def note(delivery: Delivery) -> bool:
            try:
                source, answer = self._read(delivery.data)
            except WireError as error:
                log.warning("dropped an answer on %s: %s", self._subject, error)
            else:
                found[source] = answer
            return living <= found.keys()

        await gather(self._mailbox.bus, self._subject, ANSWER_S, note)
        return {source: found.get(source) for source in sorted({*found, *living})}


class Fleet:
    """What the page and `/metrics` show of one gateway's fleet."""

    def __init__(self, mailbox: Mailbox, own: Callable[[], Metrics]) -> None:
        """`own` are the metrics of this gateway, for the time without a nats-server."""
        self._mailbox, self._own = mailbox, own
        self._metrics = Collector(mailbox, subjects.metrics(mailbox.fleet), unpack)
        self._states = Collector(mailbox, subjects.STATUS, _state)

    async def metrics(self) -> Metrics:
        """The metrics of every living service, with the attributes `service` and `instance`."""
        found: dict[str, Metrics | None] = {**await self._metrics.collect()}
        found[self._mailbox.source] = found.get(self._mailbox.source) or self._own()
        return [*chain.from_iterable(_labelled(source, metrics) for source, metrics in found.items())]

    async def states(self) -> list[Body]:
        """The status of every living service of this fleet, as `headrace status --json` has it."""
        found = await self._states.collect()
        silent = {source: source.partition(".") for source, state in found.items() if state is None}
        states = [{"kind": kind, "id": actor, "state": "silent"} for kind, _, actor in silent.values()]
        return [*states, *(s for s in found.values() if s and s.get("fleet") == self._mailbox.fleet)]

    async def trace(self, tenant: str, request_id: str) -> Body | None:
        """The trace of a request of a tenant, as `headrace trace --json` has it; None if no scheduler knows
        it."""
        known: list[Body] = []

        def note(delivery: Delivery) -> bool:
            with contextlib.suppress(ValueError):
                body = from_json(delivery.data)
                # a scheduler of an older version answers for any tenant
                known.extend([body] if body.get("tenant") == tenant else [])
            return bool(known)

        asked = subjects.trace_body(tenant)
        await gather(self._mailbox.bus, subjects.trace(request_id), ANSWER_S, note, body=asked)
        return known[0] if known else None


def _state(data: bytes) -> tuple[str, Body]:
    try:
        state = from_json(data)
        return f"{state['kind']}.{state['id']}", state
    except (ValueError, TypeError, KeyError):
        raise WireError("a status of another form") from None


def _labelled(source: str, metrics: Metrics | None) -> Metrics:
    service, _, instance = source.partition(".")
    labels = (("service", service), ("instance", instance))
    up = MetricPoint("headrace.up", int(metrics is not None), "1")
    return [replace(each, attributes=(*labels, *each.attributes)) for each in (up, *(metrics or ()))]
