"""The HTTP application: the paths of the gateway, and `ExchangeMiddleware` around every request.

`build_app` has the paths. `Endpoints` serves them and holds their shared state. An endpoint of models finds
the tenant of the request's key, then uses that tenant's connection. The endpoints that describe this gateway
need no key, except for /metrics, which needs the operator's. `Keys` maps API keys to tenants. The middleware
gives each request its id and trace, counts it, and exports its spans after the last byte. Exception handlers
turn typed errors into responses.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import metadata
from pkgutil import resolve_name
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import exchange as exchanges
from services.gateway import native_call
from services.gateway.errors import NoRoute, NotAuthorized, WrongMethod
from services.gateway.exchange import answer, exchange_of
from services.gateway.openai_response import BODY_SEND, EMBEDDINGS, OPENAI, Api, Body, Chunks, EventStream
from services.gateway.openapi import Part, document
from services.gateway.visitors import Visitors
from shared.client.client import Client
from shared.clock import Clock, SystemClock
from shared.config import WatchedFile
from shared.errors import EngineError, Forbidden, HeadraceError, Overloaded, Unavailable
from shared.fair_share import is_over_share
from shared.nats import access, subjects
from shared.nats.interface import NoResponders
from shared.nats.subjects import DEFAULT_TENANT, MAX_NAME_CHARS
from shared.openai.call import Call, timed_id
from shared.telemetry import traces
from shared.telemetry.export import Tracer
from shared.telemetry.metrics import CONTENT_TYPE, to_prometheus

log = logging.getLogger("headrace.gateway")

MAX_ACTIVE = 8_192  # requests of one gateway
RETRY_AFTER_MS = 1_000
OTHER = "other"  # the route of unknown paths in metrics
MET_503 = "a request was answered with 503"

OPERATOR = access.user_of(access.OPERATOR)
HASHED = "sha256:"
_HEX = re.compile(r"[0-9a-f]{64}")


def _version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0"


# The parts that the gateway has beside its own paths: each `build` returns a Part.
PARTS = (
    "services.gateway.dialects.responses:build",
    "services.gateway.dialects.later:build",
    "services.gateway.dialects.anthropic:build",
    "services.gateway.dialects.ollama:build",
    "services.gateway.batches:build",
    "services.gateway.page:build",
)
VERSION = _version()
_PARTS: list[Part] = [resolve_name(name)() for name in PARTS]
DOCUMENT = document(VERSION, _PARTS)
_WITH_ID = {
    route: re.compile(re.sub(r"{\w+}", "[^/]+", route)) for route in DOCUMENT["paths"] if "{" in route
}


def build_app(endpoints: Endpoints, origins: Sequence[str] = (), visitors: Visitors | None = None) -> ASGIApp:
    """The application of one gateway; pages of other `origins` may use it. `visitors` None: no host is
    refused, since no browser reaches a Unix socket."""
    to_prometheus(())  # imports prometheus_client now, before the first request
    routes = [
        *(route for part in _PARTS for route in part.routes(endpoints)),
        Route("/v1/chat/completions", partial(endpoints.generate, chat=True), methods=["POST"]),
        Route("/v1/completions", partial(endpoints.generate, chat=False), methods=["POST"]),
        Route("/v1/embeddings", partial(endpoints.generate, chat=False, api=EMBEDDINGS), methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{model:path}", endpoints.model, methods=["GET"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.healthy, methods=["GET"]),
        Route("/ready", endpoints.ready, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/version", endpoints.version, methods=["GET"]),
        Route("/openapi.json", endpoints.openapi, methods=["GET"]),
    ]
    handlers = {HeadraceError: _refused, HTTPException: _no_route, Exception: _failed}
    cors = Middleware(
        CORSMiddleware,
        origins,
        ["*"],
        ["*"],
        expose_headers=[exchanges.ID_HEADER, exchanges.IGNORED_HEADER, "Retry-After", "Location"],
    )
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[cors] if origins else [])  # type: ignore[arg-type]  # its handlers are typed for Exception alone
    return ExchangeMiddleware(app, endpoints, visitors)


@dataclass(slots=True)
class Endpoints:
    """The endpoints, and the state that outlives a request."""

    connections: native_call.TenantConnections
    keys: Keys
    health: native_call.Health
    fleet: native_call.Fleet
    timeout_s: float
    ping_s: float = 10.0
    model_of: Callable[[str, str, str], str] = lambda name, tenant, request: name  # the model of an alias
    component: str = "gateway"  # name in spans
    tracer: Tracer | None = None
    access_log: exchanges.AccessLog | None = None
    counters: exchanges.ExchangeCounters = field(default_factory=exchanges.ExchangeCounters)
    clock: Clock = field(default_factory=SystemClock)
    observers: list[Any] = field(default_factory=list)  # of parts: `begin` and `end` of each exchange

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return answer(await native_call.served_models(await self.client_of(request)))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        return answer(
            await native_call.served_model(await self.client_of(request), request.path_params["model"])
        )

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the native answer in vLLM's shape."""
        found = await self.tokenized(request)
        return answer({"model": found["model"], "count": found["count"], "tokens": found["tokens"]})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the native answer in vLLM's shape."""
        fields, client = await self.read_request(request)
        found = await self._request_native(
            client, subjects.detokenize(client.tenant, fields["model"]), fields
        )
        return answer({"model": found["model"], "prompt": found["text"]})

    # ---- this gateway ---------------------------------------------------------------------------

    async def healthy(self, _: Request) -> Response:
        """`GET /health`."""
        return _state(self.health.why)

    async def ready(self, _: Request) -> Response:
        """`GET /ready`."""
        return _state(self.health.unready)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        self.keys.only_operator(exchanges.credential(request))
        readings = await self.fleet.metrics()
        page = await asyncio.to_thread(to_prometheus, readings)  # some 10 ms: streams go on
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        return answer({"version": VERSION})

    async def openapi(self, _: Request) -> Response:
        """`GET /openapi.json`."""
        return answer(DOCUMENT)

    # ---- what the endpoints of every API are made of ----------------------------------------------

    async def generate(self, request: Request, *, chat: bool | None = None, api: Api = OPENAI) -> Response:
        """Answer a request. `chat` None: it is a chat if the API translates the request to one, with
        `messages`."""
        fields, client = await self.asked(request, api)
        call = self.call_of(request, fields, api, chat=chat)
        return await self.answered(request, client, call, api)

    async def asked(self, request: Request, api: Api, prefix: str = "") -> tuple[Body, Client]:
        """The fields of a request for an answer, and the client of its tenant. `prefix`: of the id that the
        gateway draws, which then has the time in it. Raises NotAuthorized, Overloaded, BadRequest."""
        exchange = exchange_of(request)
        exchange.error_body = api.error
        self.enter(request)
        fields, client = await self.read_request(request, api)
        if self.access_log is not None and self.access_log.prompts:
            exchange.body = {name: value for name, value in fields.items() if name != "keep"}
        if prefix:
            exchange.request_id = timed_id(prefix, self.clock.wall_us() // 1_000_000)
        return fields, client

    def call_of(self, request: Request, fields: Body, api: Api, *, chat: bool | None = None) -> Call:
        """The native requests of a request. `chat`: see `generate`. Raises BadRequest."""
        exchange, chat = exchange_of(request), "messages" in fields if chat is None else chat
        call = api.to_call(fields, chat=chat, request_id=exchange.request_id)
        exchange.stream = call.stream
        if exchanges.given_id(call.request_id):  # else the tokenizer refuses it, and no header could hold it
            exchange.request_id = call.request_id
        exchange.requested_us = self.clock.wall_us()
        return call

    def native(self, request: Request, client: Client, call: Call) -> tuple[native_call.NativeCall, Call]:
        """What sends a call to the models, and the call. A keeper resolves the alias of a durable request by
        itself: sent again, it is then the same request."""
        exchange = exchange_of(request)
        call = call.of_model(self.model_of(call.model, client.tenant, call.request_id))
        exchange.model = call.model
        return native_call.NativeCall(client, self.timeout_s, exchange.trace, self.ping_s / 2), call

    async def answered(self, request: Request, client: Client, call: Call, api: Api) -> Response:
        """The answer of the models to a call."""
        native, call = self.native(request, client, call)
        echoed = await self.echoed(call, client) if call.echo else ()
        if call.stream:
            return self.stream(request, native.frames(call), api.chunks(call, echoed))
        return answer(api.answer(call, await self.natives(request, native, call), echoed))

    def stream(self, request: Request, frames: AsyncGenerator[Body], chunks: Chunks) -> EventStream:
        """The frames of a native stream as chunks of an API."""
        return EventStream(frames, chunks, exchange_of(request), self.counters, self.clock, self.ping_s)

    async def natives(self, request: Request, native: native_call.NativeCall, call: Call) -> list[Body]:
        """The native answers to a call. Raises Cancelled if the client goes away."""
        exchange = exchange_of(request)
        natives = await native_call.unless_gone(request.receive, native.responses(call))
        exchange.answered_us = self.clock.wall_us()
        exchange.usages += [each["usage"] for each in natives]
        return natives

    def enter(self, request: Request) -> None:
        """Count a request for an answer. Raises NotAuthorized, and Overloaded for one over the share of its
        tenant."""
        self._admit(request)
        exchange, counters = exchange_of(request), self.counters
        counters.enter(exchange)
        own = counters.open[exchange.tenant]
        if own > 1 and is_over_share(own, counters.active, MAX_ACTIVE, len(counters.open)):
            full = (
                f"{counters.active} requests are open at this gateway, {own} of them yours: try again later"
            )
            raise Overloaded(full, retry_after_ms=RETRY_AFTER_MS)

    def _admit(self, request: Request) -> str:
        """Find the tenant of the request's key. Raises NotAuthorized."""
        tenant = exchange_of(request).tenant = self.keys.tenant_of(exchanges.credential(request))
        return tenant

    async def client_of(self, request: Request) -> Client:
        """The native client of the request's tenant. Raises NotAuthorized, Unavailable."""
        return await self.connections.of(self._admit(request))

    async def read_request(self, request: Request, api: Api = OPENAI) -> tuple[dict[str, Any], Client]:
        """The fields of a request, with its model, and the client of its tenant. Raises BadRequest."""
        client = await self.client_of(request)
        most = client.bus.max_payload - native_call.HEADROOM_BYTES
        given = native_call.fields_of(await native_call.read_body(request, most))
        fields = api.read(given)
        exchange_of(request).ignored = api.ignored(given)
        served = [] if fields.get("model") else await native_call.roots_of(client)
        model = exchange_of(request).model = native_call.model_of(fields, served)
        return {**fields, "model": model}, client

    async def tokenized(self, request: Request, api: Api = OPENAI) -> dict[str, Any]:
        """The native answer with the token ids of a prompt."""
        exchange_of(request).error_body = api.error
        fields, client = await self.read_request(request, api)
        return await self._request_native(client, subjects.tokenize(client.tenant, fields["model"]), fields)

    async def _request_native(self, client: Client, subject: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A request to the tokenizers or detokenizers of a model. Raises UnknownModel if it is not served."""
        try:
            return await client.request(subject, fields)
        except NoResponders:
            served = [entry["id"] for entry in (await native_call.served_models(client))["data"]]
            if fields["model"] not in served:
                raise native_call.unknown_model(fields["model"], served) from None
            raise

    async def echoed(self, call: Call, client: Client) -> tuple[str, ...]:
        """The texts of the prompts; token ids are detokenized."""

        async def text(body: Mapping[str, Any]) -> str:
            if isinstance(body["prompt"], str):
                return body["prompt"]
            subject = subjects.detokenize(client.tenant, call.model)
            return str((await client.request(subject, {"tokens": body["prompt"]}))["text"])

        return tuple(await asyncio.gather(*map(text, call.bodies)))


def _state(why: str) -> Response:
    if why:
        return answer({"status": "unavailable", "reason": why}, 503, {"Retry-After": "1"})
    return answer({"status": "ok"})


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
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    if path in DOCUMENT["paths"]:
        return path
    return next((route for route in _WITH_ID if _WITH_ID[route].fullmatch(path)), OTHER)


def read_keys(text: str) -> dict[str, str]:
    """Tenants by the hash of their keys. Raises ValueError with the line number."""
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) != 2 or len(fields[0]) > MAX_NAME_CHARS:
            raise ValueError(f"line {number}: `tenant key` is expected")
        tenant, key = fields
        name = key.removeprefix(HASHED) if key.startswith(HASHED) else _hash(key)
        if not _HEX.fullmatch(name):
            raise ValueError(f"line {number}: {HASHED} and 64 hex digits are expected")
        if tenants.setdefault(name, tenant) != tenant:
            raise ValueError(f"line {number}: this key is another tenant's, too")
    return tenants


class Keys:
    """The API keys: a file of lines `tenant key`, read again when it changes. With an empty path all requests
    are allowed, as the default tenant.

        acme   hr-3f9c…                    the key that a client sends as `Authorization: Bearer hr-3f9c…`
        acme   sha256:9b74c9897bac…        or its SHA-256 in hex, so that the file holds no secret
        headrace-operator   hr-77aa…       may read /metrics; its other requests are the default tenant's
        # a comment

    Keys are looked up by their hash, so that the time of a lookup reveals nothing about them.
    """

    def __init__(self, path: str) -> None:
        """Raises SetupError if the file is invalid."""
        self.demanded = bool(path)
        self._file = WatchedFile("http_keys", path, read_keys, log) if path else None

    def tenant_of(self, authorization: str) -> str:
        """The tenant of the key in an `Authorization` header. Raises NotAuthorized."""
        if self._file is None:
            return DEFAULT_TENANT
        name = self._name_of(authorization)
        return DEFAULT_TENANT if name == OPERATOR else name

    def viewer_of(self, authorization: str) -> str | None:
        """The tenant whose requests a key may see; None: those of all. Raises NotAuthorized."""
        name = OPERATOR if self._file is None else self._name_of(authorization)
        return None if name == OPERATOR else name

    def only_operator(self, authorization: str) -> None:
        """Raises NotAuthorized, and Forbidden for a tenant's key."""
        if self._file is not None and self._name_of(authorization) != OPERATOR:
            raise Forbidden(
                f"this page counts all tenants' requests: send the key of {OPERATOR} in http_keys"
            )

    def _name_of(self, authorization: str) -> str:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise NotAuthorized("no API key: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`")
        name = self._file.value.get(_hash(key.strip())) if self._file is not None else None
        if name is None:
            raise NotAuthorized("unknown API key")
        return name

    def refresh(self) -> None:
        """Read the file again if it has changed; an invalid file is logged and ignored."""
        if self._file is not None:
            self._file.refresh()


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()
