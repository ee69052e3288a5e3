"""The tokenizer's decisions: requests in, Tokenized out, and nobody's inbox lost. Pure.

A request is kept from its arrival until a scheduler has accepted or rejected it. A scheduler that
stays silent is asked once more (it knows the request by its id), one that dies or cannot serve is replaced
by another, and in the end the client gets a 503: never silence. For a while after a death requests wait
for whoever comes instead, and for its executors.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass

from services.tokenizer.prepare import (
    CANCELLED,
    LATE,
    NOWHERE,
    Cancels,
    Origin,
    Prepared,
    ServedModel,
    Submission,
    prepared,
)
from shared.actor.membership import MIN_DETECTION_US
from shared.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    HeadraceError,
    Unavailable,
    from_code,
)
from shared.kv_blocks import rendezvous
from shared.messages import Accepted, Cancel, Rejected, Tokenized

RESEND_US = 1_000_000  # far above an answer under load, well below a client's patience
WAIT_US = 30_000_000  # after a death: one that hangs is replaced after 15 s, and its successor has to start
GRACE_US = 2_000_000  # a scheduler may miss its executor a heartbeat before we do
ASK_AGAIN_US = 250_000  # schedulers that cannot serve yet
RETRY_AFTER_MS = 1_000
HEARS_US = 1_000_000  # who was cut off or stopped has read by then what had come for it: one heartbeat
MOST_ASKED = 2  # of a tenant, unanswered by schedulers: more would stand before those of others


def _refused_field(code: int, asked: Tokenized) -> str | None:
    """What a scheduler's refusal is about."""
    if code == BadRequest.code and asked.open_end:
        return "messages" if asked.format == "chat" else "prompt"
    return {BadRequest.code: "max_tokens", DuplicateRequest.code: "request_id"}.get(code)


@dataclass(frozen=True, slots=True)
class Schedulers:
    """Event: the schedulers of this model to ask are now these (actor ids). `died`: one that is missing, or
    an executor, has not left of its own accord. `idle`: they have no executor, others do: they keep what they
    have been asked."""

    ids: tuple[str, ...]
    died: bool = False
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed. Sent while requests are pending. `cut_off`: nothing could have been heard."""

    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Command: send to a scheduler. The shell stamps `sent_wall_us`."""

    scheduler: str
    message: Tokenized | Cancel
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Command: the last message to a client."""

    inbox: str
    request: str
    error: HeadraceError
    trace: str = ""
    origin: Origin = NOWHERE
    key: int = 0  # as in Submission


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Command: a scheduler has this request, by the `key` of its Submission."""

    key: int


Event = Submission | Prepared | Accepted | Rejected | Cancel | Schedulers | Tick
Command = Send | Fail | RequestDone
Key = tuple[str, str]  # tenant, request


@dataclass(slots=True)
class _Pending:
    """A request no scheduler has answered for yet."""

    tokenized: Tokenized
    trace: str
    received_us: int  # in our mailbox
    pending_us: int  # since then, or since we hear again
    key: int = 0  # as in Submission
    scheduler: str = ""  # asked last
    refused_by: tuple[str, ...] = ()  # since the last wait: they could not serve
    refusal: str = ""
    waits: bool = True  # for a scheduler: nobody has been asked, or that one cannot serve
    resend_us: int = 0  # when to ask again; 0 = asked twice
    counts: bool = False  # among those that its tenant has asked a scheduler for


