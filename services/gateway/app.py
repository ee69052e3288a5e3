"""The HTTP application: the table of its paths, and `ExchangeMiddleware` around every request.

A line of the table has a verb, a path, a handler and a description: the application and the OpenAPI document
follow from it. PARTS names the modules with further lines. The endpoints that describe this gateway need no
key, except for /metrics, which needs the operator's. The middleware gives each request its id and trace,
counts it, and exports its spans after the last byte. Exception handlers turn typed errors into responses.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import exchange as exchanges
from services.gateway import native_call
from services.gateway import openapi as doc
from services.gateway.endpoints import VERSION, Endpoints
from services.gateway.exchange import NoRoute, WrongMethod, answer, exchange_of
from services.gateway.openai_response import BODY_SEND, EMBEDDINGS, OPENAI
from services.gateway.openapi import Operation, Part
from services.gateway.visitors import Visitors
from shared.errors import EngineError, HeadraceError, Unavailable
from shared.nats import subjects
from shared.telemetry import traces
from shared.telemetry.metrics import CONTENT_TYPE, to_prometheus

OTHER = "other"  # the route of unknown paths in metrics
MET_503 = "a request was answered with 503"


async def models(endpoints: Endpoints, request: Request) -> Response:
    """The models served."""
    return answer(await native_call.served_models(await endpoints.client_of(request)))


async def model(endpoints: Endpoints, request: Request) -> Response:
    """One of them."""
    client = await endpoints.client_of(request)
    return answer(await native_call.served_model(client, request.path_params["model"]))


async def tokenize(endpoints: Endpoints, request: Request) -> Response:
    """The native answer in vLLM's shape."""
    found = await endpoints.tokenized(request, OPENAI)
    return answer({"model": found["model"], "count": found["count"], "tokens": found["tokens"]})


async def detokenize(endpoints: Endpoints, request: Request) -> Response:
    """The native answer in vLLM's shape."""
    fields, client = await endpoints.read_request(request)
    subject = subjects.detokenize(client.tenant, fields["model"])
    found = await endpoints.request_native(client, subject, fields)
    return answer({"model": found["model"], "prompt": found["text"]})


async def metrics(endpoints: Endpoints, request: Request) -> Response:
    """The metrics of the fleet."""
    endpoints.keys.only_operator(exchanges.credential(request))
    readings = await endpoints.fleet.metrics()
    page = await asyncio.to_thread(to_prometheus, readings)  # some 10 ms: streams go on
    return Response(page, headers={"Content-Type": CONTENT_TYPE})


async def healthy(endpoints: Endpoints, _: Request) -> Response:
    """Whether a request would succeed."""
    return _state(endpoints.health.why)


async def ready(endpoints: Endpoints, _: Request) -> Response:
    """Whether this gateway takes requests."""
    return _state(endpoints.health.unready)


def _state(why: str) -> Response:
    if why:
        return answer({"status": "unavailable", "reason": why}, 503, {"Retry-After": "1"})
    return answer({"status": "ok"})


async def version(_: Endpoints, request: Request) -> Response:
    """The version."""
    return answer({"version": VERSION})


async def openapi(_: Endpoints, request: Request) -> Response:
    """The document."""
    return answer(DOCUMENT)


_generate = Endpoints.generate
OWN = Part(
    (
        Operation("POST", "/v1/chat/completions", partial(_generate, chat=True), doc.CHAT),
        Operation("POST", "/v1/completions", partial(_generate, chat=False), doc.COMPLETION),
        Operation("POST", "/v1/embeddings", partial(_generate, chat=False, api=EMBEDDINGS), doc.EMBEDDING),
        Operation("GET", "/v1/models", models, doc.get("Models", "the models served", doc.LISTING)),
        Operation("GET", "/v1/models/{model:path}", model, doc.get("Model", "one served model", doc.FINDING)),
        Operation("POST", "/tokenize", tokenize, doc.TOKENIZE),
        Operation("POST", "/detokenize", detokenize, doc.DETOKENIZE),
        Operation("GET", "/health", healthy, doc.state("would a request succeed now?")),
        Operation("GET", "/ready", ready, doc.state("does this gateway accept requests?")),
        Operation("GET", "/metrics", metrics, doc.METRICS),
        Operation("GET", "/version", version, doc.version("the version")),
        Operation("GET", "/openapi.json", openapi, doc.ITSELF),
    ),
    doc.COMPONENTS,
)  # fmt: skip
# The parts that the gateway has beside its own paths: each `build` returns a Part. Their lines go first.
PARTS = (
    "services.gateway.dialects.responses:build",
    "services.gateway.dialects.later:build",
    "services.gateway.dialects.anthropic:build",
    "services.gateway.dialects.ollama:build",
    "services.gateway.dialects.adapters:build",
    "services.gateway.batches:build",
    "services.gateway.sessions:build",
    "services.gateway.page:build",
)
_PARTS: list[Part] = [*(resolve_name(name)() for name in PARTS), OWN]
DOCUMENT = doc.document(VERSION, _PARTS)
_DESCRIBED = [each.path for part in _PARTS for each in part.operations if each.described is not None]
_WITH_ID = [compile_path(path)[:2] for path in _DESCRIBED if "{" in path]


