"""`Failover` moves the requests of a dead scheduler to another one. Pure.

This shard has the text and the tokens of each request, and the request itself (`ResponseText.kept`). It sends
them to another scheduler or to a restarted one. The stream then continues after its last token, and its
client sees only a delay.

    lost ──Tokenized──▶ asked ──Open──▶ handed over
      ▲ │                 │ 503: not ready yet
      └─┼─────────────────┘
        ├── its scheduler returns with its state: nothing was lost
        └── WAIT_TURNS have passed: 503 for the client

`Backups` keeps copies of requests that are open at other detokenizers. A request so survives the loss of both
its scheduler and its detokenizer:

    backup ──opened here, or done elsewhere──▶ forgotten
      ├── one of the two has gone, and no claim arrives for ONE_LOST_US ──▶ forgotten: it was answered
      └── its scheduler and its detokenizer have gone ──▶ adopted: lost, without tokens

An adopted stream starts over, since the text that its client has is unknown here. Done keys go to all other
detokenizers, and again to one that appears or returns: it may have missed them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.detokenizer.response import Command, OpenRequests, RequestKey, ResponseText, SendTo, detached
from shared import messages
from shared.errors import Cancelled, DuplicateRequest, HeadraceError, Unavailable, from_code
from shared.kv_blocks import rendezvous
from shared.messages import Claims, Open, Tokenized, longs

FAILOVER_POLL_S = 0.25
WAIT_TURNS = 120  # 30 s: a hung scheduler is replaced after 15 s, and the new one has to start
MOST_DEATHS = 3  # of schedulers with the same request: it may be the cause
ONE_LOST_US = 40_000_000  # longer than the search for another scheduler: see WAIT_TURNS
DONE_US, MAX_DONE = 60_000_000, 65_536  # limits of the done keys; the oldest are dropped

Name = tuple[str, str]  # tenant, request


@dataclass(slots=True)
class _LostRequest:
    key: RequestKey
    inbox: str
    void: bool  # its scheduler has lost its state; False: it is silent
    why: str
    asked: str = ""  # the scheduler that got the request, `kind.id`
    refused_by: str = ""
    refusal: str = ""
    turns_left: int = WAIT_TURNS
    over: bool = False  # answered or given up; the Cancel to `asked` may not have arrived yet


class Failover:
    """The requests of one shard that have no scheduler."""

    def __init__(
        self,
        table: OpenRequests,
        fail: Callable[[RequestKey, HeadraceError], list[Command]],
        forget: Callable[[RequestKey], None],
    ) -> None:
        self._table = table
        self._fail = fail
        self._forget = forget
        self._lost: dict[Name, _LostRequest] = {}

    def __len__(self) -> int:
        return sum(not lost.over for lost in self._lost.values())

    @property
    def is_active(self) -> bool:
        """True while `advance` has work."""
        return bool(self._lost)

    def has_lost(self, tenant: str, request: str) -> bool:
        """True while a request of this name has no scheduler."""
        return (tenant, request) in self._lost

    def on_tokenized(self, scheduler: str, tokenized: messages.Tokenized) -> None:
        """Keep the request as its scheduler sent it."""
        request = self._table.requests.get((scheduler, tokenized.tenant, tokenized.request))
        if request is not None:
            self._table.keep_tokenized(request, tokenized)

    def on_lost(self, scheduler: str, why: str, *, void: bool = False) -> list[Command]:
        """The scheduler is silent, or has lost its state (`void`)."""
        for lost in self._lost.values():
            if lost.asked == scheduler:
                lost.asked = ""
        return self.on_requests_lost(self._table.of_scheduler(scheduler), why, void=void)

    def on_requests_lost(self, keys: list[RequestKey], why: str, *, void: bool) -> list[Command]:
        """As `on_lost`, for some requests of a scheduler."""
        commands: list[Command] = []
        for key in keys:
            request, known = self._table.requests[key], self._lost.get(key[1:])
            if known is not None and known.key == key and self._request_of(known) is request:
                known.void |= void
                continue
            if (error := _unrecoverable(request, why, known)) is not None:
                commands += [detached(key, request), *self._fail(key, error)]
            else:
                self._lost[key[1:]] = _LostRequest(key, request.opened.inbox, void, why)
        return commands

    def advance(self, ready: Sequence[str], now_us: int) -> list[Command]:
        """Try schedulers and give up. Each FAILOVER_POLL_S while `is_active`; `ready` are scheduler ids."""
        return [command for name in list(self._lost) for command in self._advance(name, ready, now_us)]

    def on_answer(self, scheduler: str, answer: messages.Accepted | messages.Rejected) -> list[Command]:
        """Handle the answer of an asked scheduler. After Accepted its Opens follow."""
        name = (answer.tenant, answer.request)
        lost = self._lost.get(name)
        if lost is None or lost.asked != scheduler or isinstance(answer, messages.Accepted):
            return []
        lost.asked, lost.refused_by, lost.refusal = "", scheduler, answer.message
        if answer.code == Unavailable.code and not lost.over:
            return []
        del self._lost[name]
        if self._request_of(lost) is None:
            return []
        commands = self._detach(lost)
        if answer.code == messages.MOVED:
            self._forget(lost.key)
            return commands
        error = from_code(answer.code, answer.message, answer.retry_after_ms)
        return [*commands, *self._fail(lost.key, error)]

    def on_opened(self, scheduler: str, opened: messages.Open) -> tuple[list[Command], bool]:
        """A scheduler opens a sequence, maybe of a lost request, which then has a scheduler again. Returns
        commands, and whether this shard takes the sequence."""
        name = (opened.tenant, opened.request)
        lost = self._lost.get(name)
        if lost is None or lost.inbox != opened.inbox:
            return self._second(scheduler, opened)
        request = self._request_of(lost)
        if request is None:
            return [], scheduler != lost.asked  # `_give_up` has sent a Cancel to that one
        if lost.key[0] == scheduler and not lost.void:
            return [], True
        del self._lost[name]
        commands = self._detach(lost) if lost.key[0] != scheduler else []
        if opened.attempt > request.opened.attempt:
            self._forget(lost.key)  # a new attempt of its tokenizer: it starts over
        else:
            request.deaths += 1
            self._table.hand_over(lost.key, scheduler)
        return commands, True

    def on_cancelled(self, tenant: str, request: str) -> None:
        """The client has cancelled a request: no failover for it. A living scheduler receives the same Cancel
        and ends it."""
        for _, found in self._table.named(tenant, request):
            found.unwanted = found.unwanted or Cancelled("cancelled by the client")

    # ---- internals ------------------------------------------------------------------------------

    def _request_of(self, lost: _LostRequest) -> ResponseText | None:
        """Its open request; None once it is over. The id may belong to a newer request."""
        request = None if lost.over else self._table.requests.get(lost.key)
        return request if request is not None and request.opened.inbox == lost.inbox else None

    def _second(self, scheduler: str, opened: messages.Open) -> tuple[list[Command], bool]:
        """A scheduler opens a request that another one runs: it is slow and this one has been resumed there,
        or the request was sent twice and the loads chose another scheduler. The first one goes on. Another
        client's request with the same id is refused."""
        for key, request in self._table.named(opened.tenant, opened.request):
            if key[0] == scheduler:
                continue
            if request.opened.inbox != opened.inbox:
                if key[1:] in self._lost:
                    continue
                error = DuplicateRequest(f"request {opened.request!r} is running; use another request_id")
                refused = messages.Cancel(
                    tenant=opened.tenant, request=opened.request, code=error.code, message=error.message
                )
                return [SendTo(scheduler, refused)], True
            again = (opened.attempt - 1) // messages.ATTEMPTS > (
                request.opened.attempt - 1
            ) // messages.ATTEMPTS  # a takeover
            if request.opened.attempt >= opened.attempt or again:
                return [
                    SendTo(scheduler, messages.Detached(seqs=messages.ints([opened.seq]), moved=True))
                ], False
        return [], True

    def _advance(self, name: Name, ready: Sequence[str], now_us: int) -> Iterator[Command]:
        lost = self._lost[name]
        request = self._request_of(lost)
        lost.turns_left -= 1
        back = not lost.void and lost.key[0].removeprefix("scheduler.") in ready
        if lost.over:
            if not lost.asked or not lost.turns_left:
                del self._lost[name]
        elif request is None or request.unwanted is not None or not lost.turns_left:
            yield from self._give_up(lost, request)
        elif lost.asked:
            return
        elif back:
            del self._lost[name]
        elif ready:
            others = [actor for actor in ready if f"scheduler.{actor}" != lost.refused_by]
            key = (request.kept.routing_key if request.kept else "") or name[1]
            lost.asked = f"scheduler.{rendezvous(key, others or ready)}"
            yield SendTo(lost.asked, resumption(request, now_us), request.trace)

    def _give_up(self, lost: _LostRequest, request: ResponseText | None) -> Iterator[Command]:
        """Fail the request and cancel it at the asked scheduler. `request` is None if the old scheduler
        lives after all and has finished it."""
        name = lost.key[1:]
        if lost.asked:
            lost.over, lost.turns_left = True, WAIT_TURNS
            yield SendTo(lost.asked, messages.Cancel(tenant=name[0], request=name[1]))
        else:
            del self._lost[name]
        if request is not None:
            yield from self._detach(lost)
            yield from self._fail(lost.key, request.unwanted or _no_scheduler(lost))

    def _detach(self, lost: _LostRequest) -> list[Command]:
        """Detach the request at its old scheduler, which may only have been stopped."""
        if not lost.key[0]:  # from a savepoint
            return []
        request = self._table.requests[lost.key]
        known = lost.void and request.seqs
        return [] if known else [detached(lost.key, request, moved=True)]


