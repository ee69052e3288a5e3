"""The ASGI application: the paths of the gateway, and `Edge`, the middleware around every request.

The edge gives each request its id and trace, counts it, and exports its spans after the last byte. Exception
handlers turn typed errors into responses. The endpoints of `system_routes` describe this gateway and need no
key, except for /metrics, which needs the operator's.
"""

from __future__ import annotations

import asyncio
from importlib import metadata

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import exchange as exchanges
from services.gateway.errors import NoRoute, WrongMethod
from services.gateway.exchange import Exchange, answer, refusal
from services.gateway.openai_response import BODY_SEND
from services.gateway.openapi import document
from services.gateway.routes import EXCHANGE, Endpoints, exchange_of
from shared.errors import EngineError, HeadraceError, Unavailable
from shared.telemetry import traces
from shared.telemetry.metrics import CONTENT_TYPE, to_prometheus

OTHER = "other"  # the route of unknown paths in metrics
MET_503 = "a request was answered with 503"

_ROUTES = frozenset(document("")["paths"])


def build_app(endpoints: Endpoints) -> ASGIApp:
    """The application of one gateway."""
    routes = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.complete, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{model:path}", endpoints.model, methods=["GET"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        *system_routes(endpoints),
    ]
    handlers = {HeadraceError: _refused, HTTPException: _no_route, Exception: _failed}
    return Edge(Starlette(routes=routes, exception_handlers=handlers), endpoints)  # type: ignore[arg-type]  # its handlers are typed for Exception alone


def system_routes(endpoints: Endpoints) -> list[Route]:
    """Health, readiness, metrics, version, and the OpenAPI document."""
    version = _version()
    described = document(version)
    to_prometheus(())  # imports prometheus_client now, before the first request

    async def health(_: Request) -> Response:
        return _state(endpoints.health.why)

    async def ready(_: Request) -> Response:
        return _state(endpoints.health.unready)

    async def metrics(request: Request) -> Response:
        endpoints.keys.only_operator(request.headers.get("authorization", ""))
        readings = await endpoints.fleet_metrics()
        page = await asyncio.to_thread(to_prometheus, readings)  # some 10 ms: streams go on
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    async def version_of(_: Request) -> Response:
        return answer({"version": version})

    async def openapi(_: Request) -> Response:
        return answer(described)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/version", version_of, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]


def _state(why: str) -> Response:
    if why:
        return answer({"status": "unavailable", "reason": why}, 503, {"Retry-After": "1"})
    return answer({"status": "ok"})


def _version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0"


async def _refused(request: Request, error: HeadraceError) -> Response:
    exchange = exchange_of(request)
    exchange.error = error
    return refusal(error, exchange.request_id)


async def _no_route(request: Request, found: HTTPException) -> Response:
    path = request.url.path
    error: HeadraceError = NoRoute(f"there is nothing at {path:.200}: see /openapi.json")
    if found.status_code == 405:
        error = WrongMethod(f"{request.method} is not for {path:.200}: see /openapi.json")
    response = await _refused(request, error)
    response.headers.update(found.headers or {})
    return response


async def _failed(request: Request, _: Exception) -> Response:
    """A bug; starlette raises it again for the log."""
    return await _refused(request, EngineError("the gateway failed on this request: see its log"))


class Edge:
    """The middleware around every request: id, trace, counters."""

    def __init__(self, app: ASGIApp, endpoints: Endpoints) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoints = self._endpoints
        exchange = scope[EXCHANGE] = self._begin(scope)
        scope[BODY_SEND] = send

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers[exchanges.ID_HEADER] = exchange.given_id or exchange.request_id
                if exchange.trace:
                    headers[traces.HEADER] = exchange.trace
            await send(message)

        endpoints.counters.begin()
        try:
            await self._app(scope, receive, marked)
        finally:
            self._end(exchange)

    def _begin(self, scope: Scope) -> Exchange:
        headers = Headers(scope=scope)
        tracer, given = self._endpoints.tracer, traces.from_headers(headers)
        trace, parent_span = (given, "") if tracer is None else tracer.begin(given)
        given_id = exchanges.given_id(headers.get(exchanges.ID_HEADER, ""))
        return Exchange(
            method=scope["method"],
            route=_route(scope["path"]),
            request_id=exchanges.fresh_id(given_id),
            given_id=given_id,
            trace=trace,
            parent_span=parent_span,
            started_us=self._endpoints.clock.wall_us(),
        )

    def _end(self, exchange: Exchange) -> None:
        endpoints = self._endpoints
        exchange.ended_us = max(endpoints.clock.wall_us(), exchange.started_us)
        endpoints.counters.end(exchange)
        if isinstance(exchange.error, Unavailable):
            why = MET_503 if endpoints.keys.demanded else exchange.error.message  # /health needs no key
            endpoints.health.doubt(why, exchange.model)
        if endpoints.tracer is not None and exchange.requested_us and traces.is_sampled(exchange.trace):
            endpoints.tracer.export(
                exchange.trace, exchange.parent_span, exchanges.spans(exchange, endpoints.component)
            )


def _route(path: str) -> str:
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in _ROUTES else OTHER
