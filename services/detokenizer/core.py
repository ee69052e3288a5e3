"""The detokenizer's decisions: messages of the schedulers in, frames and answers out. Pure.

A sequence lives from Open to Close, a request until all its choices are closed or one fails. Tokens
only gather text; `flush` turns what has gathered into at most one frame for each stream, so a
reader (or a broker) that lags gets fewer and longer frames.
"""

from __future__ import annotations

from services.detokenizer.commands import Command, Fault, Publish, Tell
from services.detokenizer.logprobs import ScoreReader
from services.detokenizer.request import RequestText
from services.detokenizer.stream import TokenGap
from services.detokenizer.table import OpenTable, RequestKey
from shared.errors import HeadraceError, Unavailable, from_code
from shared.messages import Close, Detached, Ended, Message, Open, StopFound, Tokens, ints
from shared.replies import end_headers
from shared.vocabulary import Vocabulary


class DetokenizerCore:
    """All the text of one shard."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._table = OpenTable(vocabulary)
        self.frames = 0
        self.tokens = 0

    def handle(self, scheduler: str, message: Message, trace: str = "") -> list[Command]:
        """Apply one message of the scheduler `kind.id`."""
        match message:
            case Tokens():
                return self._tokens(scheduler, message)
            case Open():
                return self._open(scheduler, message, trace)
            case Close():
                return self._close(scheduler, message)
        return [Fault(f"{type(message).__name__} of {scheduler} is not for a detokenizer")]

    def flush(self) -> list[Command]:
        """One frame for each stream that has text waiting."""
        waiting, self._table.waiting = self._table.waiting, {}
        return [self._publish(request, request.delta()) for request in waiting.values()]

    def client_gone(self, number: int) -> list[Command]:
        """Nobody reads the stream of request `number` any more. Its text is still worked out: the
        scheduler decides whether it goes on."""
        key = self._table.key_of(number)
        return [] if key is None else [Tell(key[0], Detached(seqs=self._table.requests[key].seqs))]

    def scheduler_lost(self, scheduler: str, why: str) -> list[Command]:
        """The scheduler is gone or has lost its state, or messages of it are lost: its requests
        cannot be finished, and their clients are told."""
        commands: list[Command] = []
        for key in self._table.of_scheduler(scheduler):
            commands += self._fail(key, Unavailable(f"{why}; send the request again"))
        return commands

    def load(self) -> dict[str, int]:
        """What is here; `sequences` and `requests` are 0 when idle."""
        return {
            "sequences": len(self._table.sequences),
            "requests": len(self._table.requests),
            "frames": self.frames,
            "tokens": self.tokens,
        }

    @property
    def idle(self) -> bool:
        """True when no request is open."""
        return not self._table.requests

    # ---- messages -------------------------------------------------------------------------------

    def _open(self, scheduler: str, opened: Open, trace: str) -> list[Command]:
        request, fresh = self._table.add(scheduler, opened, trace)
        if request is None:
            return []
        commands: list[Command] = []
        if fresh and opened.stream:
            commands.append(self._publish(request, request.accepted()))
        if opened.tokens:  # a re-open: everything so far
            tokens = Tokens(
                executor="",
                step=0,
                seqs=ints([opened.seq]),
                first=ints([0]),
                counts=ints([len(opened.tokens)]),
                ids=opened.tokens,
            )
            commands += self._tokens(scheduler, tokens)
        return commands

    def _tokens(self, scheduler: str, step: Tokens) -> list[Command]:
        commands: list[Command] = []
        sequences, ids, at = self._table.sequences, step.ids, 0
        self.tokens += len(ids)
        scores = ScoreReader(step) if step.logprobs else None
        for seq, first, count in zip(step.seqs, step.first, step.counts, strict=True):
            start, at = at, at + count
            row = scores.next_row(count) if scores is not None else ()
            found = sequences.get((scheduler, seq))
            if found is None:
                continue  # failed or closed before
            stream, request = found
            try:
                if stream.take(first, ids[start:at], row):
                    commands.append(Tell(scheduler, StopFound(seq=seq, index=stream.taken)))
            except TokenGap as gap:
                commands += self._gap(scheduler, request, gap)
                continue
            if request.opened.stream and stream.waiting:
                self._table.waiting[request.number] = request
        return commands

    def _close(self, scheduler: str, close: Close) -> list[Command]:
        found = self._table.sequences.get((scheduler, close.seq))
        if close.reason == "moved":  # another shard has the whole request, and its reader
            if found is not None:
                self._table.forget(_key(scheduler, found[1]))
            return []
        if found is None:  # failed before, or a duplicate: the scheduler still waits for an answer
            return [_ended(scheduler, close, close.final, close.reason)]
        stream, request = found
        if close.reason == "error":
            error = from_code(close.code, close.message, close.retry_after_ms)
            return [
                *self._fail(_key(scheduler, request), error),
                _ended(scheduler, close, close.final, "error"),
            ]
        try:
            tokens = request.close(stream, close)
        except TokenGap as gap:
            return [
                *self._gap(scheduler, request, gap),
                _ended(scheduler, close, close.final, "error"),
            ]
        del self._table.sequences[scheduler, close.seq]
        if request.opened.stream and stream.waiting:
            self._table.waiting[request.number] = request
        commands = self._finish(scheduler, request) if request.complete else []
        return [*commands, _ended(scheduler, close, tokens, stream.reason)]

    # ---- the ends of requests -------------------------------------------------------------------

    def _finish(self, scheduler: str, request: RequestText) -> list[Command]:
        commands = self._rest(request)
        commands.append(self._publish(request, request.end(), end_headers(trace=request.trace)))
        self._table.forget(_key(scheduler, request))
        return commands

    def _gap(self, scheduler: str, request: RequestText, gap: TokenGap) -> list[Command]:
        fault = Fault(f"request {request.opened.request} of {scheduler}: {gap.message}")
        detached = Tell(scheduler, Detached(seqs=request.seqs))
        return [fault, detached, *self._fail(_key(scheduler, request), gap)]

    def _fail(self, key: RequestKey, error: HeadraceError) -> list[Command]:
        request = self._table.requests[key]
        commands = self._rest(request)
        headers = end_headers(error, request.trace)
        commands.append(self._publish(request, request.failure(error), headers))
        self._table.forget(key)
        return commands

    def _rest(self, request: RequestText) -> list[Command]:
        """The text that waits, before the last frame."""
        waits = self._table.waiting.pop(request.number, None) is not None
        return [self._publish(request, request.delta())] if waits else []

    def _publish(self, request: RequestText, data: bytes, headers: dict[str, str] | None = None) -> Command:
        self.frames += 1
        inbox = request.opened.inbox
        if headers is None:
            return Publish(inbox, data, request.number)
        return Publish(inbox, data, headers=headers)


def _key(scheduler: str, request: RequestText) -> RequestKey:
    return (scheduler, request.opened.tenant, request.opened.request)


def _ended(scheduler: str, close: Close, index: int, reason: str) -> Tell:
    return Tell(scheduler, Ended(seq=close.seq, index=index, reason=reason))