def _unrecoverable(request: ResponseText, why: str, known: _LostRequest | None) -> HeadraceError | None:
    """Why the request cannot move to another scheduler; None if it can."""
    if request.unwanted is not None:
        return request.unwanted
    if request.deaths >= MOST_DEATHS:
        return Unavailable(f"{why}, the {request.deaths + 1}th with this request; send it again")
    if request.kept is None or (known is not None and not known.over):  # or two of one name have no scheduler
        return Unavailable(f"{why}; send the request again")
    return None


def _no_scheduler(lost: _LostRequest) -> Unavailable:
    """The error for the client after WAIT_TURNS."""
    why = lost.refusal or "no other one goes on with the request"
    return Unavailable(f"{lost.why}, and {why}; send it again")


def resumption(request: ResponseText, now_us: int) -> messages.Tokenized:
    """The message to another scheduler: the request with all its tokens so far."""
    kept = request.kept
    assert kept is not None  # see _unrecoverable
    tokens, counts, reasons = kept.tokens[:], messages.ints(), []
    for choice in range(kept.n):
        ids, reason = _so_far(request, choice)
        tokens += ids
        counts.append(len(ids))
        reasons.append(reason)
    return dataclasses.replace(
        kept,
        attempt=request.opened.attempt,
        tokens=tokens,
        generated=counts,
        reasons=tuple(reasons),
        age_us=kept.age_us + max(now_us - request.since_us, 0),
        first_us=(kept.first_us or kept.age_us + max(request.began_us - request.since_us, 0)) * any(counts),
    )


