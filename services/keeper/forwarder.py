"""`Forwarder` runs `ForwardCore`: it calls the keepers of the centre over the leaf node connection.

    keeper of the edge ──headrace.v1.forward.<tenant>.submit, result, cancel──▶ keeper of the centre

The other subjects of durable requests end at each side of the connection (services/launcher/leaf.py), so the
streams and the clients of one side never meet those of the other. `serve` answers at the centre.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from services.keeper.core import Answered, Away, Event, Key
from services.keeper.forward_core import (
    CANCEL,
    RESULT,
    SUBMIT,
    Asked,
    Call,
    Called,
    CancelledHere,
    Done,
    ForwardCore,
    ForwardEvent,
    Later,
)
from services.keeper.records import CANCELLED, Body, Work, to_json
from services.keeper.verbs import RECORD_ROOM, Verbs
from shared.client import Client, error_of
from shared.clock import Clock
from shared.errors import BadRequest, HeadraceError, PayloadTooLarge
from shared.json_body import read_json
from shared.nats import subjects
from shared.nats.interface import Bus, Delivery


class Forwarder:
    """The requests of an edge whose model it does not serve."""

    def __init__(
        self,
        clock: Clock,
        here: frozenset[str] | None,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        handle: Callable[[Event], None],
        kept_bytes: Callable[[Key], int],
    ) -> None:
        """`here`: the models of this edge; None: this is none, and forwards nothing. `handle` gets what the
        keeper's core is to know; `kept_bytes`: of a request, in its record."""
        self._clock, self._here, self._spawn = clock, here, spawn
        self._handle, self._kept_bytes = handle, kept_bytes
        self._core = ForwardCore()
        self._client: Client

    async def start(self, bus: Bus) -> None:
        """Subscribe to the ends of requests: one that was cancelled here is cancelled there."""
        if self._here is None:
            return
        self._client = await Client.open(bus)
        await bus.subscribe(subjects.DONE_ALL, self._on_done)

    def __len__(self) -> int:
        return len(self._core)

    def forwards(self, model: str) -> bool:
        """True for a model that this edge does not serve."""
        return self._here is not None and model not in self._here

    def is_there(self, key: Key) -> bool:
        """True if the centre has accepted a request."""
        return self._core.is_there(key)

    def ask(self, work: Work, age_us: int) -> None:
        """Have a request that has waited for `age_us` answered by the centre; an event `Answered` follows."""
        self._feed(Asked(work, age_us))

    def tick(self) -> None:
        """Time has passed."""
        self._feed(Later())

    def _feed(self, event: ForwardEvent) -> None:
        for command in self._core.handle(event, self._clock.now_us()):
            match command:
                case Call():
                    self._spawn(self._call(command))
                case Done(key, outcome, changed):
                    self._handle(self._answered(key, outcome, changed=changed))
                case Away():
                    self._handle(command)

    async def _call(self, call: Call) -> None:
        tenant, request = call.key
        work = call.work
        body: Body = {"id": request} if work is None else {"model": work.model, "request": work.body}
        outcome: Body | HeadraceError
        try:
            client = self._client.as_tenant(tenant)
            answer = await client.ask(subjects.forward(tenant, call.verb), to_json(body))
            found: Body = json.loads(answer.data)
            outcome = error_of(found) if "error" in found and "status" not in found else found
        except HeadraceError as error:
            outcome = error
        self._feed(Called(call.key, call.verb, outcome))

    def _answered(self, key: Key, outcome: Body | HeadraceError, *, changed: bool) -> Answered:
        size = 0 if isinstance(outcome, HeadraceError) else len(to_json(outcome))
        most = self._client.bus.max_payload - self._kept_bytes(key) - RECORD_ROOM
        if size > most:
            why = f"the answer of {size} bytes with its record is over the limit of this edge's nats-server"
            return Answered(key, PayloadTooLarge(f"{why}: ask for less"))
        return Answered(key, outcome, size, changed)

    def _on_done(self, delivery: Delivery) -> None:
        names = subjects.names_in(delivery.subject)
        if names is not None and delivery.data == to_json({"id": names[1], "status": CANCELLED}):
            self._feed(CancelledHere(names))


def serve(verbs: Verbs) -> Callable[[str, str, bytes], Awaitable[Body]]:
    """The verb `forward` of a keeper at the centre. It raises BadRequest, and what the verbs raise."""

    async def answer(tenant: str, verb: str, data: bytes) -> Body:
        try:
            asked = read_json(data)
            model, request, body = asked.get("model", ""), asked.get("id", ""), asked.get("request")
            subjects.work(tenant, request or model)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BadRequest(f"the body of {verb!r:.40} is of another form: {error!s:.200}") from None
        if verb == SUBMIT and isinstance(body, dict) and model:
            return await verbs.submit(tenant, model, to_json(body))
        if verb == RESULT and request:
            return await verbs.result(tenant, request)
        if verb == CANCEL and request:
            await verbs.end(tenant, request)
            return {"id": request}
        raise BadRequest(f"{verb!r:.40} with this body is no verb of forward: {SUBMIT}, {RESULT}, {CANCEL}")

    return answer