def build_app(endpoints: Endpoints, origins: Sequence[str] = (), visitors: Visitors | None = None) -> ASGIApp:
    """The application of one gateway; pages of other `origins` may use it. `visitors` None: no host is
    refused, since no browser reaches a Unix socket."""
    to_prometheus(())  # imports prometheus_client now, before the first request
    handlers = {HeadraceError: _refused, HTTPException: _no_route, Exception: _failed}
    cors = Middleware(
        CORSMiddleware,
        origins,
        ["*"],
        ["*"],
        expose_headers=[exchanges.ID_HEADER, exchanges.IGNORED_HEADER, "Retry-After", "Location"],
    )
    app = Starlette(
        routes=_routes(endpoints),
        exception_handlers=handlers,  # type: ignore[arg-type]  # they are typed for Exception alone
        middleware=[cors] if origins else [],
    )
    return ExchangeMiddleware(app, endpoints, visitors)


def _routes(endpoints: Endpoints) -> list[Route]:
    """One for each path: a 405 then names all of its verbs."""
    verbs: dict[str, dict[str, Any]] = defaultdict(dict)
    for part in _PARTS:
        owner = part.owner(endpoints)
        for line in part.operations:
            verbs[line.path].setdefault(line.verb, (partial(line.handler, owner), part.error_body))
    return [Route(path, partial(_serve, found), methods=[*found]) for path, found in verbs.items()]


async def _serve(verbs: Mapping[str, Any], request: Request) -> Response:
    handler, exchange_of(request).error_body = verbs["GET" if request.method == "HEAD" else request.method]
    response: Response = await handler(request)
    return response


async def _refused(request: Request, error: HeadraceError) -> Response:
    exchange = exchange_of(request)
    exchange.error = error
    return exchanges.refusal(error, exchange)


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


class ExchangeMiddleware:
    """The middleware around every request: id, trace, counters."""

    def __init__(self, app: ASGIApp, endpoints: Endpoints, visitors: Visitors | None = None) -> None:
        self._app, self._visitors = app, visitors
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoints = self._endpoints
        exchange = scope[exchanges.EXCHANGE] = self._begin(scope)
        scope[BODY_SEND] = send

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers.update(exchanges.headers_of_exchange(exchange))
            await send(message)

        endpoints.counters.begin()
        for observer in endpoints.observers:
            observer.begin(exchange)
        app = self._app
        if self._visitors is not None:
            exchange.error = self._visitors.refusal(scope["method"], Headers(scope=scope))
            app = self._app if exchange.error is None else exchanges.refusal(exchange.error, exchange)
        try:
            await app(scope, receive, marked)
        finally:
            self._end(exchange)
            # both lead back to the exchange: a cycle holds what the request has read until a rare collection
            exchange.error = None
            del scope[BODY_SEND]

    def _begin(self, scope: Scope) -> exchanges.Exchange:
        headers = Headers(scope=scope)
        tracer, given = self._endpoints.tracer, traces.from_headers(headers)
        trace, parent_span = (given, "") if tracer is None else tracer.begin(given)
        named = exchanges.given_id(headers.get(exchanges.ID_HEADER, ""))
        return exchanges.Exchange(
            method=scope["method"],
            route=_route(scope["path"]),
            request_id=exchanges.fresh_id(named),
            given_id=named,
            trace=trace,
            parent_span=parent_span,
            started_us=self._endpoints.clock.wall_us(),
            client=(scope.get("client") or ("",))[0],
            agent=headers.get("user-agent", ""),
        )

    def _end(self, exchange: exchanges.Exchange) -> None:
        endpoints = self._endpoints
        exchange.ended_us = max(endpoints.clock.wall_us(), exchange.started_us)
        endpoints.counters.end(exchange)
        for observer in endpoints.observers:
            observer.end(exchange)
        if endpoints.access_log is not None:
            endpoints.access_log.write(exchanges.access_line(exchange), exchange.body)
        if isinstance(exchange.error, Unavailable):
            why = MET_503 if endpoints.keys.demanded else exchange.error.message  # /health needs no key
            endpoints.health.doubt(why, exchange.model)
        if endpoints.tracer is not None and exchange.requested_us and traces.is_sampled(exchange.trace):
            endpoints.tracer.export(
                exchange.trace, exchange.parent_span, exchanges.spans(exchange, endpoints.component)
            )


def _route(path: str) -> str:
    """The path without its variable parts."""
    if path in DOCUMENT["paths"]:
        return path
    return next((name for pattern, name in _WITH_ID if pattern.match(path)), OTHER)