def _so_far(request: ResponseText, choice: int) -> tuple[array[int], str]:
    """The tokens of a choice, and its finish reason; only this shard may have seen its stop string."""
    stream, closed = request.choices.get(choice), request.closed.get(choice)
    if stream is None:
        return messages.ints(), ""
    if closed is not None:
        return stream.ids[: closed.tokens], closed.reason
    if stream.stop_index is not None:
        return stream.ids[: stream.stop_index], "stop"
    return stream.ids, ""


@dataclass(slots=True)
class Backup:
    """A request that is open at another detokenizer."""

    scheduler: str  # `kind.id`, as is `shard`
    shard: str
    tokenized: Tokenized
    trace: str
    since_us: int
    void: set[str] = field(default_factory=set)  # which of the two have lost their state
    one_lost_us: int = 0  # time at which one of the two had gone; 0: both live
    cancelled: bool = False


def key_of(request: Tokenized | Open) -> int:
    """The key of a request in Claims; a later request with the same id has another inbox."""
    name = f"{request.tenant} {request.request} {request.inbox}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Backups:
    """The backups of this shard for other shards, and the done keys for both."""

    def __init__(self) -> None:
        self._backups: dict[int, Backup] = {}
        self._named: dict[tuple[str, str], set[int]] = {}  # keys by tenant and request
        self._done: list[int] = []  # not reported yet
        self._done_us: dict[int, int] = {}  # time by done key; the oldest first

    def __len__(self) -> int:
        """0 when idle."""
        return len(self._backups)

    def on_backup(self, scheduler: str, tokenized: Tokenized, trace: str, now_us: int) -> None:
        """Keep a backup from the request's scheduler."""
        if (key := key_of(tokenized)) in self._done_us:
            return
        self._backups[key] = Backup(scheduler, f"detokenizer.{tokenized.shard}", tokenized, trace, now_us)
        self._named.setdefault((tokenized.tenant, tokenized.request), set()).add(key)

    def on_opened(self, opened: Open) -> None:
        """A request is open here: it needs no backup, and a done one with this key is no longer done."""
        if self._backups or self._done_us:
            self._forget(key := key_of(opened))
            self._done_us.pop(key, None)

    def on_cancelled(self, tenant: str, request: str) -> None:
        """Mark the backups of a cancelled request."""
        for key in self._named.get((tenant, request), ()):
            self._backups[key].cancelled = True

    def on_answered(self, opened: Open, now_us: int) -> None:
        """A request has ended here: report it to the others."""
        key = key_of(opened)
        self._done.append(key)
        self._note_done(key, now_us)

    @property
    def has_unsent(self) -> bool:
        """True if `report` has new keys."""
        return bool(self._done)

    def report(self) -> Claims:
        """The done keys since the last report, for the caller to send."""
        done, self._done = self._done, []
        return Claims(done=longs(done))

    @property
    def known(self) -> Claims:
        """All recent done keys, for a detokenizer that may have missed reports."""
        return Claims(done=longs(self._done_us))

    def on_claims(self, claims: Claims, now_us: int) -> None:
        """Forget the requests that another detokenizer has answered."""
        for key in claims.done:
            self._forget(key)
            self._note_done(key, now_us)

    def on_gone(self, source: str, lives: Callable[[str], bool], now_us: int, *, void: bool) -> list[Backup]:
        """A scheduler or a detokenizer is silent, or has lost its state (`void`). Removes and returns the
        backups that now have neither."""
        alone = []
        for key, copy in self._backups.items():
            both = {copy.scheduler, copy.shard}
            if source not in both:
                continue
            if void:
                copy.void.add(source)
            if any(lives(each) for each in both - copy.void):
                copy.one_lost_us = copy.one_lost_us or now_us
            else:
                alone.append(key)
        return [self._drop(key) for key in alone]

    def expire(self, now_us: int, lives: Callable[[str], bool]) -> None:
        """Once a heartbeat: drop the backups past their time limit, and those with one side lost for
        ONE_LOST_US: they are answered. A side that returns with its state is not lost."""
        for key, copy in list(self._backups.items()):
            if copy.one_lost_us and not copy.void and lives(copy.scheduler) and lives(copy.shard):
                copy.one_lost_us = 0
            unspoken = copy.one_lost_us and now_us - copy.one_lost_us > ONE_LOST_US
            if unspoken or now_us - copy.since_us > copy.tokenized.timeout_us:
                self._drop(key)
        while self._done_us and next(iter(self._done_us.values())) < now_us - DONE_US:
            del self._done_us[next(iter(self._done_us))]

    def _note_done(self, key: int, now_us: int) -> None:
        self._done_us.pop(key, None)
        self._done_us[key] = now_us
        if len(self._done_us) > MAX_DONE:
            del self._done_us[next(iter(self._done_us))]

    def _forget(self, key: int) -> None:
        if key in self._backups:
            self._drop(key)

    def _drop(self, key: int) -> Backup:
        copy = self._backups.pop(key)
        keys = self._named[name := (copy.tokenized.tenant, copy.tokenized.request)]
        keys.discard(key)
        if not keys:
            del self._named[name]
        return copy
