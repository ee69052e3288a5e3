"""The tokenizer's decisions: requests in, Tokenized out, and nobody's inbox lost. Pure.

A request is kept from its arrival until a scheduler has accepted or rejected it. A scheduler that
stays silent is asked once more (it knows the request by its id), one that dies is replaced by
another, and in the end the client gets a 503: never silence. For a while after a death requests wait
for whoever comes instead, and for its executors.
"""

from __future__ import annotations

import dataclasses
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
GIVE_UP_US = 5_000_000  # longer than it takes to notice a dead scheduler by its beats
WAIT_US = 15_000_000  # after a scheduler's death: a new one and its executors take some seconds
ASK_AGAIN_US = 250_000  # a scheduler that cannot serve yet
RETRY_AFTER_MS = 1_000


def _refused_field(code: int, asked: Tokenized) -> str | None:
    """What a scheduler's refusal is about."""
    if code == BadRequest.code and asked.open_end:
        return "messages" if asked.format == "chat" else "prompt"
    return {BadRequest.code: "max_tokens", DuplicateRequest.code: "request_id"}.get(code)


@dataclass(frozen=True, slots=True)
class Schedulers:
    """Event: the ready schedulers of this model are now these (actor ids). `died`: one that is missing has
    not left of its own accord."""

    ids: tuple[str, ...]
    died: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed. Sent while requests are pending."""


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


Event = Submission | Prepared | Accepted | Rejected | Cancel | Schedulers | Tick
Command = Send | Fail
Key = tuple[str, str]  # tenant, request


@dataclass(slots=True)
class _Pending:
    """A request no scheduler has answered for yet."""

    tokenized: Tokenized
    trace: str
    received_us: int  # in our mailbox
    pending_us: int  # since then
    scheduler: str = ""  # asked last
    refused_by: str = ""  # it could not serve
    refusal: str = ""
    waits: bool = True  # for a scheduler: nobody has been asked, or that one cannot serve
    resend_us: int = 0  # when to ask again; 0 = asked twice


class TokenizerCore:
    """The pending requests of one tokenizer process."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._pending: dict[Key, _Pending] = {}
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

    def handle(self, event: Event, now_us: int) -> list[Command]:
        """Apply one event."""
        match event:
            case Submission():
                return self._submit(prepared(event, self._model, self.cancels), now_us)
            case Prepared():
                return self._submit(event, now_us)
            case Accepted():
                self._answered(event)
                return []
            case Rejected():
                return self._rejected(event, now_us)
            case Cancel():
                return self._cancel(event, now_us)
            case Schedulers():
                return self._scheduled(event, now_us)
            case Tick():
                return self._tick(now_us)

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
        if key in self._pending:
            running = f"request {tokenized.request!r} is running; wait for it or use another request_id"
            return [self._refuse(submitted, DuplicateRequest(running, param="request_id"))]
        if not self._schedulers and now_us >= self._patient_until_us:
            return [self._refuse(submitted, self._nobody())]
        self.prompt_tokens += len(tokenized.tokens)
        pending = self._pending[key] = _Pending(tokenized, submitted.trace, received_us, now_us)
        return [self._ask(pending, now_us)] if self._schedulers else []

    def _refuse(self, submitted: Prepared, error: HeadraceError) -> Fail:
        self.failed += 1
        return Fail(submitted.inbox, submitted.request, error, submitted.trace, submitted.origin)

    def _answered(self, answer: Accepted | Rejected) -> _Pending | None:
        key = (answer.tenant, answer.request)
        pending = self._pending.get(key)
        if pending is None or pending.tokenized.attempt != answer.attempt:
            return None
        return self._pending.pop(key)

    def _rejected(self, answer: Rejected, now_us: int) -> list[Command]:
        pending = self._answered(answer)
        if pending is None:
            return []
        if answer.code == Unavailable.code and now_us < self._patient_until_us:
            self._pending[answer.tenant, answer.request] = pending
            pending.waits, pending.resend_us = True, now_us + ASK_AGAIN_US
            pending.refused_by, pending.refusal = pending.scheduler, answer.message
            return []
        error = from_code(answer.code, answer.message, answer.retry_after_ms)
        error.param = _refused_field(answer.code, pending.tokenized)
        return [self._fail(pending, error)]

    def _cancel(self, cancel: Cancel, now_us: int) -> list[Command]:
        """The schedulers hear the same, before the request perhaps; the one that was asked is told again."""
        key = (cancel.tenant, cancel.request)
        self.cancels.add(*key, now_us)
        return self._give_up(key, Cancelled(CANCELLED)) if key in self._pending else []

    def _tick(self, now_us: int) -> list[Command]:
        commands: list[Command] = []
        for key, pending in list(self._pending.items()):
            if now_us - pending.received_us >= pending.tokenized.timeout_us:
                commands += self._give_up(key, DeadlineExceeded(LATE))
            elif now_us >= max(pending.pending_us + GIVE_UP_US, self._patient_until_us):
                refusal = Unavailable(pending.refusal, retry_after_ms=RETRY_AFTER_MS)
                commands += self._give_up(key, refusal if pending.refusal else self._nobody())
            elif pending.resend_us and now_us >= pending.resend_us:
                if not pending.waits:
                    pending.resend_us = 0
                    commands.append(Send(pending.scheduler, self._left(pending, now_us), pending.trace))
                elif self._schedulers:
                    commands.append(self._ask(pending, now_us))
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
            pending.waits |= pending.scheduler not in event.ids
            if pending.waits and event.ids:
                commands.append(self._ask(pending, now_us))
        return commands

    def _ask(self, pending: _Pending, now_us: int) -> Send:
        """Send a request to the scheduler that its id hashes to, but for one that has just refused it.
        Another time is a new attempt."""
        if pending.scheduler:
            attempt = pending.tokenized.attempt + 1
            pending.tokenized = dataclasses.replace(pending.tokenized, attempt=attempt)
        others = [actor for actor in self._schedulers if actor != pending.refused_by]
        pending.scheduler = rendezvous(pending.tokenized.request, others or self._schedulers)
        pending.waits, pending.resend_us = False, now_us + RESEND_US
        return Send(pending.scheduler, self._left(pending, now_us), pending.trace)

    def _left(self, pending: _Pending, now_us: int) -> Tokenized:
        """The request with the time it has left now."""
        waited_us = now_us - pending.received_us
        left_us = max(1, pending.tokenized.timeout_us - waited_us)
        return dataclasses.replace(pending.tokenized, timeout_us=left_us, waited_us=waited_us)

    def _give_up(self, key: Key, error: HeadraceError) -> list[Command]:
        """Answer the client, and tell the scheduler in case it got the request after all."""
        pending = self._pending.pop(key)
        commands: list[Command] = [self._fail(pending, error)]
        if pending.scheduler != pending.refused_by:
            cancel = Cancel(tenant=key[0], request=key[1])
            commands.append(Send(pending.scheduler, cancel, pending.trace))
        return commands

    def _fail(self, pending: _Pending, error: HeadraceError) -> Fail:
        self.failed += 1
        asked = pending.tokenized
        origin = Origin(
            asked.tenant, asked.received_wall_us, asked.handled_wall_us, asked.parent_span, tokenized=True
        )
        return Fail(asked.inbox, asked.request, error, pending.trace, origin)

    def _nobody(self) -> Unavailable:
        return Unavailable(
            f"no scheduler answers for model {self._model.name!r}; see `headrace status`, or try again",
            retry_after_ms=RETRY_AFTER_MS,
        )