class TokenizerCore:
    """The pending requests of one tokenizer process."""

    def __init__(self, model: ServedModel, give_up_us: int = MIN_DETECTION_US) -> None:
        """`give_up_us`: longer than a dead scheduler goes unnoticed."""
        self._model = model
        self._give_up_us = give_up_us
        self._pending: dict[Key, _Pending] = {}
        self._asked: Counter[str] = Counter()  # by tenant, unanswered for less than RESEND_US
        self._counted: deque[_Pending] = deque()  # the oldest first; some count no more
        self._hears_us = 0  # what was answered before is known from then on
        self._schedulers: tuple[str, ...] = ()
        self._patient_until_us = 0
        self.cancels = Cancels()
        self.prompt_tokens = 0
        self.requests = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        """Requests that wait for a scheduler's answer; 0 when idle."""
        return len(self._pending)

    def over_share(self, tenant: str, now_us: int) -> bool:
        """True while a scheduler that answers has as many requests of a tenant before it as it should."""
        while self._counted and not (
            self._counted[0].counts and now_us - self._counted[0].pending_us < RESEND_US
        ):
            self._uncount(self._counted.popleft())
        return self._asked[tenant] >= MOST_ASKED

    def handle(self, event: Event, now_us: int) -> list[Command]:
        """Apply one event."""
        match event:
            case Submission():
                return self._submit(prepared(event, self._model, self.cancels), now_us)
            case Prepared():
                return self._submit(event, now_us)
            case Accepted():
                pending = self._answered(event)
                return [RequestDone(pending.key)] if pending is not None and pending.key else []
            case Rejected():
                return self._rejected(event, now_us)
            case Cancel():
                return self._cancel(event, now_us)
            case Schedulers():
                return self._scheduled(event, now_us)
            case Tick():
                return self._tick(now_us, event.cut_off)

    def _submit(self, submitted: Prepared, now_us: int) -> list[Command]:
        self.requests += 1
        tokenized = submitted.outcome
        if isinstance(tokenized, HeadraceError):
            return [self._refuse(submitted, tokenized)]
        key, received_us = (tokenized.tenant, tokenized.request), submitted.received_us or now_us
        if self.cancels.cover(*key, received_us):
            return [self._refuse(submitted, Cancelled(CANCELLED))]
        if now_us - received_us >= tokenized.timeout_us:
            return [self._refuse(submitted, DeadlineExceeded(LATE))]
        if (known := self._pending.get(key)) is not None:
            if known.tokenized.inbox == tokenized.inbox:  # sent again, or taken over by two
                return [RequestDone(submitted.key)] if submitted.key else []
            running = f"request {tokenized.request!r} is running; wait for it or use another request_id"
            return [self._refuse(submitted, DuplicateRequest(running, param="request_id"))]
        if not self._schedulers and now_us >= self._patient_until_us:
            return [self._refuse(submitted, self._no_scheduler())]
        self.prompt_tokens += len(tokenized.tokens)
        pending = _Pending(tokenized, submitted.trace, received_us, now_us, submitted.key)
        self._pending[key] = pending
        return [self._send_to_scheduler(pending, now_us)] if self._schedulers else []

    def _refuse(self, submitted: Prepared, error: HeadraceError) -> Fail:
        self.failed += 1
        return Fail(
            submitted.inbox, submitted.request, error, submitted.trace, submitted.origin, submitted.key
        )

    def _answered(self, answer: Accepted | Rejected) -> _Pending | None:
        key = (answer.tenant, answer.request)
        pending = self._pending.get(key)
        if pending is None or pending.tokenized.attempt != answer.attempt:
            return None
        return self._taken(key)

    def _taken(self, key: Key) -> _Pending:
        """A request that is pending no more."""
        pending = self._pending.pop(key)
        self._uncount(pending)
        return pending

    def _count(self, pending: _Pending, now_us: int) -> None:
        if not pending.counts and now_us - pending.pending_us < RESEND_US:
            pending.counts = True
            self._asked[pending.tokenized.tenant] += 1
            self._counted.append(pending)

    def _uncount(self, pending: _Pending) -> None:
        if pending.counts:
            pending.counts, tenant = False, pending.tokenized.tenant
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant]

    def _rejected(self, answer: Rejected, now_us: int) -> list[Command]:
        pending = self._answered(answer)
        if pending is None:
            return []
        if answer.code == Unavailable.code:
            pending.refused_by, pending.refusal = (*pending.refused_by, pending.scheduler), answer.message
            others = set(self._schedulers) - set(pending.refused_by)
            if others or now_us < max(pending.pending_us + GRACE_US, self._patient_until_us):
                self._pending[answer.tenant, answer.request] = pending
                pending.waits, pending.resend_us = True, now_us + ASK_AGAIN_US
                return [self._send_to_scheduler(pending, now_us)] if others else []
        error = from_code(answer.code, answer.message, answer.retry_after_ms)
        error.param = _refused_field(answer.code, pending.tokenized)
        return [self._fail(pending, error)]

    def _cancel(self, cancel: Cancel, now_us: int) -> list[Command]:
        """The schedulers hear the same, before the request perhaps; the one that was asked is told again."""
        key = (cancel.tenant, cancel.request)
        self.cancels.add(*key, now_us)
        return self._give_up(key, Cancelled(CANCELLED)) if key in self._pending else []

    def _tick(self, now_us: int, cut_off: bool) -> list[Command]:
        """Ask again, give up. Who is cut off itself, or was stopped, knows nothing of the schedulers: its
        patience begins anew when it hears again, and what is late then may have been answered."""
        commands: list[Command] = []
        if cut_off:
            self._hears_us = now_us + HEARS_US
        for key, pending in list(self._pending.items()):
            if cut_off:
                pending.pending_us = now_us
            elif now_us - pending.received_us >= pending.tokenized.timeout_us:
                if now_us >= self._hears_us:
                    commands += self._give_up(key, DeadlineExceeded(LATE))
            elif now_us >= max(pending.pending_us + self._give_up_us, self._patient_until_us):
                refusal = Unavailable(pending.refusal, retry_after_ms=RETRY_AFTER_MS)
                commands += self._give_up(key, refusal if pending.refusal else self._no_scheduler())
            elif pending.resend_us and now_us >= pending.resend_us:
                if not pending.waits:
                    pending.resend_us = 0
                    commands.append(Send(pending.scheduler, self._left(pending, now_us), pending.trace))
                elif self._schedulers:
                    pending.refused_by = ()
                    commands.append(self._send_to_scheduler(pending, now_us))
        return commands

    def _scheduled(self, event: Schedulers, now_us: int) -> list[Command]:
        """Requests of a vanished scheduler go to another one, as a new attempt, or wait for one. A new one
        beside others may stand for one that has died and is not missed yet."""
        beside = bool(self._schedulers) and not set(event.ids) <= set(self._schedulers)
        self._schedulers = event.ids
        if event.died or beside:
            self._patient_until_us = now_us + WAIT_US
        commands: list[Command] = []
        for pending in self._pending.values():
            if pending.scheduler not in (*event.ids, *event.idle):
                pending.waits = True
                self._uncount(pending)
            if pending.waits and event.ids:
                commands.append(self._send_to_scheduler(pending, now_us))
        return commands

    def _send_to_scheduler(self, pending: _Pending, now_us: int) -> Send:
        """Send a request to the scheduler that its id hashes to, but for those that have just refused it.
        Another time is a new attempt."""
        if pending.scheduler:
            attempt = pending.tokenized.attempt + 1
            pending.tokenized = dataclasses.replace(pending.tokenized, attempt=attempt)
        pending.scheduler = self._pick(pending)
        pending.refused_by = tuple(actor for actor in pending.refused_by if actor != pending.scheduler)
        pending.waits, pending.resend_us = False, now_us + RESEND_US
        self._count(pending, now_us)
        return Send(pending.scheduler, self._left(pending, now_us), pending.trace)

    def _pick(self, pending: _Pending) -> str:
        """The ready scheduler that a request goes to."""
        others = [actor for actor in self._schedulers if actor not in pending.refused_by]
        return rendezvous(pending.tokenized.request, others or self._schedulers)

    def _left(self, pending: _Pending, now_us: int) -> Tokenized:
        """The request with the time it has left now."""
        waited_us = now_us - pending.received_us
        left_us = max(1, pending.tokenized.timeout_us - waited_us)
        return dataclasses.replace(pending.tokenized, timeout_us=left_us, waited_us=waited_us)

    def _give_up(self, key: Key, error: HeadraceError) -> list[Command]:
        """Answer the client, and tell the scheduler in case it got the request after all."""
        pending = self._taken(key)
        commands: list[Command] = [self._fail(pending, error)]
        if pending.scheduler and pending.scheduler not in pending.refused_by:
            cancel = Cancel(tenant=key[0], request=key[1], code=error.code, message=error.message)
            commands.append(Send(pending.scheduler, cancel, pending.trace))
        return commands

    def _fail(self, pending: _Pending, error: HeadraceError) -> Fail:
        self.failed += 1
        asked = pending.tokenized
        origin = Origin(
            asked.tenant, asked.received_wall_us, asked.handled_wall_us, asked.parent_span, tokenized=True
        )
        return Fail(asked.inbox, asked.request, error, pending.trace, origin, pending.key)

    def _no_scheduler(self) -> Unavailable:
        return Unavailable(
            f"no scheduler answers for model {self._model.name!r}; see `headrace status`, or try again",
            retry_after_ms=RETRY_AFTER_MS,
        )
