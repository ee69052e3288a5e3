"""`TokenizerCore` sends each request to a scheduler and keeps it until the scheduler answers. Pure.

The actor calls `handle` with events and runs the returned commands. A silent scheduler that lives gets the
request again, for WAIT_US (it detects the duplicate by the id). A request of a dead or unable scheduler goes
to another one as a new attempt. After a start or a death requests wait up to WAIT_US for a scheduler and its
executors. Invariant: each client gets an answer, at the latest a 503.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from services.tokenizer import prepare
from shared import errors
from shared.actor.membership import MIN_DETECTION_US
from shared.kv_blocks import rendezvous
from shared.messages import Accepted, Cancel, Rejected, Tokenized

RESEND_US = 1_000_000  # far above the answer time under load, well below a client's patience
WAIT_US = 30_000_000  # after a death: a hung scheduler is replaced after 15 s, and the new one has to start;
# from the first event until a request is accepted, since a scheduler and an executor have to start;
# also, for each request, while an executor loads its model
GRACE_US = 2_000_000  # a scheduler may notice the loss of its executor a heartbeat before this tokenizer
ASK_AGAIN_US = 250_000  # between attempts while no scheduler can serve
RETRY_AFTER_MS = 1_000
CATCH_UP_US = 1_000_000  # after a cut or a stop: by then the waiting answers are read; one heartbeat
# Unanswered requests of a tenant at schedulers. A scheduler takes some 350 us for each, before step results
# and other tenants: 16 doubled the TTFT p99 of others in a flood on two cores. A burst of one tenant is
# served at 0.9 of the speed of 4.
MOST_ASKED = 2


def _refused_field(code: int, asked: Tokenized) -> str | None:
    """The request field that a scheduler's refusal is about."""
    if code == errors.BadRequest.code and asked.pooling:
        return "input"
    if code == errors.BadRequest.code and asked.open_end:
        return "messages" if asked.format == "chat" else "prompt"
    return {errors.BadRequest.code: "max_tokens", errors.DuplicateRequest.code: "request_id"}.get(code)


