"""`Endpoints`: what the endpoints of every API are made of, and the state of a gateway.

An endpoint of models finds the tenant of the request's key, then uses that tenant's connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from importlib import metadata

from starlette.requests import Request
from starlette.responses import Response

from services.gateway import exchange as exchanges
from services.gateway import native_call
from services.gateway.exchange import answer, exchange_of
from services.gateway.openai_response import OPENAI, Api, Body, Chunks, EventStream
from services.gateway.visitors import Keys
from shared import session_hints
from shared.client.client import Client
from shared.clock import Clock, SystemClock
from shared.errors import Overloaded
from shared.fair_share import is_over_share
from shared.nats import subjects
from shared.nats.interface import NoResponders
from shared.openai.call import Call, timed_id
from shared.telemetry.export import Tracer

MAX_ACTIVE = 8_192  # requests of one gateway
RETRY_AFTER_MS = 1_000


def _version() -> str:
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0"


VERSION = _version()


@dataclass(slots=True)
class Endpoints:
    """The state of one gateway."""

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
    observers: list[exchanges.Observer] = field(default_factory=list)  # of parts

    async def generate(self, request: Request, *, chat: bool | None = None, api: Api = OPENAI) -> Response:
        """Answer a request. `chat` None: it is a chat if the API translates the request to one, with
        `messages`."""
        fields, client = await self.asked(request, api)
        return await self.answered(request, client, self.call_of(request, fields, api, chat=chat), api)

    async def asked(self, request: Request, api: Api, prefix: str = "") -> tuple[Body, Client]:
        """The fields of a request for an answer, and the client of its tenant. `prefix`: of the id that the
        gateway draws, which then has the time in it. Raises NotAuthorized, Overloaded, BadRequest."""
        exchange = exchange_of(request)
        self.enter(request)
        fields, client = await self.read_request(request, api)
        if "input" not in fields:  # a vector has no session
            hints, fates = session_hints.with_headers(fields, request.headers.getlist)
            fields |= hints
            self.counters.note_hints(fates)
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
        self.tenant_of(request)
        exchange, counters = exchange_of(request), self.counters
        counters.enter(exchange)
        own = counters.open[exchange.tenant]
        if own > 1 and is_over_share(own, counters.active, MAX_ACTIVE, len(counters.open)):
            full = (
                f"{counters.active} requests are open at this gateway, {own} of them yours: try again later"
            )
            raise Overloaded(full, retry_after_ms=RETRY_AFTER_MS)

    def tenant_of(self, request: Request) -> str:
        """The tenant of the request's key. Raises NotAuthorized."""
        exchange = exchange_of(request)
        exchange.tenant = exchange.tenant or self.keys.tenant_of(exchanges.credential(request))
        return exchange.tenant

    async def client_of(self, request: Request) -> Client:
        """The native client of the request's tenant. Raises NotAuthorized, Unavailable."""
        return await self.connections.client_of(self.tenant_of(request))

    async def read_request(self, request: Request, api: Api = OPENAI) -> tuple[Body, Client]:
        """The fields of a request, with its model, and the client of its tenant. Raises BadRequest."""
        client = await self.client_of(request)
        most = client.bus.max_payload - native_call.HEADROOM_BYTES
        given = native_call.fields_of(await native_call.read_body(request, most, api.untyped))
        fields = api.read(given)
        exchange_of(request).ignored = api.ignored(given)
        served = [] if fields.get("model") else await native_call.roots_of(client)
        model = exchange_of(request).model = native_call.model_of(fields, served)
        return {**fields, "model": model}, client

    async def tokenized(self, request: Request, api: Api = OPENAI) -> Body:
        """The native answer with the token ids of a prompt."""
        fields, client = await self.read_request(request, api)
        return await self.request_native(client, subjects.tokenize(client.tenant, fields["model"]), fields)

    async def request_native(self, client: Client, subject: str, fields: Body) -> Body:
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

        async def text(body: Body) -> str:
            if isinstance(body["prompt"], str):
                return body["prompt"]
            subject = subjects.detokenize(client.tenant, call.model)
            return str((await client.request(subject, {"tokens": body["prompt"]}))["text"])

        return tuple(await asyncio.gather(*map(text, call.bodies)))
