"""`NativeCall` makes the native requests of one HTTP request: all answers, or frames as they arrive.

`TenantConnections` holds a connection to the nats-server for each tenant. `Health` decides whether a native
request would succeed now. `read_body` reads an HTTP body within limits of size and time, `fields_of` its
fields, `model_of` the model, which may be left out if only one is served. `unless_gone` cancels the native
requests of a client that disconnects.

`Fleet` collects facts of the fleet over NATS: the metrics of all services, their states, the trace of a
request.

    Prometheus ──GET /metrics──▶ gateway ──hr.<fleet>.metrics──▶ every service
                                         ◀──── its metrics ─────

The gateway answers its own request for metrics, so all gateways on one port give the same page. Invariant: a
service that does not answer delays a page by at most SERVICES_S, and has `headrace_up` 0 on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar
from zlib import crc32

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from services.gateway.exchange import SlowRequest, Unprocessable, WrongMediaType
from services.gateway.visitors import is_from_browser
from shared import bodies
from shared.actor.mailbox import Mailbox
from shared.actor.membership import Peers, can_start_cold, missing
from shared.api import read_json
from shared.client.client import Client, gather, probe
from shared.errors import (
    BadRequest,
    Cancelled,
    HeadraceError,
    PayloadTooLarge,
    Unavailable,
    UnknownModel,
    WireError,
)
from shared.nats import access, subjects
from shared.nats.interface import Bus, BusFault, Delivery, NoResponders
from shared.openai.call import Body, Call
from shared.telemetry.counters import Metrics, ProcessCounter, cells, unpack

log = logging.getLogger("headrace.gateway")

MOST_AT_ONCE = 256  # native requests of one HTTP request: the others wait here, and not in a scheduler
GRACE_S = 5.0  # after a request's own time limit, for the error of the services to arrive

BODY_TIMEOUT_S = 30.0
HEADROOM_BYTES = 4_096  # of the server's limit, for the headers of a native request

MAX_CONNECTIONS = 64
CONNECTION_OPEN_S = 10.0
CONNECTION_IDLE_S = 300.0  # far longer than from a request's key to its first native message
CONNECTION_CLOSE_S = 2.0  # for all connections at a stop

PROMPT = "prompt_index"  # in a frame of one of several prompts

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class TenantConnection:
    """A connection to the nats-server, and the client on it."""

    opening: asyncio.Task[Client]
    used_s: float = 0.0  # last use by a request
    client: Client | None = None  # None until it is open


@dataclass(slots=True)
class TenantConnections:
    """The connections of one gateway. Each tenant gets its own at its first request, so that its backlog
    delays no other tenant. Above MAX_CONNECTIONS tenants share connections. A gateway without keys has one
    tenant, on `main`."""

    main: Client  # for heartbeats and health; used by a tenant only if there are no keys
    apart: bool  # there are keys
    _connections: dict[str, TenantConnection] = field(default_factory=dict)  # by the first tenant of each
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._connections)

    async def client_of(self, tenant: str) -> Client:
        """The native client of a tenant. Raises Unavailable."""
        if not self.apart:
            return self.main.as_tenant(tenant)
        connection = self._connections.get(tenant)
        if connection is None and len(self._connections) < MAX_CONNECTIONS:
            connection = self._connections[tenant] = TenantConnection(asyncio.create_task(self._open(tenant)))
        elif connection is None:
            connection = [*self._connections.values()][crc32(tenant.encode()) % len(self._connections)]
        connection.used_s = asyncio.get_running_loop().time()
        return (await asyncio.shield(connection.opening)).as_tenant(tenant)

    def sweep(self) -> None:
        """Close the connections without a request for CONNECTION_IDLE_S."""
        now_s = asyncio.get_running_loop().time()
        for tenant, connection in [*self._connections.items()]:
            if connection.client is None or connection.client.waiting:
                connection.used_s = now_s
            elif now_s - connection.used_s > CONNECTION_IDLE_S:
                self._close(tenant, connection)

    def resend_unanswered(self, model: str) -> None:
        """Send all requests for `model` without a reply again."""
        for client in self._clients():
            client.resend_unanswered(model)

    def fail(self, error: HeadraceError) -> None:
        """End all waiting requests with `error`."""
        for client in self._clients():
            client.fail(error)

    def _clients(self) -> list[Client]:
        others = [connection.client for connection in self._connections.values()]
        return [self.main, *(client for client in others if client is not None)]

    async def close(self) -> None:
        """Close all connections but `main`, which the runtime owns."""
        for tenant, connection in [*self._connections.items()]:
            self._close(tenant, connection)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=CONNECTION_CLOSE_S)

    async def _open(self, tenant: str) -> Client:
        connection, bus = self._connections[tenant], None
        try:
            bus = await self.main.bus.another(tenant, CONNECTION_OPEN_S)
            bus.on_fault(partial(self._on_fault, tenant, connection))
            connection.client = await Client.open(bus)
            connection.client.awaited = self.main.awaited
        except Exception as error:  # noqa: BLE001 - any error is a 503 for the tenant, which may try again
            log.error("no connection to the nats-server for tenant %s: %s", tenant, error)
            self._connections.pop(tenant, None)
            if bus is not None:
                self._leave(bus)
            raise Unavailable("the gateway has no connection to its nats-server: try again") from None
        return connection.client

    def _on_fault(self, tenant: str, connection: TenantConnection, fault: BusFault) -> None:
        log.warning("the connection of tenant %s: %s: %s", tenant, fault.kind, fault.detail)
        if fault.kind in ("refused", "closed") and connection.client is not None:
            connection.client.fail(
                Unavailable("the gateway's connection to its nats-server ended: try again")
            )
            self._close(tenant, connection)

    def _close(self, tenant: str, connection: TenantConnection) -> None:
        if self._connections.get(tenant) is connection:
            del self._connections[tenant]
            connection.opening.cancel()
            if connection.client is not None:
                self._leave(connection.client.bus)

    def _leave(self, bus: Bus) -> None:
        leaving = asyncio.create_task(bus.drain())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)


@dataclass(frozen=True, slots=True)
class NativeCall:
    """The tenant's client, the time limit and the trace of the native requests."""

    client: Client
    timeout_s: float  # of a request without `timeout_s`
    trace: str = ""
    quiet_s: float = math.inf  # of a stream, between two frames QUIET

    async def responses(self, call: Call) -> list[Body]:
        """The native answer to each prompt. Raises the first error, and cancels the other requests."""
        ask = self._count if call.is_prompt_only else self._complete
        if len(call.bodies) == 1:
            return [await ask(call.bodies[0])]
        try:
            free = asyncio.Semaphore(MOST_AT_ONCE)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_within(free, ask(body))) for body in call.bodies]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    def frames(self, call: Call) -> AsyncGenerator[Body]:
        """The frames of all prompts in the order of their arrival, with PROMPT if there are several prompts.
        Raises like `responses`. Closing the generator cancels the running requests."""
        streams = [
            self.client.stream(body, timeout_s=self._timeout_s(body), trace=self.trace, quiet_s=self.quiet_s)
            for body in call.bodies
        ]
        return _merged(streams) if len(streams) > 1 else streams[0]

    async def _complete(self, body: Body) -> Body:
        return await self.client.complete(body, timeout_s=self._timeout_s(body), trace=self.trace)

    async def _count(self, body: Body) -> Body:
        """The answer without a token: a tokenizer validates the request and counts its prompt."""
        asked = {name: value for name, value in body.items() if name != "max_tokens"}
        try:
            found = await self.client.request(subjects.tokenize(self.client.tenant, body["model"]), asked)
        except NoResponders:
            raise UnknownModel(f"no service serves model {body['model']!r:.80}", param="model") from None
        ended = {"text": "", "logprobs": None, "finish_reason": "length"}
        prompt = found["count"]
        return {
            "created": int(time.time()),
            "model": found["model"],
            "choices": [{"index": index, **ended} for index in range(body.get("n", 1))],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 0,
                "total_tokens": prompt,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }

    def _timeout_s(self, body: Body) -> float:
        asked: Any = body.get("timeout_s")
        limited = type(asked) in (int, float) and asked > 0
        return (float(asked) if limited else self.timeout_s) + GRACE_S


