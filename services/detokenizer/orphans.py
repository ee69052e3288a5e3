"""A scheduler has died; its requests have not. Pure.

This shard knows the text of each, its tokens, and the request as it was asked (`RequestText.kept`). It asks
another scheduler to go on, or the one that was started instead. The stream then continues behind its last
token, and its reader has seen nothing but a pause.

    lost ──▶ orphan ──Tokenized──▶ asked ──Open──▶ handed over
               ▲ │                   │ 503: nobody is ready there yet
               └─┼───────────────────┘
                 ├── its scheduler was only stopped, and is back: it has never lost anything
                 └── WAIT_TURNS have passed: 503 for the client
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.detokenizer.commands import Command, Tell
from services.detokenizer.request import RequestText
from services.detokenizer.table import OpenTable, RequestKey
from shared.blocks import rendezvous
from shared.errors import Cancelled, HeadraceError, Unavailable, from_code
from shared.messages import MOVED, Accepted, Cancel, Detached, Open, Rejected, Tokenized, ints

TURN_S = 0.25
WAIT_TURNS = 60  # 15 s: the death is 3 s old by now, and a new process of any kind is there within some more
UNAVAILABLE = 503

Name = tuple[str, str]  # tenant, request


@dataclass(slots=True)
class _Orphan:
    key: RequestKey
    void: bool  # its scheduler has lost it, and not only been silent
    why: str
    asked: str = ""  # the scheduler that is to go on, `kind.id`
    refused_by: str = ""
    refusal: str = ""
    turns_left: int = WAIT_TURNS


class Orphans:
    """The requests of one shard that have no scheduler."""

    def __init__(
        self,
        table: OpenTable,
        fail: Callable[[RequestKey, HeadraceError], list[Command]],
        forget: Callable[[RequestKey], None],
    ) -> None:
        self._table = table
        self._fail = fail
        self._forget = forget
        self._orphans: dict[Name, _Orphan] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def keep(self, scheduler: str, asked: Tokenized) -> None:
        """What was asked, from the scheduler that serves it."""
        request = self._table.requests.get((scheduler, asked.tenant, asked.request))
        if request is not None:
            request.kept = asked

    def lost(self, scheduler: str, why: str, *, void: bool = False) -> list[Command]:
        """The scheduler is silent, or has lost all it knew (`void`)."""
        for orphan in self._orphans.values():
            if orphan.asked == scheduler:
                orphan.asked = ""
        commands: list[Command] = []
        for key in self._table.of_scheduler(scheduler):
            request, name = self._table.requests[key], key[1:]
            if request.kept is None or request.unwanted is not None:
                error = request.unwanted or Unavailable(f"{why}; send the request again")
                commands += [Tell(scheduler, Detached(seqs=request.seqs)), *self._fail(key, error)]
            elif name in self._orphans:
                self._orphans[name].void |= void
            else:
                self._orphans[name] = _Orphan(key, void, why)
        return commands

    def turn(self, ready: Sequence[str], wall_us: int) -> list[Command]:
        """Every TURN_S while there are any; `ready` are the ids of the schedulers that could go on."""
        return [command for name in list(self._orphans) for command in self._turn(name, ready, wall_us)]

    def answered(self, scheduler: str, answer: Accepted | Rejected) -> list[Command]:
        """What the scheduler says that was asked to go on. After Accepted its Opens follow."""
        name = (answer.tenant, answer.request)
        orphan = self._orphans.get(name)
        if orphan is None or orphan.asked != scheduler or isinstance(answer, Accepted):
            return []
        orphan.asked, orphan.refused_by, orphan.refusal = "", scheduler, answer.message
        if answer.code == UNAVAILABLE:
            return []
        del self._orphans[name]
        if orphan.key not in self._table.requests:
            return []
        if answer.code == MOVED:
            self._forget(orphan.key)
            return []
        error = from_code(answer.code, answer.message, answer.retry_after_ms)
        return [*self._detached(orphan), *self._fail(orphan.key, error)]

    def opened(self, scheduler: str, opened: Open) -> tuple[list[Command], bool]:
        """A scheduler opens a sequence: of an orphan, perhaps, that is now its own. Returns what follows from
        that, and whether somebody reads the sequence."""
        name = (opened.tenant, opened.request)
        orphan = self._orphans.get(name)
        if orphan is None:
            return [], True
        request = self._table.requests.get(orphan.key)
        if request is None:
            return [], False  # answered in the end by the one that was thought dead: see _turn
        if request.opened.inbox != opened.inbox or (orphan.key[0] == scheduler and not orphan.void):
            return [], True
        del self._orphans[name]
        commands = self._detached(orphan) if orphan.key[0] != scheduler else []
        if opened.attempt > request.opened.attempt:
            self._forget(orphan.key)  # its tokenizer has asked anew: it starts over
        else:
            self._table.hand_over(orphan.key, scheduler)
        return commands, True

    def cancelled(self, tenant: str, request: str) -> None:
        """The client wants no more of a request. A scheduler that lives has heard the same and sees to it; no
        other is to go on."""
        for found in self._table.named(tenant, request):
            found.unwanted = found.unwanted or Cancelled("cancelled by the client")

    # ---- internals ------------------------------------------------------------------------------

    def _turn(self, name: Name, ready: Sequence[str], wall_us: int) -> Iterator[Command]:
        orphan = self._orphans[name]
        request = self._table.requests.get(orphan.key)
        orphan.turns_left -= 1
        back = not orphan.void and orphan.key[0].removeprefix("scheduler.") in ready
        if request is None or request.unwanted is not None or not orphan.turns_left:
            del self._orphans[name]
            if orphan.asked:
                yield Tell(orphan.asked, Cancel(tenant=name[0], request=name[1]))
            if request is not None:
                yield from self._detached(orphan)
                yield from self._fail(orphan.key, request.unwanted or _nobody(orphan))
        elif orphan.asked:
            return
        elif back:
            del self._orphans[name]
        elif ready:
            others = [actor for actor in ready if f"scheduler.{actor}" != orphan.refused_by]
            orphan.asked = f"scheduler.{rendezvous(name[1], others or ready)}"
            yield Tell(orphan.asked, resumption(request, wall_us), request.trace)

    def _detached(self, orphan: _Orphan) -> list[Command]:
        """For a scheduler that was only stopped."""
        seqs = self._table.requests[orphan.key].seqs
        return [] if orphan.void else [Tell(orphan.key[0], Detached(seqs=seqs))]


def _nobody(orphan: _Orphan) -> Unavailable:
    """What the client is told in the end."""
    why = orphan.refusal or "no other one goes on with the request"
    return Unavailable(f"{orphan.why}, and {why}; send it again")


def resumption(request: RequestText, wall_us: int) -> Tokenized:
    """What another scheduler needs to go on: the request with all its tokens up to here."""
    kept = request.kept
    assert kept is not None  # or it would not be an orphan
    tokens, counts, reasons = kept.tokens[:], ints(), []
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
        age_us=max(wall_us - request.opened_us, 0),
        first_us=max(request.first_us - request.opened_us, 0) if any(counts) else 0,
    )


def _so_far(request: RequestText, choice: int) -> tuple[array[int], str]:
    """The tokens of a choice, and why it has ended; a stop string may be known here alone."""
    stream, closed = request.choices.get(choice), request.closed.get(choice)
    if stream is None:
        return ints(), ""
    if closed is not None:
        return stream.ids[: closed.tokens], closed.reason
    if stream.stop_index is not None:
        return stream.ids[: stream.stop_index], "stop"
    return stream.ids, ""
