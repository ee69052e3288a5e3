"""Collects facts of the fleet over NATS: the metrics of all services, their states, the trace of a request.

    Prometheus ──GET /metrics──▶ gateway ──hr.<fleet>.metrics──▶ every service
                                         ◀──── its metrics ─────

The gateway answers its own request for metrics, so all gateways on one port give the same page. Invariant: a
service that does not answer delays a page by at most ANSWER_S, and has `headrace_up` 0 on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, TypeVar

from pydantic_core import from_json

from shared.actor.mailbox import Mailbox
from shared.client import gather
from shared.errors import WireError
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.telemetry.readings import MetricPoint, Metrics, unpack

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
