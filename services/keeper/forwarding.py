"""`ForwardCore` takes durable requests of an edge to the centre, and their answers back. Pure.

    asked ──▶ here ──submit, also again──▶ there ──looks, ever less often──▶ answered
                │ refused: the error         │ cancelled here: cancel, until it has arrived
                                             │ not known there: given back, and asked again

The edge keeps a request until it has the answer: the centre may lose what it has taken, and gets it again.
The id and the body are the same each time, so a second submit is the same request there.

`Forwarder` runs `ForwardCore`: it calls the keepers of the centre over the leaf node connection.

    keeper of the edge ──headrace.v1.forward.<tenant>.submit, result, cancel──▶ keeper of the centre

The other subjects of durable requests end at each side of the connection (services/launcher/leaf.py), so the
streams and the clients of one side never meet those of the other. `serve` answers at the centre.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from services.keeper.core import EXPIRED, KEPT_S, TRY_AGAIN, Answered, Away, Key
from services.keeper.parts import Keeper, Part, Verb
from services.keeper.records import CANCELLED, COMPLETED, FAILED, Body, Work
from services.keeper.verbs import RECORD_ROOM
from shared import bodies, errors
from shared.client.client import Client, error_of
from shared.nats import subjects
from shared.nats.interface import Delivery, NoResponders, RequestTimeout
from shared.telemetry.counters import Counted, KeeperCounter

SUBMIT, RESULT, CANCEL = "submit", "result", "cancel"  # verbs of the centre
MOST_CALLS = 64  # at a time: a keeper refuses more than 1,024, and other edges call it, too
MOST_HERE = 64  # wait in memory while the link is down; others go back to the queue: local work passes them
RETRY_US = 1_000_000  # after a call without an answer
# From a submit to the first look, and the most between two; it comes late by a quarter of the time so far.
FIRST_LOOK_US, LAST_LOOK_US = 250_000, 15_000_000
NO_LINK = "the central nats-server does not answer: the request waits here"


class TakenThere(errors.HeadraceError):
    """Another request has this id at the centre. Final: it has the id for a day."""

    code, type = 409, errors.DuplicateRequest.type


@dataclass(frozen=True, slots=True)
class Asked:
    """A request is to be answered by the centre. It may be asked several times."""

    work: Work
    age_us: int = 0  # how long it has waited so far


@dataclass(frozen=True, slots=True)
class Called:
    """What became of a call."""

    key: Key
    verb: str
    outcome: Body | errors.HeadraceError


@dataclass(frozen=True, slots=True)
class CancelledHere:
    """A request has the record `cancelled` at this edge."""

    key: Key


@dataclass(frozen=True, slots=True)
class Later:
    """Time has passed."""


ForwardEvent = Asked | Called | CancelledHere | Later


@dataclass(frozen=True, slots=True)
class Call:
    """Ask the centre's keeper; Called follows. `work`: of a submit."""

    key: Key
    verb: str
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The answer of a request, or its error. `changed`: by another model than that of the submit there."""

    key: Key
    outcome: Body | errors.HeadraceError
    changed: bool = False


ForwardCommand = Call | Done | Away


@dataclass(slots=True)
class _Forwarded:
    """A request on its way."""

    work: Work
    since_us: int  # here, then there
    due_us: int = 0  # of the next call
    calling: bool = False
    sent: bool = False  # once: it may be there without an answer
    there: bool = False
    cancelled: bool = False  # here, and not yet there


class ForwardCore:
    """The requests of one keeper that the centre answers."""

    def __init__(self) -> None:
        self._requests: dict[Key, _Forwarded] = {}
        self._due: list[tuple[int, Key]] = []  # a heap; entries of another time than `due_us` are old
        self._calls = 0
        self._here = 0  # not there yet
        self._linked = True

    def __len__(self) -> int:
        return len(self._requests)

    def is_there(self, key: Key) -> bool:
        """True if the centre has accepted a request."""
        return key in self._requests and self._requests[key].there

    def handle(self, event: ForwardEvent, now_us: int) -> list[ForwardCommand]:
        """Apply one event."""
        commands: list[ForwardCommand] = []
        match event:
            case Asked(work, age_us):
                commands += self._on_asked(work, age_us, now_us)
            case Called():
                commands += self._on_called(event, now_us)
            case CancelledHere(key):
                commands += self._on_cancelled(key, now_us)
        return [*commands, *self._next(now_us)]

    def _on_asked(self, work: Work, age_us: int, now_us: int) -> Iterator[ForwardCommand]:
        key = (work.tenant, work.id)
        request = self._requests.get(key)
        if request is not None and request.cancelled:
            return
        kept_s = 2 * KEPT_S if request is not None and request.there else KEPT_S  # its day there began later
        if age_us > kept_s * 1_000_000:
            if request is not None:
                self._forget(key)
            yield Done(key, errors.DeadlineExceeded(EXPIRED))
        elif request is None and self._here >= MOST_HERE and not self._linked:
            yield Done(key, errors.Unavailable(NO_LINK))
        elif request is None:
            self._requests[key] = request = _Forwarded(work, now_us)
            self._here += 1
            self._plan(key, request, now_us)

    def _on_called(self, event: Called, now_us: int) -> Iterator[ForwardCommand]:
        self._calls -= 1
        down = isinstance(event.outcome, NoResponders | RequestTimeout)
        if not down and not self._linked:  # it is back: all that waits for it is due
            for key, each in self._requests.items():
                if not each.calling:
                    self._plan(key, each, now_us)
        self._linked = not down
        if (request := self._requests.get(event.key)) is None:
            return
        request.calling = False
        if down or (
            event.verb != SUBMIT and isinstance(event.outcome, errors.Overloaded | errors.Unavailable)
        ):
            self._plan(event.key, request, now_us + RETRY_US)
        elif request.cancelled:
            if event.verb == CANCEL:
                self._forget(event.key)
            else:  # it was cancelled during the call
                self._plan(event.key, request, now_us)
        elif event.verb == SUBMIT:
            yield from self._on_submitted(event, request, now_us)
        elif event.verb == RESULT:
            yield from self._on_looked_up(event, request, now_us)

    def _on_submitted(self, event: Called, request: _Forwarded, now_us: int) -> Iterator[ForwardCommand]:
        if not isinstance(event.outcome, errors.HeadraceError):
            if not request.there:
                self._here -= 1
            request.there, request.since_us = True, now_us
            self._plan(event.key, request, now_us + FIRST_LOOK_US)
            yield Away(event.key)
            return
        self._forget(event.key)
        taken = isinstance(event.outcome, errors.DuplicateRequest)
        yield Done(event.key, TakenThere(event.outcome.message) if taken else event.outcome)

    def _on_looked_up(self, event: Called, request: _Forwarded, now_us: int) -> Iterator[ForwardCommand]:
        found = event.outcome
        if isinstance(found, errors.HeadraceError) and found.code == errors.UnknownRequest.code:
            self._forget(event.key)
            yield Done(event.key, errors.Unavailable("the centre has lost this request: it gets it again"))
        elif not isinstance(found, errors.HeadraceError) and found.get("status") in (
            COMPLETED,
            FAILED,
            CANCELLED,
        ):
            self._forget(event.key)
            yield Done(event.key, _ended(found), bool(found.get("model_changed")))
        else:
            wait_us = min(max((now_us - request.since_us) // 4, FIRST_LOOK_US), LAST_LOOK_US)
            self._plan(event.key, request, now_us + wait_us)

    def _on_cancelled(self, key: Key, now_us: int) -> Iterator[ForwardCommand]:
        if (request := self._requests.get(key)) is None or request.cancelled:
            return
        request.cancelled = True
        if request.sent:
            self._here -= not request.there
            request.there = True  # or on its way: it takes no place of one that waits
            self._plan(key, request, now_us)
        else:
            self._forget(key)
        yield Done(key, errors.Cancelled("cancelled by the client"))

    def _next(self, now_us: int) -> Iterator[ForwardCommand]:
        """Calls that are due. Without a link one at a time looks whether it is back."""
        while self._due and self._due[0][0] <= now_us and self._calls < (MOST_CALLS if self._linked else 1):
            due_us, key = heapq.heappop(self._due)
            request = self._requests.get(key)
            if request is None or request.calling or request.due_us != due_us:
                continue
            request.calling, self._calls = True, self._calls + 1
            if request.cancelled:
                yield Call(key, CANCEL)
            elif request.there:
                yield Call(key, RESULT)
            else:
                request.sent = True
                yield Call(key, SUBMIT, request.work)

    def _plan(self, key: Key, request: _Forwarded, due_us: int) -> None:
        request.due_us = due_us
        heapq.heappush(self._due, (due_us, key))

    def _forget(self, key: Key) -> None:
        self._here -= not self._requests.pop(key).there


def _ended(record: Body) -> Body | errors.HeadraceError:
    """The answer or the error of a record of the centre. An error there is final."""
    if record["status"] == COMPLETED:
        answer: Body = record["answer"]
        return answer
    error = error_of(record)
    return errors.EngineError(error.message) if isinstance(error, TRY_AGAIN) else error


class Forwarder(Part):
    """The requests of an edge whose model it does not serve; at a centre, the verbs that edges call."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper, self._core = keeper, ForwardCore()
        self._client: Client
        if keeper.here is None:
            keeper.verbs[subjects.FORWARD_ALL] = serve_forwarded(keeper)
            return
        keeper.must_forward = lambda model: model not in (keeper.here or ())
        keeper.is_there, keeper.forward = self._core.is_there, self.forward

    async def start(self) -> None:
        """Subscribe to the ends of requests: one that was cancelled here is cancelled there."""
        if self._keeper.here is not None:
            self._client = await Client.open(self._keeper.bus)
            await self._keeper.bus.subscribe(subjects.DONE_ALL, self._on_done)

    def __len__(self) -> int:
        return len(self._core)

    @property
    def counted(self) -> Counted:
        return {KeeperCounter.FORWARDED: len(self)}

    def forward(self, work: Work, age_us: int) -> None:
        """Have a request that has waited for `age_us` answered by the centre; an event `Answered` follows."""
        self._feed(Asked(work, age_us))

    def tick(self) -> None:
        """Time has passed."""
        self._feed(Later())

    def _feed(self, event: ForwardEvent) -> None:
        for command in self._core.handle(event, self._keeper.clock.now_us()):
            match command:
                case Call():
                    self._keeper.spawn(self._call(command))
                case Done(key, outcome, changed):
                    self._keeper.handle(self._answered(key, outcome, changed=changed))
                case Away():
                    self._keeper.handle(command)

    async def _call(self, call: Call) -> None:
        tenant, request = call.key
        work = call.work
        body = bodies.Forwarded(id=request)
        if work is not None:
            body = bodies.Forwarded(model=work.model, request=work.body)
        outcome: Body | errors.HeadraceError
        try:
            client = self._client.as_tenant(tenant)
            answer = await client.ask(subjects.forward(tenant, call.verb), bodies.encode(body))
            found = bodies.decode(bodies.Json, answer.data)
            outcome = error_of(found) if "error" in found and "status" not in found else found
        except errors.HeadraceError as error:
            outcome = error
        self._feed(Called(call.key, call.verb, outcome))

    def _answered(self, key: Key, outcome: Body | errors.HeadraceError, *, changed: bool) -> Answered:
        size = 0 if isinstance(outcome, errors.HeadraceError) else len(bodies.encode(outcome))
        most = self._client.bus.max_payload - self._keeper.core.kept_bytes(key) - RECORD_ROOM
        if size > most:
            why = f"the answer of {size} bytes with its record is over the limit of this edge's nats-server"
            return Answered(key, errors.PayloadTooLarge(f"{why}: ask for less"))
        return Answered(key, outcome, size, changed)

    def _on_done(self, delivery: Delivery) -> None:
        names = subjects.names_in(delivery.subject)
        if names is not None and delivery.data == bodies.encode(bodies.Ended(id=names[1], status=CANCELLED)):
            self._feed(CancelledHere(names))


def serve_forwarded(keeper: Keeper) -> Verb:
    """The verb `forward` of a keeper at the centre. It raises BadRequest, and what the verbs raise."""

    async def answer(tenant: str, verb: str, data: bytes) -> Body | bytes:
        asked = bodies.asked(bodies.Forwarded, data)
        model, request, body = asked.get("model", ""), asked.get("id", ""), asked.get("request")
        if verb == SUBMIT and body is not None and model:
            return await keeper.verbs[subjects.SUBMIT_ALL](tenant, model, bodies.encode(body))
        if verb == RESULT and request:
            return await keeper.verbs[subjects.RESULT_ALL](tenant, request, b"")
        if verb == CANCEL and request:
            await keeper.end(tenant, request)
            return {"id": request}
        raise errors.BadRequest(
            f"{verb!r:.40} with this body is no verb of forward: {SUBMIT}, {RESULT}, {CANCEL}"
        )

    return answer
