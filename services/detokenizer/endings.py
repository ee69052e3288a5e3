"""The moment after the last frame of a request: when it left, and what is told then.

The detokenizer has the last stamp of every request, so it tells the scheduler (in Ended) and, where the
request is traced, sends the request's spans.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from services.detokenizer.commands import Finished, Tell
from services.detokenizer.request import RequestText
from shared import telemetry
from shared.messages import Ended
from shared.port import Port
from shared.request_spans import Choice, Reply, RequestFacts, request_spans

TURNS = 2  # of the event loop: one for the writer of the bus, one for its flusher
SMALL_BYTES = 65_536  # leave in one write; there is always something under way on a busy bus
LOOK_AGAIN_S = 0.02
MAX_LOOKS = 100  # then the broker takes nothing, and others have noticed


class Endings:
    """Requests whose last frame is on its way out of this process."""

    def __init__(self, port: Port, on_empty: Callable[[], None]) -> None:
        self._port = port
        self._on_empty = on_empty
        self.waiting = 0

    def add(self, finished: Finished, tell: Tell | None) -> None:
        """A request has ended; `tell` is the Ended that completes it, None when nobody waits for one."""
        self.waiting += 1
        built_us = self._port.clock.wall_us()
        asyncio.get_running_loop().call_soon(self._look, finished.request, tell, built_us, 0)

    def _look(self, request: RequestText, tell: Tell | None, built_us: int, looks: int) -> None:
        loop = asyncio.get_running_loop()
        if looks < TURNS:
            loop.call_soon(self._look, request, tell, built_us, looks + 1)
            return
        if self._port.bus.backlog_bytes > SMALL_BYTES and looks < MAX_LOOKS:
            loop.call_later(LOOK_AGAIN_S, self._look, request, tell, built_us, looks + 1)
            return
        reply = Reply(
            opened_us=request.opened_us,
            first_us=request.first_us,
            built_us=built_us,
            sent_us=self._port.clock.wall_us(),
        )
        if tell is not None and isinstance(tell.message, Ended):
            self._port.send(tell.scheduler, stamped(tell.message, reply))
        self.waiting -= 1
        if not self.waiting:
            self._on_empty()
        tracer, parent_span = self._port.tracer, request.opened.parent_span
        if tracer is not None and parent_span and telemetry.is_sampled(request.trace):
            facts = facts_of(request, reply, self._port.source)
            tracer.export(request.trace, parent_span, request_spans(facts))


def stamped(ended: Ended, reply: Reply) -> Ended:
    """The last Ended of a request, with the stamps of its reply."""
    return dataclasses.replace(
        ended, first_wall_us=reply.first_us, built_wall_us=reply.built_us, sent_wall_us=reply.sent_us
    )


def facts_of(request: RequestText, reply: Reply, detokenizer: str) -> RequestFacts:
    """What the spans of an ended request are made of."""
    opened = request.opened
    return RequestFacts(
        request=opened.request,
        tenant=opened.tenant,
        model=opened.model,
        format=opened.format,
        inbox=opened.inbox,
        received_wall_us=opened.received_wall_us,
        detokenizer=detokenizer,
        choices=tuple(
            Choice(index=i, tokens=closed.tokens, reason=closed.reason, close=closed.message)
            for i, closed in sorted(request.closed.items())
        ),
        reply=reply,
        error=request.error,
    )