@dataclass(frozen=True, slots=True)
class Schedulers:
    """Event: the schedulers of this model are now `ids` (actor ids). `died`: a scheduler or an executor is
    gone without a shutdown. `idle`: schedulers without an executor while others have one; they get no new
    requests and keep their old ones."""

    ids: tuple[str, ...]
    died: bool = False
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loads:
    """Event: the number of executors by scheduler, the `crowded` schedulers, and whether an executor loads
    its model. Sent once a heartbeat."""

    executors: Mapping[str, int]
    crowded: tuple[str, ...] = ()
    loading: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed. Sent while requests are pending. `cut_off`: no message could arrive."""

    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Command: send to a scheduler. The shell stamps `sent_wall_us`."""

    scheduler: str
    message: Tokenized | Cancel
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """Command: the error that ends a request, for its client."""

    inbox: str
    request: str
    error: errors.HeadraceError
    trace: str = ""
    origin: prepare.Origin = prepare.NOWHERE
    key: int = 0  # as in Submission


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Command: a scheduler has accepted the request with this `key` of its Submission."""

    key: int


Event = prepare.Submission | prepare.Prepared | Accepted | Rejected | Cancel | Schedulers | Loads | Tick
Command = Send | Fail | RequestDone
Key = tuple[str, str]  # tenant, request


@dataclass(slots=True)
class _Pending:
    """A request without an answer of a scheduler."""

    tokenized: Tokenized
    trace: str
    received_us: int  # read from the bus
    pending_us: int  # pending since; reset while the tokenizer is cut off
    key: int = 0  # as in Submission
    scheduler: str = ""  # the last one that got the request
    refused_by: tuple[str, ...] = ()  # schedulers that could not serve, since the last wait
    refusal: str = ""
    waits: bool = True  # no scheduler has the request, or its scheduler cannot serve
    resend_us: int = 0  # when to send again
    counts: bool = False  # counted in `_asked`


class TokenizerCore:
    """The pending requests of one tokenizer process."""

    def __init__(self, model: prepare.ServedModel, give_up_us: int = MIN_DETECTION_US) -> None:
        """`give_up_us`: longer than the detection of a dead scheduler takes."""
        self._model = model
        self._give_up_us = give_up_us
        self._pending: dict[Key, _Pending] = {}
        self._asked: Counter[str] = Counter()  # by tenant, unanswered for less than RESEND_US
        self._counted: deque[_Pending] = deque()  # the oldest first; some are not counted any more
        self._caught_up_us = 0  # from then on all answers sent during a cut are read
        self._schedulers: tuple[str, ...] = ()
        self._loads = Loads({})
        self._patient_until_us = 0
        self._start_until_us: int | None = None  # likewise in a fleet that starts
        self._loading_until_us = 0  # beyond the load: its executor has yet to join a scheduler
        self.cancels = prepare.Cancels()
        self.prompt_tokens = 0
        self.requests = 0
        self.failed = 0
        self.unavailable = 0  # of these, with 503

    @property
    def pending(self) -> int:
        """Requests without a scheduler's answer; 0 when idle."""
        return len(self._pending)

    def is_over_share(self, tenant: str, now_us: int) -> bool:
        """True while a tenant has its MOST_ASKED requests at schedulers that still answer."""
        while self._counted and not (
            self._counted[0].counts and now_us - self._counted[0].pending_us < RESEND_US
        ):
            self._uncount(self._counted.popleft())
        return self._asked[tenant] >= MOST_ASKED

    def handle(self, event: Event, now_us: int) -> list[Command]:
        """Apply one event."""
        match event:
            case prepare.Submission():
                return self._submit(prepare.prepared(event, self._model, self.cancels), now_us)
            case prepare.Prepared():
                return self._submit(event, now_us)
            case Accepted():
                self._start_until_us = 0
                pending = self._on_answered(event)
                return [RequestDone(pending.key)] if pending is not None and pending.key else []
            case Rejected():
                return self._on_rejected(event, now_us)
            case Cancel():
                return self._on_cancel(event, now_us)
            case Schedulers():
                return self._on_schedulers(event, now_us)
            case Loads():
                self._loads = event
                if event.loading:
                    self._loading_until_us = now_us + self._give_up_us
                return []
            case Tick():
                return self._on_tick(now_us, event.cut_off)

    def _submit(self, submitted: prepare.Prepared, now_us: int) -> list[Command]:
        self.requests += 1
        tokenized = submitted.outcome
        if isinstance(tokenized, errors.HeadraceError):
            return [self._refuse(submitted, tokenized)]
        key, received_us = (tokenized.tenant, tokenized.request), submitted.received_us or now_us
        if self.cancels.has_cancelled(*key, received_us):
            return [self._refuse(submitted, errors.Cancelled(prepare.CANCELLED))]
        if now_us - received_us >= tokenized.timeout_us:
            return [self._refuse(submitted, errors.DeadlineExceeded(prepare.LATE))]
        if (known := self._pending.get(key)) is not None:
            if known.tokenized.inbox == tokenized.inbox:  # a repetition, or two tokenizers took it over
                return [RequestDone(submitted.key)] if submitted.key else []
            running = f"request {tokenized.request!r} is running; wait for it or use another request_id"
            return [self._refuse(submitted, errors.DuplicateRequest(running, param="request_id"))]
        if not self._schedulers and now_us >= max(self._patient(), self._loading_until_us):
            return [self._refuse(submitted, self._no_scheduler())]
        self.prompt_tokens += len(tokenized.tokens)
        pending = _Pending(tokenized, submitted.trace, received_us, now_us, submitted.key)
        self._pending[key] = pending
        return [self._send_to_scheduler(pending, now_us)] if self._schedulers else []

    def _refuse(self, submitted: prepare.Prepared, error: errors.HeadraceError) -> Fail:
        self._count_failed(error)
        return Fail(
            submitted.inbox, submitted.request, error, submitted.trace, submitted.origin, submitted.key
        )

    def _on_answered(self, answer: Accepted | Rejected) -> _Pending | None:
        key = (answer.tenant, answer.request)
        pending = self._pending.get(key)
        if pending is None or pending.tokenized.attempt != answer.attempt:
            return None
        return self._remove(key)

    def _remove(self, key: Key) -> _Pending:
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

    def _on_rejected(self, answer: Rejected, now_us: int) -> list[Command]:
        pending = self._on_answered(answer)
        if pending is None:
            return []
        if answer.code == errors.Unavailable.code:
            pending.refused_by, pending.refusal = (*pending.refused_by, pending.scheduler), answer.message
            others = set(self._schedulers) - set(pending.refused_by)
            grace_us = WAIT_US if now_us < self._loading_until_us else GRACE_US
            if others or now_us < max(pending.pending_us + grace_us, self._patient()):
                self._pending[answer.tenant, answer.request] = pending
                pending.waits, pending.resend_us = True, now_us + ASK_AGAIN_US
                return [self._send_to_scheduler(pending, now_us)] if others else []
        error = errors.from_code(answer.code, answer.message, answer.retry_after_ms)
        error.param = _refused_field(answer.code, pending.tokenized)
        return [self._fail(pending, error)]

    def _on_cancel(self, cancel: Cancel, now_us: int) -> list[Command]:
        """A scheduler may receive the client's Cancel before the request, so the Cancel is sent again."""
        key = (cancel.tenant, cancel.request)
        self.cancels.add(*key, now_us)
        return self._give_up(key, errors.Cancelled(prepare.CANCELLED)) if key in self._pending else []

    def _on_tick(self, now_us: int, cut_off: bool) -> list[Command]:
        """Send again, or give up. A tokenizer that is cut off or was stopped cannot judge the schedulers: its
        time limits restart, and for CATCH_UP_US afterwards a late request may have an unread answer."""
        commands: list[Command] = []
        if cut_off:
            self._caught_up_us = now_us + CATCH_UP_US
        for key, pending in list(self._pending.items()):
            if cut_off:
                pending.pending_us = now_us
            elif now_us - pending.received_us >= pending.tokenized.timeout_us:
                if now_us >= self._caught_up_us:
                    commands += self._give_up(key, errors.DeadlineExceeded(prepare.LATE))
            elif now_us >= self._patient_with(pending, now_us):
                refusal = errors.Unavailable(pending.refusal, retry_after_ms=RETRY_AFTER_MS)
                commands += self._give_up(key, refusal if pending.refusal else self._no_scheduler())
            elif pending.resend_us and now_us >= pending.resend_us:
                if not pending.waits:
                    pending.resend_us = now_us + self._give_up_us
                    message = self._with_time_left(pending, now_us)
                    commands.append(Send(pending.scheduler, message, pending.trace))
                elif self._schedulers:
                    pending.refused_by = ()
                    commands.append(self._send_to_scheduler(pending, now_us))
        return commands

    def _patient_with(self, pending: _Pending, now_us: int) -> int:
        """Until when a request may be pending: longer while a living scheduler has it, since messages that
        were lost are sent again, and while an executor loads."""
        served = not (pending.waits or pending.refusal)
        wait_us = WAIT_US if served or now_us < self._loading_until_us else self._give_up_us
        return max(pending.pending_us + wait_us, self._patient())

    def _patient(self) -> int:
        return max(self._patient_until_us, self._start_until_us or 0)

    def _on_schedulers(self, event: Schedulers, now_us: int) -> list[Command]:
        """Send the requests of a vanished scheduler to another one as a new attempt, or let them wait. A
        scheduler that joins others may replace a dead one before its death is detected."""
        joined = bool(self._schedulers) and not set(event.ids) <= set(self._schedulers)
        self._schedulers = event.ids
        if self._start_until_us is None:
            self._start_until_us = now_us + WAIT_US
        if event.died or joined:
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
        """Send a request to the scheduler chosen by the hash of its routing key. Skip schedulers that have
        just refused it, and crowded ones if another is left. Each further send is a new attempt."""
        if pending.scheduler:
            attempt = pending.tokenized.attempt + 1
            pending.tokenized = dataclasses.replace(pending.tokenized, attempt=attempt)
        others = [actor for actor in self._schedulers if actor not in pending.refused_by]
        others = [actor for actor in others if actor not in self._loads.crowded] or others
        key = pending.tokenized.routing_key or pending.tokenized.request
        pending.scheduler = rendezvous(key, others or self._schedulers, self._loads.executors)
        pending.refused_by = tuple(actor for actor in pending.refused_by if actor != pending.scheduler)
        pending.waits, pending.resend_us = False, now_us + RESEND_US
        self._count(pending, now_us)
        return Send(pending.scheduler, self._with_time_left(pending, now_us), pending.trace)

    def _with_time_left(self, pending: _Pending, now_us: int) -> Tokenized:
        """The request with its remaining time."""
        waited_us = now_us - pending.received_us
        left_us = max(1, pending.tokenized.timeout_us - waited_us)
        return dataclasses.replace(pending.tokenized, timeout_us=left_us, waited_us=waited_us)

    def _give_up(self, key: Key, error: errors.HeadraceError) -> list[Command]:
        """Answer the client, and cancel at the scheduler in case it got the request after all."""
        pending = self._remove(key)
        commands: list[Command] = [self._fail(pending, error)]
        if pending.scheduler and pending.scheduler not in pending.refused_by:
            cancel = Cancel(tenant=key[0], request=key[1], code=error.code, message=error.message)
            commands.append(Send(pending.scheduler, cancel, pending.trace))
        return commands

    def _fail(self, pending: _Pending, error: errors.HeadraceError) -> Fail:
        self._count_failed(error)
        asked = pending.tokenized
        origin = prepare.Origin(
            asked.tenant, asked.received_wall_us, asked.handled_wall_us, asked.parent_span, tokenized=True
        )
        return Fail(asked.inbox, asked.request, error, pending.trace, origin, pending.key)

    def _count_failed(self, error: errors.HeadraceError) -> None:
        self.failed += 1
        self.unavailable += error.code == errors.Unavailable.code

    def _no_scheduler(self) -> errors.Unavailable:
        return errors.Unavailable(
            f"no scheduler answers for model {self._model.name!r}; see `headrace status`, or try again",
            retry_after_ms=RETRY_AFTER_MS,
        )
