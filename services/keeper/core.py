"""`KeeperCore` takes durable requests from the work queue to their records. Pure.

    delivered ──▶ looking ──no record──▶ asked ──answer──▶ storing ──record is stored──▶ ack
                     │ record: ack          │ 409, 429, 503: nak with a delay
                     │ model held back: nak │ an error after a savepoint: asked from the start, once

The actor runs the commands and returns what came of them as events. Invariants: a delivery is acked only if
there is a record; a delivery of a request that has a record is acked and nothing else; an answer is stored
at most once, since records are create-only. A keeper may die anywhere: the delivery comes again, to the same
or another keeper, and starts at `looking`. A request that still runs is not started again: it is asked for on
the same reply subject, and the services take this for a repetition. A request with savepoints is looked up
each time before it is asked for, and goes on after its last one.

A request waits for KEPT_S. Wall clocks do not decide when that is over, since one may be set: see
`age_at_first`.

A model that lacks a service is held back: its requests are not asked for, but for one in LAST_DELAY_US, until
the service is there. Otherwise services would read and refuse each of them again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from services.keeper.records import Body, Hook, Work
from shared import bodies, savepoints
from shared.api import MAX_RUN
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    HeadraceError,
    Overloaded,
    Unavailable,
    UnknownModel,
)

WINDOW = 256  # requests in flight of one keeper: as many as an executor with a GPU runs at once
MOST_AWAY = 4_096  # more, which the centre of an edge has accepted: each costs a look and its bytes
WINDOW_BYTES = 67_108_864  # of these requests and their unstored answers
PROGRESS_US = 3_000_000  # a third of the time after which a delivery counts as lost
ASK_AGAIN_US = 30_000_000  # an answer may be lost while the nats-server is away
ASKS_OF_DELIVERY = 64  # with numbers of runs of their own: half an hour of them
RETRY_US = 1_000_000  # after a call to JetStream that failed
FIRST_DELAY_US, LAST_DELAY_US = 1_000_000, 15_000_000  # of a refused request, doubled at each delivery
HELD_GAP_US = 10_000  # between two deliveries of held requests: a delivery costs CPU even if nothing is asked
KEPT_S = 86_400  # a record stays for a day, and a request waits for a day
MAX_SINCE = 100_000  # requests whose first delivery is remembered: as many as the queue holds
EXPIRED = "no service has answered this request within the day for which it is kept: submit it again"

Key = tuple[str, str]  # tenant and id

# Nothing is wrong with these requests: a queue is full, a service is away, or the id runs as another request.
TRY_AGAIN = (Overloaded, Unavailable, UnknownModel, DuplicateRequest)
LASTING = (*TRY_AGAIN, Cancelled, DeadlineExceeded)  # not because of a savepoint


@dataclass(frozen=True, slots=True)
class Delivered:
    """The work queue delivers a request, for the `times`th time. `ack` is the reply subject."""

    work: Work
    ack: str
    times: int = 1
    size: int = 0  # bytes
    stored_us: int = 0  # how long it has been stored, by the clock of the store


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Whether a request has a record, and its savepoint, if it has one; None: the store did not answer."""

    key: Key
    exists: bool | None
    savepoint: bytes = b""


@dataclass(frozen=True, slots=True)
class Answered:
    """A service answered a request."""

    key: Key
    outcome: Body | HeadraceError
    size: int = 0
    changed: bool = False  # by another model than that of `submit`
    lacking: bool = False  # a service that the model needs is not there


@dataclass(frozen=True, slots=True)
class Stored:
    """A record was stored now (True), was there before (False), or could not be stored (None)."""

    key: Key
    new: bool | None


@dataclass(frozen=True, slots=True)
class Away:
    """The centre has accepted a request of this edge: others may take its place in the window."""

    key: Key


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Delivered | LookedUp | Answered | Stored | Away | Tick


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look for the record of a request, and for its savepoint; LookedUp follows."""

    key: Key
    savepoint: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the request to a tokenizer, or its savepoint to a detokenizer; Answered may follow."""

    work: Work
    savepoint: bytes = b""
    run: int = 0  # the number of the run that this begins, unless the request runs; 0: it goes on


@dataclass(frozen=True, slots=True)
class Store:
    """Store a record, unless there is one; Stored follows."""

    key: Key
    record: Body


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove the savepoint of a request."""

    key: Key


@dataclass(frozen=True, slots=True)
class Announce:
    """Send the news to the subscribers of `done`."""

    key: Key
    status: str


@dataclass(frozen=True, slots=True)
class Ack:
    """The delivery is dealt with, once the event of `hook` is stored."""

    reply: str
    hook: Hook | None = None


@dataclass(frozen=True, slots=True)
class Nak:
    """Have it delivered again after a delay."""

    reply: str
    delay_us: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The delivery is in work."""

    reply: str


Command = LookUp | Ask | Store | Drop | Announce | Ack | Nak | Progress