async def _within(free: asyncio.Semaphore, work: Coroutine[Any, Any, Body]) -> Body:
    try:
        async with free:
            return await work
    finally:
        work.close()  # if it was cancelled before it began


async def _merged(streams: Sequence[AsyncGenerator[Body]]) -> AsyncGenerator[Body]:
    """The frames of several streams; an error of one ends all."""
    came: asyncio.Queue[Body | Exception | None] = asyncio.Queue(1)

    async def feed(number: int, stream: AsyncGenerator[Body]) -> None:
        try:
            async with aclosing(stream) as frames:
                async for frame in frames:
                    await came.put({**frame, PROMPT: number})
        except Exception as error:  # noqa: BLE001 - raised where the frames are read
            await came.put(error)
        else:
            await came.put(None)

    tasks = [asyncio.create_task(feed(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await came.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Health:
    """The state of `/health` and `/ready`: would a request succeed now?

        a kind is missing ──▶ all are ready ──probe──▶ proven ──a kind goes, or a request gets 503──▶ …

    Each model has its own state; one proven model makes the gateway healthy. A probe requests the start of an
    answer; it is repeated with the heartbeats until it succeeds. A model whose scheduler keeps requests until
    an executor joins is healthy without one, and is not probed: a probe would count as a waiting request.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._why = "starting"
        self._proven: set[str] = set()  # models
        self._cold: set[str] = set()  # models that wait for their first executor
        self._last = ""  # model that was probed
        self._aliases: dict[str, str] = {}  # models by their further names
        self._probing: asyncio.Task[None] | None = None
        self.draining = False
        self.online = True

    @property
    def unready(self) -> str:
        """Why this gateway should get no requests, apart from the services; empty: it is ready."""
        if self.draining:
            return "draining"
        return "" if self.online else "no connection to the nats-server"

    @property
    def why(self) -> str:
        """Why a request would fail; empty: it would succeed."""
        return self.unready or self._why

    def check(self, peers: Peers) -> None:
        """Update the state. Call when the living services change, and at each heartbeat."""
        if self.draining:
            return
        if self._probing is not None and self._probing.done():
            self._probing.result()  # raises an unexpected error
        models, self._aliases = peers.models("tokenizer"), peers.aliases()
        lacking = {model: missing(peers, model) for model in models}
        whole = [model for model in models if not lacking[model]]
        self._proven &= set(whole)
        self._cold = {model for model in models if can_start_cold(peers, model)}
        if not whole and not self._cold:
            gone = min(lacking.values(), key=len, default=missing(peers))
            self._why = f"waiting for: {', '.join(gone)}"
            return
        if self._proven or self._cold:
            self._why = ""
        unproven = [model for model in whole if model not in self._proven]
        if unproven and self._probing is None:  # probe the models in turn
            self._last = min(unproven, key=lambda model: (model <= self._last, model))
            self._probing = asyncio.get_running_loop().create_task(self._probe(self._last, peers))

    def doubt(self, why: str, model: str = "") -> None:
        """A request (to a model) failed: the model, or all, must be proven again."""
        self._proven -= {self._aliases.get(model, model)} if model else set(self._proven)
        self._cold = self._cold if model else set()
        if not (self._proven or self._cold):
            self._why = why

    def stop(self) -> None:
        """Send no more probes."""
        self.draining = True
        if self._probing is not None:
            self._probing.cancel()

    async def _probe(self, model: str, peers: Peers) -> None:
        try:
            await probe(self._client, model)
        except HeadraceError as error:
            self._probing = None
            self.doubt(f"a request to {model} failed: {error.message}", model)
        else:
            self._proven.add(model)
            self._probing = None
            self.check(peers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. The body of the request must have been read. Raises Cancelled if the client
    disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client went away")
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def read_body(request: Request, most: int, untyped: str = "") -> bytes:
    """A JSON body of at most `most` bytes. `untyped`: the content type of clients that set none; the form of
    a page in a browser may have the same one. Raises WrongMediaType, PayloadTooLarge, SlowRequest, and
    Cancelled if the client disconnects."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_page = is_from_browser(request.headers)
    is_json = media == "application/json" or media.endswith("+json")
    if not is_json and (is_page or media not in ("", untyped)):
        raise WrongMediaType(
            f"the content type is {media or 'missing':.80}: send JSON with `Content-Type: application/json`"
        )
    check_coding(request)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(int(length), most)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, most)
    except TimeoutError:
        raise SlowRequest(f"the body did not come within {BODY_TIMEOUT_S:g} s: send it again") from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None


def check_coding(request: Request) -> None:
    """Raise WrongMediaType for a body with a content encoding."""
    if (coding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
        raise WrongMediaType(f"the body's content encoding is {coding:.80}: send it without one")


def fields_of(data: bytes) -> Body:
    """The fields of a JSON body, without null fields. Raises BadRequest, Unprocessable."""
    try:
        fields = read_json(data)
    except RecursionError:
        raise BadRequest("the body is nested too deeply: send flat values") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(fields, dict):
        raise Unprocessable("the body is JSON but no object: an object with fields is expected")
    return {name: value for name, value in fields.items() if value is not None}


async def served_models(client: Client) -> Body:
    """OpenAI's list of models."""
    return await client.request(subjects.models(client.tenant))


async def served_model(client: Client, name: str) -> Body:
    """A model in OpenAI's form. Raises UnknownModel."""
    served = {entry["id"]: entry for entry in (await served_models(client))["data"]}
    if name not in served:
        raise unknown_model(name, [*served])
    return dict(served[name])


async def roots_of(client: Client) -> list[str]:
    """The served models, each under its own name; a tokenizer of an older version sends no `root`."""
    entries = (await served_models(client))["data"]
    return sorted({entry.get("root", entry["id"]) for entry in entries})


def unknown_model(model: str, served: list[str]) -> UnknownModel:
    """The error for a model that is not served."""
    there = ", ".join(served)
    return UnknownModel(f"no service serves model {model!r:.80}; there is {there:.200}", param="model")


def model_of(fields: Body, served: list[str]) -> str:
    """The model of a request; without one, the only model of `served`. Raises BadRequest."""
    model = fields.get("model")
    if model is None and len(served) == 1:
        return served[0]
    if not isinstance(model, str) or not model:
        there = f"; there is {', '.join(served):.200}" if served else ""  # not looked up beside a name
        raise BadRequest(f"`model`: the name of a model is expected{there}", param="model")
    return model


async def _read(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(size, most)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"a body of {size} bytes is over the limit of {most}: send less, or raise the server's max_payload"
    )


SERVICES_S = 2.0  # a busy service answers within a step; Prometheus gives up after 10 s
KEPT_US = 900_000  # answers are collected at most once in this time: every client may request them


class Collector(Generic[T]):
    """Asks all services on one subject. Requests within KEPT_US share one collection."""

    def __init__(self, mailbox: Mailbox, subject: str, read: Callable[[bytes], tuple[str, T]]) -> None:
        """`read` gives the actor `kind.id` and its answer; it raises WireError."""
        self._mailbox, self._subject, self._read = mailbox, subject, read
        self._collecting: asyncio.Task[dict[str, T | None]] | None = None
        self._since_us = 0

    async def collect(self) -> dict[str, T | None]:
        """The answers by actor, sorted; None of a living actor that did not answer within SERVICES_S."""
        now_us = self._mailbox.clock.now_us()
        if self._collecting is None or (self._collecting.done() and now_us - self._since_us > KEPT_US):
            self._since_us = now_us
            self._collecting = asyncio.create_task(self._collect())
        return await asyncio.shield(self._collecting)  # the task goes on when its first client leaves

    async def _collect(self) -> dict[str, T | None]:
        found: dict[str, T] = {}
        living = {*self._mailbox.peers.sources(), self._mailbox.source}

        def on_answer(delivery: Delivery) -> bool:
            try:
                source, answer = self._read(delivery.data)
            except WireError as error:
                log.warning("dropped an answer on %s: %s", self._subject, error)
            else:
                found[source] = answer
            return living <= found.keys()

        await gather(self._mailbox.bus, self._subject, SERVICES_S, on_answer)
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
        """The status of every living service of this fleet, as `headrace status --json` has it, with the
        `cells` of its line."""
        found = await self._states.collect()
        silent = {source: source.partition(".") for source, state in found.items() if state is None}
        states = [{"kind": kind, "id": actor, "state": "silent"} for kind, _, actor in silent.values()]
        own = (s for s in found.values() if s and s.get("fleet") == self._mailbox.fleet)
        return [*states, *({**state, "cells": cells(state)} for state in own)]

    async def ask_schedulers(
        self,
        subject: str,
        tenant: str,
        kind: type[Any],
        asked: Body | None = None,
        *,
        enough: Callable[[Body], object] = lambda body: False,
    ) -> list[Body]:
        """What the living schedulers answer to a request of a tenant: bodies of a `kind`, and errors. The
        last one is the first that is `enough`. Raises Unavailable if none is and one does not answer."""
        bus, found, ended = self._mailbox.bus, list[Body](), False
        silent = {name for name in self._mailbox.peers.sources() if name.startswith("scheduler.")}

        def on_answer(delivery: Delivery) -> bool:
            nonlocal ended
            for each in (kind, bodies.Refused):
                with contextlib.suppress(WireError):
                    body: Body = {**bodies.decode(each, delivery.data)}
                    if not ended:  # several may come at once
                        found.append(body)
                        silent.discard(f"scheduler.{body.get('scheduler') or body.get('id')}")
                        ended = "error" in body or bool(enough(body))
                    break
            return ended or (bool(found) and not silent)

        inbox = access.reply_inbox(bus.user, subjects.token(tenant), bus.new_inbox())
        data = b"" if asked is None else bodies.encode(asked)
        await gather(bus, subject, SERVICES_S, on_answer, body=data, inbox=inbox)
        if not found or (silent and not ended):
            why = f"{min(silent)} does not answer" if silent else "no scheduler runs"
            raise Unavailable(f"{why}: see `headrace status`", retry_after_ms=1_000)
        return found

    async def trace(self, tenant: str, request_id: str) -> Body | None:
        """The trace of a request of a tenant, as `headrace trace --json` has it; None if no scheduler knows
        it."""
        known: list[Body] = []

        def on_answer(delivery: Delivery) -> bool:
            with contextlib.suppress(WireError):
                body = {**bodies.decode(bodies.Trace, delivery.data)}
                # a scheduler of an older version answers for any tenant
                known.extend([body] if body.get("tenant") == tenant else [])
            return bool(known)

        asked = subjects.trace_body(tenant)
        await gather(self._mailbox.bus, subjects.trace(request_id), SERVICES_S, on_answer, body=asked)
        return known[0] if known else None


def _state(data: bytes) -> tuple[str, Body]:
    state = bodies.decode(bodies.ServiceStatus, data)
    return f"{state['kind']}.{state['id']}", {**state}


def _labelled(source: str, metrics: Metrics | None) -> Metrics:
    service, _, instance = source.partition(".")
    labels = (("service", service), ("instance", instance))
    up = ProcessCounter.UP.point(int(metrics is not None))
    return [replace(each, attributes=(*labels, *each.attributes)) for each in (up, *(metrics or ()))]
