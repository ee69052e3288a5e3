"""`FleetMetrics` collects the metrics of all services of the fleet over NATS, for one page.

    Prometheus ──GET /metrics──▶ gateway ──hr.<fleet>.metrics──▶ every service
                                         ◀──── its metrics ─────

The gateway answers its own request, too, so all gateways on one port give the same page. Invariant: a service
that does not answer delays the page by at most ANSWER_S, and has `headrace_up` 0 on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from shared.actor.mailbox import Mailbox
from shared.errors import WireError
from shared.nats import subjects
from shared.nats.interface import Delivery
from shared.telemetry.readings import MetricPoint, Metrics, unpack

log = logging.getLogger("headrace.gateway")

ANSWER_S = 2.0  # a busy service answers within a step; Prometheus gives up after 10 s
KEPT_US = 900_000  # a page is collected at most once in this time: without keys every client may request it


class FleetMetrics:
    """The metrics of the fleet of one gateway."""

    def __init__(self, mailbox: Mailbox, own: Callable[[], Metrics]) -> None:
        """`own` are the metrics of this gateway, for the time without a nats-server."""
        self._mailbox = mailbox
        self._own = own
        self._collecting: asyncio.Task[Metrics] | None = None
        self._since_us = 0

    async def collect(self) -> Metrics:
        """The metrics of every living service, with the attributes `service` and `instance`. Requests within
        KEPT_US share one collection."""
        now_us = self._mailbox.clock.now_us()
        if self._collecting is None or (self._collecting.done() and now_us - self._since_us > KEPT_US):
            self._since_us = now_us
            self._collecting = asyncio.create_task(self._collect())
        return await asyncio.shield(self._collecting)  # the task goes on when its first client leaves

    async def _collect(self) -> Metrics:
        bus, own = self._mailbox.bus, self._mailbox.source
        found: dict[str, Metrics] = {}
        missing = {*self._mailbox.peers.sources(), own}
        complete = asyncio.Event()

        def note(delivery: Delivery) -> None:
            if delivery.no_responders:
                complete.set()
                return
            try:
                source, found[source] = unpack(delivery.data)
            except WireError as error:
                log.warning("dropped an answer to a request for metrics: %s", error)
                return
            missing.discard(source)
            if not missing:
                complete.set()

        inbox = bus.new_inbox()
        subscription = await bus.subscribe(inbox, note)
        try:
            bus.publish(subjects.metrics(self._mailbox.fleet), b"", reply=inbox)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(complete.wait(), ANSWER_S)
        finally:
            await subscription.cancel()
        found.setdefault(own, self._own())
        sources = sorted({*found, *missing})
        return [*chain.from_iterable(_labelled(source, found.get(source)) for source in sources)]


def _labelled(source: str, metrics: Metrics | None) -> Metrics:
    service, _, instance = source.partition(".")
    labels = (("service", service), ("instance", instance))
    up = MetricPoint("headrace.up", int(metrics is not None), "1")
    return [replace(each, attributes=(*labels, *each.attributes)) for each in (up, *(metrics or ()))]
