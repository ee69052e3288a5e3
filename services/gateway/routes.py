"""`Endpoints` serves the endpoints of models and holds their shared state; `Keys` maps API keys to tenants.

app.py has the paths. Every endpoint first finds the tenant of the request's key, then uses that tenant's
connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway import openai_response
from services.gateway.errors import NotAuthorized
from services.gateway.exchange import Exchange, ExchangeCounters, answer, given_id
from services.gateway.health import Health
from services.gateway.native_call import HEADROOM_BYTES, NativeCall, TenantConnections, read_body, unless_gone
from services.gateway.openai_request import Call, fields_of, model_of, read_call
from services.gateway.openai_response import ChunkBuilder, EventStream
from shared.client import Client
from shared.clock import Clock, SystemClock
from shared.config import WatchedFile
from shared.errors import BadRequest, Forbidden, Overloaded, UnknownModel
from shared.fair_share import over_share
from shared.nats import access, subjects
from shared.nats.interface import NoResponders
from shared.nats.subjects import DEFAULT_TENANT, MAX_NAME_CHARS
from shared.telemetry.readings import Metrics
from shared.telemetry.tracer import Tracer

log = logging.getLogger("headrace.gateway")

MAX_ACTIVE = 8_192  # requests of one gateway
RETRY_AFTER_MS = 1_000
EXCHANGE = "headrace.exchange"  # where a request's Exchange is kept in its scope

OPERATOR = access.user_of(access.OPERATOR)
HASHED = "sha256:"
_HEX = re.compile(r"[0-9a-f]{64}")


def exchange_of(request: Request) -> Exchange:
    """The Exchange of a request, made by the edge."""
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


@dataclass(slots=True)
class Endpoints:
    """The endpoints of models, and the state that outlives a request."""

    connections: TenantConnections
    keys: Keys
    health: Health
    fleet_metrics: Callable[[], Awaitable[Metrics]]
    timeout_s: float
    component: str = "gateway"  # name in spans
    tracer: Tracer | None = None
    counters: ExchangeCounters = field(default_factory=ExchangeCounters)
    clock: Clock = field(default_factory=SystemClock)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, chat=True)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, chat=False)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return answer(await _models(await self._client(request)))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        name = request.path_params["model"]
        listed = await _models(await self._client(request))
        for entry in listed["data"]:
            if entry["id"] == name:
                return answer(entry)
        raise _unknown(name, [entry["id"] for entry in listed["data"]])

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the native answer in vLLM's shape."""
        fields, client = await self._asked(request)
        found = await self._request_native(client, subjects.tokenize(client.tenant, fields["model"]), fields)
        return answer({"model": found["model"], "count": found["count"], "tokens": found["tokens"]})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the native answer in vLLM's shape."""
        fields, client = await self._asked(request)
        found = await self._request_native(
            client, subjects.detokenize(client.tenant, fields["model"]), fields
        )
        return answer({"model": found["model"], "prompt": found["text"]})

    # ---- internals ------------------------------------------------------------------------------

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        exchange = exchange_of(request)
        self._admit(request)
        counters, tenant = self.counters, exchange.tenant
        counters.enter(exchange)
        own = counters.open[tenant]
        if own > 1 and over_share(own, counters.active, MAX_ACTIVE, len(counters.open)):
            full = (
                f"{counters.active} requests are open at this gateway, {own} of them yours: try again later"
            )
            raise Overloaded(full, retry_after_ms=RETRY_AFTER_MS)
        fields, client = await self._asked(request)
        call = read_call(fields, chat=chat, request_id=exchange.request_id)
        if given_id(call.request_id):  # else the tokenizer refuses it, and no header could hold it
            exchange.request_id = call.request_id
        native = NativeCall(client, self.timeout_s, exchange.trace)
        echoed = await self._echoed(call, client) if call.echo else ()
        exchange.requested_us = self.clock.wall_us()
        if call.stream:
            return EventStream(
                native.frames(call), ChunkBuilder(call, echoed), exchange, self.counters, self.clock
            )
        natives = await unless_gone(request.receive, native.responses(call))
        exchange.answered_us = self.clock.wall_us()
        return answer(openai_response.answer(call, natives, echoed))

    def _admit(self, request: Request) -> str:
        """Find the tenant of the request's key. Raises NotAuthorized."""
        tenant = exchange_of(request).tenant = self.keys.tenant_of(request.headers.get("authorization", ""))
        return tenant

    async def _client(self, request: Request) -> Client:
        """The native client of the request's tenant. Raises NotAuthorized, Unavailable."""
        return await self.connections.of(self._admit(request))

    async def _asked(self, request: Request) -> tuple[dict[str, Any], Client]:
        """The fields of a request, with its model, and the client of its tenant. Raises BadRequest."""
        client = await self._client(request)
        fields = fields_of(await read_body(request, client.bus.max_payload - HEADROOM_BYTES))
        served: list[str] = []
        if not fields.get("model"):
            served = await _served(client)
        model = model_of(fields, served)
        exchange_of(request).model = model
        try:
            subjects.token(model)
        except UnicodeEncodeError:
            raise BadRequest("`model` holds a lone surrogate: send whole characters", param="model") from None
        return {**fields, "model": model}, client

    async def _request_native(self, client: Client, subject: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A request to the tokenizers or detokenizers of a model. Raises UnknownModel if it is not served."""
        try:
            return await client.request(subject, fields)
        except NoResponders:
            served = await _served(client)
            if fields["model"] not in served:
                raise _unknown(fields["model"], served) from None
            raise

    async def _echoed(self, call: Call, client: Client) -> tuple[str, ...]:
        """The texts of the prompts; token ids are detokenized."""

        async def text(body: Mapping[str, Any]) -> str:
            if isinstance(body["prompt"], str):
                return body["prompt"]
            subject = subjects.detokenize(client.tenant, call.model)
            return str((await client.request(subject, {"tokens": body["prompt"]}))["text"])

        return tuple(await asyncio.gather(*map(text, call.bodies)))


async def _models(client: Client) -> dict[str, Any]:
    return await client.request(subjects.models(client.tenant))


async def _served(client: Client) -> list[str]:
    return [entry["id"] for entry in (await _models(client))["data"]]


def _unknown(model: str, served: list[str]) -> UnknownModel:
    there = ", ".join(served)
    return UnknownModel(f"no service serves model {model!r:.80}; there is {there:.200}", param="model")


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

    def only_operator(self, authorization: str) -> None:
        """Raises NotAuthorized, and Forbidden for a tenant's key."""
        if self._file is not None and self._name_of(authorization) != OPERATOR:
            raise Forbidden(
                f"this page counts all tenants' requests: send the key of {OPERATOR} in http_keys"
            )

    def _name_of(self, authorization: str) -> str:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise NotAuthorized("no API key: send `Authorization: Bearer KEY`")
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