@dataclass(slots=True)
class _Flight:
    """A request in flight."""

    work: Work
    ack: str
    times: int
    size: int
    due_us: int  # of the next try
    asks: int = 0
    resumed: bool = False  # asked with its savepoint
    restarted: bool = False  # from the start, since its savepoint was of no use
    away: bool = False  # outside of the window
    record: Body | None = None  # to store

    @property
    def was_asked(self) -> bool:
        """True if the request was sent to a service."""
        return self.asks > 0

    def ask(self, savepoint: bytes = b"") -> Ask:
        """Send the request. A run that begins at a later delivery, or later in this one, has a higher number;
        no clock counts."""
        self.asks += 1
        run = (self.times - 1) * ASKS_OF_DELIVERY + (self.asks - 1) % ASKS_OF_DELIVERY + 1
        return Ask(self.work, savepoint, 0 if savepoint else min(run, MAX_RUN))


@dataclass(slots=True)
class _Hold:
    """A model that lacks a service."""

    probe_us: int  # when one of its requests is asked for again
    last_us: int = 0  # when the last of its held requests is delivered again


class KeeperCore:
    """The requests in flight of one keeper."""

    def __init__(self) -> None:
        self._flights: dict[Key, _Flight] = {}
        self._by_tenant = Counter[str]()
        self._holds: dict[str, _Hold] = {}  # by model
        self._since_us: dict[Key, int] = {}  # since when requests wait; the oldest entries are first
        self._bytes = self._away = 0
        self._progress_us = 0  # of the next one
        self.stored = 0  # records
        self.refused = 0  # requests to be tried again
        self.held_back = 0  # deliveries of requests that were not asked for

    def __len__(self) -> int:
        return len(self._flights)

    def room(self, tenant: str, tenants: int) -> int:
        """How many more requests of a tenant may be delivered while so many have work: each has its equal
        share of the window."""
        if self.is_full:
            return 0
        own = self._by_tenant[tenant]
        return min(WINDOW + self._away - len(self._flights), max(1, WINDOW // tenants) - own)

    @property
    def is_full(self) -> bool:
        """True if no tenant has room."""
        return len(self._flights) >= WINDOW + self._away or self._bytes >= WINDOW_BYTES

    def is_running(self, key: Key) -> bool:
        """True if a request has been sent to a tokenizer and has no record yet."""
        return key in self._flights and self._flights[key].was_asked

    def handle(self, event: Event, now_us: int, now_wall_us: int) -> list[Command]:
        """Apply one event."""
        match event:
            case Delivered():
                return self._on_delivered(event, now_us)
            case Tick():
                return [*self._retries(now_us), *self._progress(now_us)]
        flight = self._flights.get(event.key)
        if flight is None:
            return []
        match event:
            case LookedUp():
                return self._on_looked_up(event, flight, now_us, now_wall_us)
            case Answered():
                return self._on_answered(event, flight, now_us, now_wall_us)
            case Stored():
                return self._on_stored(event, flight)
            case Away():
                self._leave(event.key, flight)
                return []

    @property
    def held_models(self) -> list[str]:
        """The models that are held back."""
        return list(self._holds)

    def release(self, model: str) -> None:
        """A model lacks no service any more."""
        self._holds.pop(model, None)

    def kept_bytes(self, key: Key) -> int:
        """The bytes of a request in flight that its record has, too."""
        flight = self._flights.get(key)
        return flight.size if flight is not None and flight.work.keep else 0

    def work(self, key: Key) -> Work | None:
        """A request in flight."""
        return self._flights[key].work if key in self._flights else None

    def age_us(self, key: Key, now_us: int) -> int:
        """How long a request has waited."""
        return now_us - self._since_us.get(key, now_us)

    def on_reconnected(self, now_us: int) -> None:
        """The nats-server was away: an answer may be lost."""
        for flight in self._flights.values():
            flight.due_us = min(flight.due_us, now_us + RETRY_US)

    def give_back(self) -> list[Command]:
        """Have all requests in flight delivered again, now: this keeper stops."""
        commands: list[Command] = [Nak(flight.ack, 0) for flight in self._flights.values()]
        self._flights.clear()
        self._by_tenant.clear()
        self._bytes = self._away = 0
        return commands

    def _on_delivered(self, event: Delivered, now_us: int) -> list[Command]:
        key = (event.work.tenant, event.work.id)
        if (flight := self._flights.get(key)) is not None:  # the progress acks were late
            # a consumer that was removed and made again counts from 1, and numbers of runs must not repeat
            flight.ack, flight.times = event.ack, max(flight.times, event.times)
            return []
        if key not in self._since_us:
            self._since_us[key] = now_us - age_at_first(event.stored_us, event.times, LAST_DELAY_US)
            if len(self._since_us) > MAX_SINCE:  # perhaps landed by another keeper
                del self._since_us[next(iter(self._since_us))]
        self._flights[key] = _Flight(event.work, event.ack, event.times, event.size, now_us + RETRY_US)
        self._by_tenant[event.work.tenant] += 1
        self._bytes += event.size
        return [LookUp(key, event.work.has_savepoints)]

    def _on_looked_up(self, event: LookedUp, flight: _Flight, now_us: int, now_wall_us: int) -> list[Command]:
        if flight.record is not None or event.exists is None:
            return []  # `due_us` brings the next try
        if flight.was_asked and not flight.work.has_savepoints:
            return []
        if event.exists:
            return self._land(event.key)
        if self.age_us(event.key, now_us) > KEPT_S * 1_000_000:
            record = flight.work.record(now_wall_us, DeadlineExceeded(EXPIRED))
            return self._store(event.key, flight, record, now_us)
        if (hold := self._holds.get(flight.work.model)) is not None and not flight.was_asked:
            if now_us < hold.probe_us:
                self.held_back += 1
                return [self._try_later(event.key, flight, now_us)]
            hold.probe_us = now_us + LAST_DELAY_US
        found = b"" if flight.restarted else event.savepoint
        savepoint = found if found and savepoints.is_of(found, bodies.encode(flight.work.body)) else b""
        flight.resumed, flight.due_us = bool(savepoint), now_us + ASK_AGAIN_US
        useless = found != savepoint  # of another body or version
        return [*([Drop(event.key)] if useless else []), flight.ask(savepoint)]

    def _on_answered(self, event: Answered, flight: _Flight, now_us: int, now_wall_us: int) -> list[Command]:
        if flight.record is not None:
            return []
        if event.lacking:
            self._holds.setdefault(flight.work.model, _Hold(now_us + LAST_DELAY_US))
        else:
            self.release(flight.work.model)
        failed = isinstance(event.outcome, HeadraceError) and not isinstance(event.outcome, LASTING)
        if flight.resumed and failed:
            flight.resumed, flight.restarted, flight.due_us = False, True, now_us + ASK_AGAIN_US
            return [Drop(event.key), flight.ask()]
        if not isinstance(event.outcome, TRY_AGAIN):
            flight.size += event.size
            self._bytes += event.size
            record = flight.work.record(now_wall_us, event.outcome, changed=event.changed)
            return self._store(event.key, flight, record, now_us)
        if not flight.was_asked:
            return []  # to an earlier keeper
        self.refused += 1
        return [self._try_later(event.key, flight, now_us, event.outcome.retry_after_ms * 1_000)]

    def _try_later(self, key: Key, flight: _Flight, now_us: int, least_us: int = 0) -> Nak:
        delay_us = max(min(FIRST_DELAY_US << min(flight.times - 1, 8), LAST_DELAY_US), least_us)
        if (hold := self._holds.get(flight.work.model)) is not None:
            hold.last_us = max(now_us + delay_us, hold.last_us + HELD_GAP_US)
            delay_us = hold.last_us - now_us
        self._forget(key)
        return Nak(flight.ack, delay_us)

    def _on_stored(self, event: Stored, flight: _Flight) -> list[Command]:
        if event.new is None or flight.record is None:
            return []  # `due_us` brings the next try
        self.stored += event.new
        news = [Announce(event.key, str(flight.record["status"]))] if event.new else []
        return [*news, *self._land(event.key)]

    def _store(self, key: Key, flight: _Flight, record: Body, now_us: int) -> list[Command]:
        flight.record, flight.due_us = record, now_us + RETRY_US
        return [Store(key, flight.record)]

    def _land(self, key: Key) -> list[Command]:
        flight = self._forget(key)
        self._since_us.pop(key, None)
        return [Ack(flight.ack, flight.work.hook), *([Drop(key)] if flight.work.has_savepoints else [])]

    def _leave(self, key: Key, flight: _Flight) -> None:
        if not flight.away and self._away < MOST_AWAY:
            flight.away = True
            self._away += 1
            self._count_out(key[0])

    def _forget(self, key: Key) -> _Flight:
        flight = self._flights.pop(key)
        if flight.away:
            self._away -= 1
        else:
            self._count_out(key[0])
        self._bytes -= flight.size
        return flight

    def _count_out(self, tenant: str) -> None:
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def _retries(self, now_us: int) -> Iterator[Command]:
        for key, flight in self._flights.items():
            if now_us < flight.due_us:
                continue
            flight.due_us = now_us + (ASK_AGAIN_US if flight.was_asked and not flight.record else RETRY_US)
            if flight.record is not None:
                yield Store(key, flight.record)
            elif flight.was_asked and not flight.work.has_savepoints:
                yield flight.ask()
            else:
                yield LookUp(key, flight.work.has_savepoints)

    def _progress(self, now_us: int) -> Iterator[Command]:
        if now_us >= self._progress_us:
            self._progress_us = now_us + PROGRESS_US
            yield from (Progress(flight.ack) for flight in self._flights.values())


def age_at_first(stored_us: int, times: int, gap_us: int) -> int:
    """How long a message has waited when a keeper gets it for the first time. The smaller one of two answers:
    the clock of the store may have been set forward, and a count of deliveries alone may grow fast. `gap_us`:
    the longest time between two deliveries of a message that waits. A time in which there was no keeper
    does not count."""
    return min(stored_us, (times - 1) * gap_us)
