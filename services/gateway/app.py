"""The ASGI application: routes, and what surrounds every request of them.

The edge gives each request its id and trace, counts it, turns typed errors into responses, and sends the
request's spans when its last byte has been handed over.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import visit as visits
from services.gateway.about import about
from services.gateway.desk import VISIT, Desk, visit_of
from services.gateway.openapi import document
from services.gateway.refusals import NoRoute, WrongMethod
from services.gateway.respond import refusal
from services.gateway.visit import Visit
from shared import telemetry
from shared.errors import EngineError, HeadraceError, Unavailable

OTHER = "other"  # the route of whatever has none


def build_app(desk: Desk) -> ASGIApp:
    """The application of one gateway."""
    routes = [
        Route("/v1/chat/completions", desk.chat, methods=["POST"]),
        Route("/v1/completions", desk.complete, methods=["POST"]),
        Route("/v1/models", desk.models, methods=["GET"]),
        Route("/v1/models/{model:path}", desk.model, methods=["GET"]),
        Route("/tokenize", desk.tokenize, methods=["POST"]),
        Route("/detokenize", desk.detokenize, methods=["POST"]),
        *about(desk),
    ]
    handlers = {HeadraceError: _refused, HTTPException: _no_route, Exception: _failed}
    return Edge(Starlette(routes=routes, exception_handlers=handlers), desk)  # type: ignore[arg-type]  # its handlers are typed for Exception alone


async def _refused(request: Request, error: HeadraceError) -> Response:
    visit = visit_of(request)
    visit.error = error
    return refusal(error, visit.request_id)


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
    """What every request passes on its way in and out."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self._app = app
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        desk = self._desk
        visit = scope[VISIT] = self._begin(scope)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers[visits.ID_HEADER] = visit.request_id
                if visit.trace:
                    headers[telemetry.HEADER] = visit.trace
            await send(message)

        desk.meter.begin()
        try:
            await self._app(scope, receive, marked)
        finally:
            self._end(visit)

    def _begin(self, scope: Scope) -> Visit:
        headers = Headers(scope=scope)
        tracer, given = self._desk.tracer, telemetry.from_headers(headers)
        trace, parent_span = (given, "") if tracer is None else tracer.begin(given)
        return Visit(
            method=scope["method"],
            route=_route(scope["path"]),
            request_id=visits.request_id(headers.get(visits.ID_HEADER, "")),
            trace=trace,
            parent_span=parent_span,
            started_us=self._desk.clock.wall_us(),
        )

    def _end(self, visit: Visit) -> None:
        desk = self._desk
        visit.ended_us = max(desk.clock.wall_us(), visit.started_us)
        desk.meter.end(visit)
        if isinstance(visit.error, Unavailable):
            desk.health.doubt(visit.error.message)
        if desk.tracer is not None and visit.asked_us and telemetry.is_sampled(visit.trace):
            desk.tracer.export(visit.trace, visit.parent_span, visits.spans(visit, desk.component))


_ROUTES = frozenset(document("")["paths"])


def _route(path: str) -> str:
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in _ROUTES else OTHER
